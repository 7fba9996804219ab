"""The cases of ``kda`` by tier: packed sequences around the sizes of chunks, every gate, every form of arguments."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..batches import MANY, crowd, log_uniform
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._kda_inputs import EXACT, FAMILIES, NEAR_EXACT, scale_of

NIGHTLY_CASES = 30
# elements of states times the tokens of the longest sequence up to which a CPU takes the oracle's runs
CPU_ELEMENTS = 1 << 19


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the arguments of a case are given, see ``_kda_inputs``.

    Attributes:
        gate: ``bounded``, ``softplus`` or ``log``.
        bound: Of a bounded gate, without its sign.
        amplitude: Whether there are ``A_log`` and ``dt_bias``.
        beta_is_logits: Whether ``beta`` is.
        qk_l2norm: Whether queries and keys are normalised by the kernel.
        initial: Whether there are initial states.
        checkpoints: ``some`` states on the way, or ``none``.
        state_dtype: Of states in memory.
        state_layout: ``KV`` or ``VK``, how states that are seen as ``[K, V]`` lie in memory.
        offsets: Dtype of ``cu_seqlens``.
        layout: ``apart`` or ``projection``.
        tail: Rows past the last sequence.
    """

    gate: str = "bounded"
    bound: float = 5.0
    amplitude: bool = True
    beta_is_logits: bool = True
    qk_l2norm: bool = True
    initial: bool = True
    checkpoints: str = "none"
    state_dtype: str = "float32"
    state_layout: str = "KV"
    offsets: str = "int32"
    layout: str = "apart"
    tail: int = 2


PLAIN = Form()
# one after the other; together every value of every field, beside several values of the others
FORMS = (
    Form(checkpoints="some", layout="projection", offsets="int64"),
    Form(gate="softplus", initial=False, state_layout="VK"),
    Form(gate="log", beta_is_logits=False, qk_l2norm=False, checkpoints="some", tail=0),
    Form(bound=3.0, amplitude=False, state_dtype="bfloat16", state_layout="VK", checkpoints="some"),
    Form(gate="softplus", amplitude=False, qk_l2norm=False, state_dtype="bfloat16", layout="projection", tail=0),
    Form(gate="log", initial=False, checkpoints="some", state_dtype="bfloat16", offsets="int64", tail=40),
    Form(bound=0.5, beta_is_logits=False, state_layout="VK", checkpoints="some", layout="projection"),
)
# what FlashKDA and its like serve
MODEL = Form(checkpoints="none", tail=0)
INTEGERS = Form(gate="log", beta_is_logits=False, qk_l2norm=False, checkpoints="some")
# key heads, value heads, channels of keys and values; what is asked of the models comes as 128
SMALL = ((2, 2, 16, 20), (1, 3, 20, 16), (2, 4, 12, 24), (1, 2, 24, 8))
WIDE = (1, 1, 128, 128)
# no token, one, around 16, 32, 64 and 128
EDGES = ([1, 15, 16, 17], [0, 31, 33, 0], [63, 1, 64, 0], [65, 0, 2], [129, 3], [127, 0, 128])


def kda_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family and form, edges. Full: all dtypes, models, long sequences. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for turn, family in enumerate(FAMILIES):
        dtype, model = draw.dtype(turn), SMALL[turn % len(SMALL)]
        draw.add(family, dtype, _lens(family, turn), model, _form(family, turn))
    for turn, form in enumerate(FORMS):
        draw.add("diffuse", draw.dtype(turn + 1), EDGES[turn % len(EDGES)], SMALL[turn % len(SMALL)], form)
    # what only a state in a low format, or of many steps, shows
    draw.add("hold", draw.dtype(0), [350], (1, 2, 8, 16), replace(PLAIN, amplitude=False))
    draw.add("slow", draw.dtype(2), [260, 5], (1, 1, 12, 16), replace(PLAIN, checkpoints="some"))
    draw.add("converged", draw.dtype(0), [24], (1, 1, 64, 16), PLAIN)
    draw.add("diffuse", draw.dtype(1), [0, 0, 0], SMALL[0], FORMS[3])
    draw.add("diffuse", draw.dtype(2), [16, 0, 3], WIDE, MODEL)
    # logits whose exponential leaves float32
    draw.add("forgetting", draw.dtype(0), [20, 0, 3], SMALL[2], FORMS[1])
    # as much as an interpreted kernel can take
    for turn, family in enumerate(("runs", "slow")):
        draw.add(family, draw.dtype(turn), [[33], [0, 17]][turn], (1, 1, 16, 20), replace(FORMS[turn], initial=True))
    draw.add("slow", draw.dtype(0), crowd(MANY).query_lens, (1, 2, 8, 12), replace(PLAIN, checkpoints="some"))
    if request.tier != "smoke":
        _full_cases(draw)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _lens(family: str, turn: int) -> list[int]:
    """Lengths for which a family says something: repeated keys want whole chunks, poison an unfinished one before."""
    if family == "poisoned":
        return [37, 20, 5, 17]
    if family in ("u01", "runs", "alternating"):
        return [70, 0, 33]
    return [5, 0, 1, 16, 17, 34] if turn % 2 else [40, 3, 0, 64]


