"""The gated delta rule as a recurrence that may be perturbed: where an honest kernel rounds, there is a site.

All runs of the perturbed oracle, all sequences and all judged heads go side by side, token after token, so that the
time that it takes is that of the longest sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...reference.kda import transformed
from ..contract import UNIT_ROUNDOFF, Contract, Precision
from ..perturbed import Rounded

# operands of products meet them in the kernel's format
OPERANDS = ("query", "key", "written key", "recalled", "inverse", "error", "read")
SINGLE: tuple[str, ...] = ("norm", "write", "total", "sum")
# formats that hold every number of another
HELD_BY: dict[Precision, tuple[Precision, ...]] = {
    "fp64": ("fp64",),
    "fp32": ("fp64", "fp32"),
    "fp16": ("fp64", "fp32", "tf32", "fp16"),
    "bf16": ("fp64", "fp32", "tf32", "bf16"),
}
# float32 roundoffs by which an exponential, a root or a quotient may err: PTX documents 2^-22 for the approximations
ELEMENTARY = 4.0
# a sigmoid is an exponential and a quotient, a softplus an exponential and a logarithm: two that err on their own
GATE = 2**0.5 * ELEMENTARY
# tokens of the longest chunk: a rounded write of the chunk is seen by its outputs, but its predictions were made before
CHUNK = 64
# tokens of the longest block whose inverse may be an operand: with more, keys that look one way add too many slips up
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Sequences after the gate and the norm, float64; heads are value heads.

    Attributes:
        q: ``[T, h, K]``.
        k: ``[T, h, K]``.
        v: ``[T, h, V]``.
        g: ``[T, h, K]``, natural log of the decay.
        beta: ``[T, h]``, write strength.
        initial: ``[N, h, K, V]``.
        scale: Factor on the output.
        bounds: ``N + 1`` offsets of the sequences.
        gated: Whether the log decay is computed from logits, not given.
        kept: ``(sequence, tokens)`` of each state that is wanted on the way.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial: Tensor
    scale: float
    bounds: tuple[int, ...]
    gated: bool
    kept: tuple[tuple[int, int], ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Of each sequence."""
        return [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]


