"""What the tensors of ``kda`` and ``kda_step`` look like in each family: values that break kernels, each its own kind.

Sizes of a case: ``seq_lens``, ``tail`` (rows past the last sequence, full of NaN), ``num_heads``, ``num_v_heads``,
``head_dim_k``, ``head_dim_v``, ``scale``; ``gate``, ``bound`` (of a bounded one, without its sign), ``amplitude``
(whether there are ``A_log`` and ``dt_bias``), ``beta_is_logits``, ``qk_l2norm``; ``state_dtype``, ``state_layout``;
``layout``: five tensors ``apart``, or columns of the rows of one ``projection``.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..answers import dtype_of
from ..case import Case
from ..poison import Ledger

TOKENS = ("q", "k", "v", "g", "beta")
# in which no rounding takes place, so that all that is right is equal
EXACT = "exact-one-hot"
# the same with a gate and a norm, which round integers to themselves all but the last bit
NEAR_EXACT = "near-one-hot"
# of steps alone: what carries a state in bfloat16 from token to token is told within a few of them
FADING = "fading"
# log decay of each token there: less than half a spacing of bfloat16 anywhere, so that a state rounded at each stays
FADE = 2.0**-9.5
# integers no larger than this are exact in any format, and so are differences of two
MOST = 32
# elements of NaN between the rows of a projection
GAP = 24


def scale_of(family: str, d_k: int) -> float:
    """Of the models, a power of 2 where all is exact, and one that follows from no width: it is an argument."""
    if family in (EXACT, NEAR_EXACT):
        return 2.0 ** -round(math.log2(d_k) / 2)
    return 0.7 if family == "slow" else d_k**-0.5


def drawn_tokens(case: Case) -> dict[str, Tensor]:
    """``q, k, v, g, beta`` in float64, without the tail, and ``initial``, ``[N, HV, K, V]``, ``A_log``, ``dt_bias``.

    Raises:
        ValueError: If there is no such family, or value heads are no whole groups.
    """
    generator = torch.Generator().manual_seed(case.seed)
    sizes = case.sizes
    if case.family not in (*FAMILIES, FADING):
        raise ValueError(f"family must be one of {', '.join((*FAMILIES, FADING))}, got {case.family!r}")
    if sizes["num_v_heads"] % sizes["num_heads"]:
        heads = sizes["num_heads"]
        raise ValueError(f"num_v_heads must be a multiple of num_heads {heads}, got {sizes['num_v_heads']}")
    h, hv, d_k, d_v = (sizes[name] for name in ("num_heads", "num_v_heads", "head_dim_k", "head_dim_v"))
    tokens, count = sum(sizes["seq_lens"]), len(sizes["seq_lens"])

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    found = {"q": normal(tokens, h, d_k), "k": normal(tokens, h, d_k), "v": normal(tokens, hv, d_v)}
    found |= {"g": normal(tokens, hv, d_k), "beta": normal(tokens, hv)}
    found |= {"A_log": 0.3 * normal(hv), "dt_bias": 0.5 * normal(hv, d_k)}
    # neither square nor alike along its axes, so that a transposed state shows
    found["initial"] = 0.4 * normal(count, hv, d_k, d_v) * torch.linspace(0.2, 1.0, d_k).double()[:, None]
    if case.family in (EXACT, NEAR_EXACT):
        _one_hot(found, generator)
    elif case.family == FADING:
        _fading(found, sizes)
    elif case.family != "diffuse":
        _FAMILIES[case.family](found, sizes, generator)
    if not sizes["qk_l2norm"] and case.family != EXACT:
        # longer keys would let the state grow
        found |= {name: torch.nn.functional.normalize(found[name], dim=-1) for name in ("q", "k")}
    if sizes["gate"] == "log" and case.family != EXACT:
        found["g"] = -torch.nn.functional.softplus(found["g"])
    if not sizes["beta_is_logits"] and case.family != EXACT:
        found["beta"] = found["beta"].sigmoid()
    if case.family == "forgetting":
        gone = torch.rand(tokens, generator=generator) < 0.2
        # of few tokens none might be drawn
        gone[::7] = True
        # after the gate e^-1000, or as much as a bounded one takes
        found["g"][gone] = -1000.0 if sizes["gate"] == "log" else 500.0
    return found


def _level(found: dict[str, Tensor], g: float, beta: float | None = None) -> None:
    """One logit for all gates, and one for all writes; no amplitude and no bias, so that they stay what they are."""
    found["g"].fill_(g)
    found["A_log"].zero_(), found["dt_bias"].zero_()
    if beta is not None:
        found["beta"].fill_(beta)


def _slow(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """A tenth of the channels hardly decays."""
    found["A_log"].zero_(), found["dt_bias"].zero_()
    found["g"][..., :: 10 if sizes["head_dim_k"] > 10 else 3] = -9.0


def _u01(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """Keys that all look one way, which hardly decay and are written almost whole: inverses are far from 1."""
    _level(found, -8.0, 4.0)
    for name in ("q", "k", "v"):
        found[name] = torch.rand(found[name].shape, generator=generator, dtype=torch.float64)


def _runs(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """Runs of 16 equal tokens."""
    _level(found, -8.0)
    first = torch.arange(len(found["q"])) // 16 * 16
    strengths = torch.rand(found["beta"].shape, generator=generator, dtype=torch.float64)
    found["beta"] = 2.0 + 4.0 * strengths[first]
    found |= {name: found[name][first] for name in ("q", "k", "v")}


def _alternating(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """One key, whose sign changes with every token: what a chunk writes cancels."""
    _level(found, -8.0, 4.0)
    sign = 1.0 - 2.0 * (torch.arange(len(found["k"])) % 2)
    found["k"] = found["k"][:1] * sign[:, None, None]


def _fast(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """All channels decay as fast as the gate lets them."""
    _level(found, 8.0)


def _hold(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """A burst of writes, and then a state that is hardly touched: what its format loses is never made good."""
    found["A_log"].zero_(), found["dt_bias"].zero_()
    found["g"] = -9.0 - 3.0 * torch.rand(found["g"].shape, generator=generator, dtype=torch.float64)
    start = 0
    for length in sizes["seq_lens"]:
        found["beta"][start : start + min(16, length)] = 2.0
        found["beta"][start + min(16, length) : start + length] = -9.0
        start += length


def _fading(found: dict[str, Tensor], sizes: dict[str, Any]) -> None:
    """All channels decay by next to nothing, and next to nothing is written."""
    bounded = sizes["gate"] == "bounded"
    _level(found, math.log(FADE / (sizes["bound"] - FADE)) if bounded else math.log(math.expm1(FADE)), -9.0)


def _converged(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """Values that a large state recalls all but right: a prediction that is rounded leaves nothing of the error."""
    _level(found, -12.0, 1.0)
    found["initial"] = found["initial"] * 4096.0
    start, group = 0, found["v"].shape[1] // found["k"].shape[1]
    for sequence, length in enumerate(sizes["seq_lens"]):
        keys = torch.nn.functional.normalize(found["k"][start : start + length], dim=-1)
        keys = keys.repeat_interleave(group, dim=1)
        recalled = torch.einsum("thk,hkv->thv", keys, found["initial"][sequence])
        found["v"][start : start + length] += recalled
        start += length


def _tiny(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """Queries and keys of 0, or so small that the norm's epsilon counts."""
    for at, name in enumerate(("q", "k")):
        found[name][at::3] *= 1e-4
        found[name][at + 1 :: 7] = 0.0