def _form(family: str, turn: int) -> Form:
    if family == EXACT:
        return INTEGERS
    if family in (NEAR_EXACT, "converged"):
        return PLAIN if family == "converged" else replace(MODEL, checkpoints="some")
    if family == "forgetting":
        return replace(FORMS[2], qk_l2norm=True)
    return (PLAIN, *FORMS)[turn % (1 + len(FORMS))]


def _full_cases(draw: "_Draw") -> None:
    for at, dtype in enumerate(draw.request.dtypes):
        for turn, family in enumerate(FAMILIES):
            model = SMALL[(turn + at) % len(SMALL)]
            draw.add(family, dtype, draw.lens(3, 150), model, _form(family, turn + at + 1))
            if family not in ("forgetting", EXACT) and (dtype == "bfloat16" or turn < 3):
                # the sizes of the models, too long for a CPU
                draw.add(family, dtype, draw.lens(5, 700), (4, 4, 128, 128), MODEL)
        for lens in EDGES:
            draw.add("diffuse", dtype, lens, SMALL[at], FORMS[(at + len(lens)) % len(FORMS)])
        form = replace(PLAIN, checkpoints="some", state_layout="VK", layout="projection", amplitude=False)
        draw.add("slow", dtype, [70, 0, 129, 1, 16, 640], (2, 4, 128, 128), form)
        draw.add("diffuse", dtype, [90, 0, 33], (1, 2, 60, 100), FORMS[at])
    # long enough to be cut into segments, and for what a state in a low format never forgets
    draw.add("slow", draw.dtype(2), [8192, 100], (4, 4, 128, 128), replace(MODEL, amplitude=False))
    draw.add("hold", draw.dtype(2), [4096], (2, 2, 128, 128), replace(MODEL, amplitude=False))
    draw.add("diffuse", draw.dtype(2), [1300, 547, 2048, 963, 271, 3063], (32, 32, 128, 128), MODEL)


def _nightly_case(draw: "_Draw") -> None:
    rng = draw.rng
    heads = log_uniform(rng, 1, 6)
    model = (heads, heads * int(rng.integers(1, 5)), log_uniform(rng, 4, 256), log_uniform(rng, 4, 256))
    family = str(rng.choice([name for name in FAMILIES if name not in (EXACT, NEAR_EXACT)]))
    form = Form(
        gate="log" if family == "forgetting" else str(rng.choice(["bounded", "softplus", "log"])),
        bound=float(np.round(rng.uniform(0.1, 5.0), 3)),
        amplitude=bool(rng.integers(2)),
        beta_is_logits=bool(rng.integers(2)),
        qk_l2norm=bool(rng.integers(2)) or family == "tiny",
        initial=bool(rng.integers(3)),
        checkpoints=str(rng.choice(["some", "none"])),
        state_dtype=str(rng.choice(["float32", "bfloat16"])),
        state_layout=str(rng.choice(["KV", "VK"])),
        offsets=str(rng.choice(["int32", "int64"])),
        layout=str(rng.choice(["apart", "projection"])),
        tail=int(rng.integers(3)) * 7,
    )
    lens = draw.lens(int(rng.integers(1, 9)), log_uniform(rng, 8, 2000))
    draw.add(family, draw.dtype(int(rng.integers(9))), lens, model, form)


class _Draw(Draw):
    """Draws cases from the seed of the request."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, op.encode())

    def lens(self, count: int, longest: int) -> list[int]:
        """Uneven lengths, some of them 0, one of them the longest."""
        lens = [longest, *(log_uniform(self.rng, 1, longest) for _ in range(count - 1))]
        lens = [0 if at and self.rng.integers(5) == 0 else length for at, length in enumerate(lens)]
        return [int(lens[at]) for at in self.rng.permutation(count)]

    def add(self, family: str, dtype: str, lens: list[int], model: tuple[int, int, int, int], form: Form) -> None:
        heads, v_heads, d_k, d_v = model
        if self.request.heads is not None:
            v_heads = self.request.heads * (v_heads // heads)
            heads = self.request.heads
        sizes: dict[str, Any] = {
            "num_heads": heads,
            "num_v_heads": v_heads,
            "head_dim_k": d_k,
            "head_dim_v": d_v,
            "scale": scale_of(family, d_k),
            "seq_lens": list(lens),
            **asdict(form),
        }
        # what a state costs the oracle at every token, and an interpreted kernel at every chunk
        work = v_heads * d_k * d_v * max(sum(lens) // 4, *lens)
        self.append(family, dtype, sizes, needs_device=work > CPU_ELEMENTS)