def layer_of(arguments: Mapping[str, Any], heads: Sequence[int] | None = None) -> tuple[Tensor, ...]:
    """``q, k, v, g, beta`` of some value heads as the recurrence takes them, from the arguments of a kernel.

    Args:
        arguments: Of ``reference.kda.kda``, in any dtype.
        heads: Value heads; all without.
    """

    def wide(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    total, group = arguments["v"].shape[1], arguments["v"].shape[1] // arguments["q"].shape[1]
    picked = torch.arange(total) if heads is None else torch.tensor(heads)
    picked = picked.to(arguments["v"].device)
    # a head takes its own key head along, and is its whole group
    q, k = (wide(arguments[name][:, picked // group]) for name in ("q", "k"))
    v, g, beta = (wide(arguments[name][:, picked]) for name in ("v", "g", "beta"))
    own = {name: None if arguments[name] is None else wide(arguments[name])[picked] for name in ("A_log", "dt_bias")}
    names = ("gate", "lower_bound", "beta_is_logits", "qk_l2norm")
    options: dict[str, Any] = own | {name: arguments[name] for name in names}
    q, k, g, beta = transformed(q, k, g, beta, **options)
    return q, k, v, g, beta


def sites_of(contract: Contract, stored: Precision) -> dict[str, Precision]:
    """The format to which a kernel may round at each site.

    Args:
        contract: Of the kernel.
        stored: Format of the inputs.
    """
    operand: Precision = contract.p
    if contract.inputs is not None and UNIT_ROUNDOFF[contract.inputs] > UNIT_ROUNDOFF[operand]:
        operand = contract.inputs
    sites = dict.fromkeys(OPERANDS, operand) | dict.fromkeys(SINGLE, "fp32")
    # values enter as they are stored, and are exact in any format that holds those
    value: Precision = "fp64" if operand in HELD_BY[stored] else operand
    return sites | {"value": value} | contract.formats({"gate": "logits", "state": "state"})


def coarse(rounded: Rounded, site: str, value: Tensor, roundoffs: float) -> Tensor:
    """A value with so many times the noise of its site."""
    return value + roundoffs * (rounded(site, value) - value)


@dataclass(slots=True, kw_only=True)
class _Block:
    """The tokens of a block so far, ``b`` of them, whose inverse is an operand: each of its entries is rounded.

    Attributes:
        keys: ``[runs, n, h, b, K]``, decayed up to now.
        rows: ``[runs, n, h, b, BLOCK]``, of the inverse.
        left: ``[runs, n, h, b, V]``, of each value what the state before the block does not recall.
    """

    keys: Tensor
    rows: Tensor
    left: Tensor

    @classmethod
    def empty(cls, state: Tensor) -> "_Block":
        """Before its first token, beside a state."""
        *shape, keys, values = state.shape
        widths = {"keys": keys, "rows": BLOCK, "left": values}
        return cls(**{name: state.new_empty(*shape, 0, width) for name, width in widths.items()})

    def cut(self, count: int) -> None:
        """Go on with the first sequences alone."""
        self.keys, self.rows, self.left = self.keys[:, :count], self.rows[:, :count], self.left[:, :count]

    def slip(self, key: Tensor, decay: Tensor, write: Tensor, left: Tensor, rounded: Rounded) -> Tensor:
        """Take one token, ``T_i = b_i (e_i - sum_l (k_i . k_l) T_l)``; what rounding this row does to its error.

        Equal tokens have equal entries along a diagonal: they err alike, and so do the errors that they make.
        """
        self.keys = decay[..., None, :] * self.keys
        gram = torch.einsum("...bk,...k->...b", self.keys, key)
        row = -write[..., None] * torch.einsum("...b,...bj->...j", gram, self.rows)
        row[..., self.keys.shape[-2]] = write
        self.keys = torch.cat([self.keys, key[..., None, :]], -2)
        self.rows = torch.cat([self.rows, row[..., None, :]], -2)
        self.left = torch.cat([self.left, left[..., None, :]], -2)
        off = (rounded("inverse", row) - row)[..., : self.left.shape[-2]]
        return torch.einsum("...b,...bv->...v", off, self.left)


@dataclass(slots=True, kw_only=True)
class _Walk:
    """States on their way, those of the longest sequences first; ``[runs, n, h, K, V]`` or ``[runs, n, h, K]``.

    Attributes:
        block: The tokens since ``before``.
        state: What the next prediction is made from.
        before: What the state before the block has decayed to.
        unseen: What rounding the writes of a chunk adds to it for outputs and later chunks.
        power: Squares of the terms that make up the state.
        total: Log decay since the chunk began.
        drift: Error of the last prefix sum of log decays.
    """

    block: _Block
    state: Tensor
    before: Tensor
    unseen: Tensor
    power: Tensor
    total: Tensor
    drift: Tensor

    def cut(self, count: int) -> None:
        """Go on with the first sequences alone: the others have ended."""
        for name in ("state", "before", "unseen", "power", "total", "drift"):
            setattr(self, name, getattr(self, name)[:, :count])
        self.block.cut(count)

    def join(self) -> None:
        """Begin a chunk."""
        self.state = self.state + self.unseen
        self.unseen, self.total = torch.zeros_like(self.unseen), torch.zeros_like(self.total)
        self.drift = torch.zeros_like(self.drift)

    def begin(self) -> None:
        """Begin a block."""
        self.before, self.block = self.state + self.unseen, _Block.empty(self.state)


def kda_recurrence(tokens: Tokens, rounded: Rounded, runs: int) -> dict[str, Tensor]:
    """``out``, ``final state`` and ``checkpoints`` of so many runs, ``[runs, ...]``: see ``harness.perturbed``."""
    lengths = torch.tensor(tokens.lengths)
    order = torch.argsort(lengths, descending=True, stable=True)
    first, left = torch.tensor(tokens.bounds[:-1])[order], lengths[order].tolist()
    device = tokens.v.device
    state = tokens.initial[order.to(device)].expand(runs, *tokens.initial.shape)
    zero = torch.zeros_like(state)
    flat = zero[..., 0]
    block = _Block.empty(state)
    walk = _Walk(block=block, state=state, before=state, unseen=zero, power=state.square(), total=flat, drift=flat)
    out = torch.zeros(runs, tokens.bounds[-1], *tokens.v.shape[1:], dtype=torch.float64, device=device)
    final = torch.zeros(runs, *tokens.initial.shape, dtype=torch.float64, device=device)
    kept = torch.zeros(runs, len(tokens.kept), *tokens.initial.shape[1:], dtype=torch.float64, device=device)
    place = {sequence: at for at, sequence in enumerate(order.tolist())}
    # the same for every token: how far a sum of so many products strays, in roundoffs of the root of their squares
    terms = tokens.q.shape[2] ** 0.5
    active = len(left)
    for t in range(max(left, default=0) + 1):
        if t % CHUNK == 0:
            walk.join()
        if t % BLOCK == 0:
            walk.begin()
        for index, (owner, wanted) in enumerate(tokens.kept):
            if wanted == t:
                kept[:, index] = (walk.state + walk.unseen)[:, place[owner]]
        while active and left[active - 1] == t:
            active -= 1
            final[:, order[active]] = (walk.state + walk.unseen)[:, active]
        if active == 0:
            break
        walk.cut(active)
        rows = (first[:active] + t).to(device)
        out[:, rows] = _token(walk, tokens, rows, rounded, runs, terms)
    return {"out": out, "final state": final, "checkpoints": kept}


def _token(walk: _Walk, tokens: Tokens, rows: Tensor, rounded: Rounded, runs: int, terms: float) -> Tensor:
    """Take one token of each sequence; its output, ``[runs, n, h, V]``."""
    q, k, v, g, beta = (
        x[rows].expand(runs, len(rows), *x.shape[1:]) for x in (tokens.q, tokens.k, tokens.v, tokens.g, tokens.beta)
    )
    # a kernel exponentiates differences of prefix sums: what it errs by in one it takes back in the next
    walk.total = walk.total + g
    drift = rounded("total", walk.total) - walk.total
    log_decay = coarse(rounded, "gate", g, 1.0)
    if tokens.gated:
        log_decay = log_decay + coarse(rounded, "norm", g, GATE) - g
    decay = (log_decay + drift - walk.drift).exp() * coarse(rounded, "norm", torch.ones_like(g), ELEMENTARY)
    walk.drift = drift
    walk.state, walk.unseen = decay[..., None] * walk.state, decay[..., None] * walk.unseen
    walk.before = decay[..., None] * walk.before
    walk.power = walk.power * g.exp().square()[..., None]
    one = torch.ones_like(beta)[..., None]
    query = rounded("query", q) * coarse(rounded, "norm", one, ELEMENTARY)
    normed = k * coarse(rounded, "norm", one, ELEMENTARY)
    # a chunk adds its writes up when it reads them, so its sums err in proportion to the writes
    size = walk.power.sqrt()
    recalled = rounded("recalled", walk.state) + (coarse(rounded, "sum", size, terms) - size)
    told = torch.einsum("...kv,...k->...v", recalled, rounded("key", normed))
    # the sum may start from the value, and then rounds at its size every time
    told = told + coarse(rounded, "sum", v, terms) - v
    write = coarse(rounded, "write", beta, ELEMENTARY)[..., None]
    error = write * (rounded("value", v) - told)
    # in a block the error is an inverse times what the state before it leaves
    left = v - torch.einsum("...kv,...k->...v", walk.before, normed)
    slip = walk.block.slip(normed, decay, write[..., 0], left, rounded)
    added = normed[..., None] * error[..., None, :]
    written = rounded("written key", normed)[..., None] * (rounded("error", error) + slip)[..., None, :]
    walk.unseen = walk.unseen + written - added
    walk.state = rounded("state", walk.state + added)
    walk.power = walk.power + added.square()
    size = walk.power.sqrt()
    read = rounded("read", walk.state + walk.unseen) + (coarse(rounded, "sum", size, terms) - size)
    return tokens.scale * torch.einsum("...kv,...k->...v", read, query)