def _plain(found: dict[str, Tensor], sizes: dict[str, Any], generator: torch.Generator) -> None:
    """Changed elsewhere."""


_FAMILIES = {
    "slow": _slow,
    "u01": _u01,
    "runs": _runs,
    "alternating": _alternating,
    "fast": _fast,
    "hold": _hold,
    "converged": _converged,
    "tiny": _tiny,
    "forgetting": _plain,
    "poisoned": _plain,
}
FAMILIES = ("diffuse", *_FAMILIES, EXACT, NEAR_EXACT)


def _one_hot(found: dict[str, Tensor], generator: torch.Generator) -> None:
    """Few channels, each met again and again, integers, nothing forgotten, and writes that are whole or none."""
    for name in ("q", "k"):
        rows, channels = found[name].shape[:2], min(5, found[name].shape[2])
        picked = torch.randint(channels, rows, generator=generator)
        # large, so that the epsilon of a norm is nothing beside it
        found[name] = torch.nn.functional.one_hot(picked, found[name].shape[2]).double()
    for name in ("v", "initial"):
        found[name] = torch.randint(-MOST, MOST + 1, found[name].shape, generator=generator).double()
    found["beta"] = torch.randint(2, found["beta"].shape, generator=generator).double()
    for name in ("g", "A_log", "dt_bias"):
        found[name].zero_()


def near_exact(found: dict[str, Tensor]) -> None:
    """The logits and lengths whose gate, sigmoid and norm are those of one-hot keys."""
    found["q"], found["k"] = found["q"] * 4096.0, found["k"] * 4096.0
    found["g"].fill_(-2000.0)
    found["beta"] = 4000.0 * found["beta"] - 2000.0


def poisoned_sequences(case: Case) -> list[int]:
    """Sequences whose tokens are NaN throughout: every other one."""
    if case.family != "poisoned":
        return []
    return [at for at, length in enumerate(case.sizes["seq_lens"]) if at % 2 == 1 and length]


def layer_arguments(case: Case, found: dict[str, Tensor], ledger: Ledger, device: torch.device) -> dict[str, Any]:
    """Tokens and parameters, guarded and stored as the case says."""
    sizes, dtype = case.sizes, dtype_of(case.dtype)
    if case.family == NEAR_EXACT:
        near_exact(found)
    start = 0
    for sequence, length in enumerate(sizes["seq_lens"]):
        if sequence in poisoned_sequences(case):
            for name in TOKENS:
                found[name][start : start + length] = torch.nan
        start += length
    rows = {name: torch.cat([found[name], found[name].new_full((sizes["tail"], *found[name].shape[1:]), torch.nan)])
            for name in TOKENS}  # fmt: skip
    dtypes = dict.fromkeys(TOKENS, dtype)
    if sizes["layout"] == "projection":
        arguments = _projection(rows, ledger, dtype, device)
    else:
        # logarithms of decays and strengths come out of kernels in float32
        dtypes |= {"g": torch.float32} if sizes["gate"] == "log" else {}
        dtypes |= {} if sizes["beta_is_logits"] else {"beta": torch.float32}
        arguments = {name: ledger.guarded(name, rows[name].to(dtypes[name]), device) for name in TOKENS}
    wanted = sizes["amplitude"] and sizes["gate"] != "log"
    for name in ("A_log", "dt_bias"):
        arguments[name] = ledger.guarded(name, found[name].float(), device) if wanted else None
    return arguments | {
        "scale": sizes["scale"],
        "gate": sizes["gate"],
        "lower_bound": -sizes["bound"] if sizes["gate"] == "bounded" else None,
        "beta_is_logits": sizes["beta_is_logits"],
        "qk_l2norm": sizes["qk_l2norm"],
    }


def _projection(rows: dict[str, Tensor], ledger: Ledger, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Views of the rows of one projection, with NaN beside them."""
    widths = [rows[name][0].numel() if len(rows[name]) else 0 for name in TOKENS]
    together = torch.cat([rows[name].flatten(1) for name in TOKENS], dim=1).to(dtype)
    width = sum(widths)
    inner = ledger.guarded_view(
        "projection", together, device, lambda buffer: buffer[..., GAP // 2 : GAP // 2 + width], width=width + GAP
    )
    parts = inner.split(widths, dim=1)
    return {name: part.unflatten(1, rows[name].shape[1:]) for name, part in zip(TOKENS, parts, strict=True)}


def states(name: str, values: Tensor, case: Case, ledger: Ledger, device: torch.device) -> Tensor:
    """States seen as ``[..., K, V]``, in memory as the case says."""
    stored = values.to(dtype_of(case.sizes["state_dtype"]))
    if case.sizes["state_layout"] == "KV":
        return ledger.guarded(name, stored, device)
    return ledger.guarded(name, stored.mT.contiguous(), device).mT
