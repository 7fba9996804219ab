"""The cases of ``kda_step`` by tier: a few tokens a sequence, from and to slots of a pool that holds much else."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..batches import MANY, crowd, log_uniform
from ..case import Case
from ..operation import CaseRequest
from ._draw import Draw
from ._kda_inputs import EXACT, FADING, NEAR_EXACT, scale_of

NIGHTLY_CASES = 30
CPU_ELEMENTS = 1 << 20
# those that say something in a few tokens
FAMILIES = ("diffuse", "slow", "fast", "converged", "tiny", "forgetting", "runs", EXACT, NEAR_EXACT, FADING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """How the arguments of a case are given, see ``_kda_inputs`` and ``_kda_step_inputs``.

    Attributes:
        gate: ``bounded``, ``softplus`` or ``log``.
        bound: Of a bounded gate, without its sign.
        amplitude: Whether there are ``A_log`` and ``dt_bias``.
        beta_is_logits: Whether ``beta`` is.
        qk_l2norm: Whether queries and keys are normalised by the kernel.
        state_dtype: Of the pool.
        state_layout: ``KV`` or ``VK``.
        offsets: Dtype of all tables.
        layout: ``apart`` or ``projection``.
        tail: Rows past the last sequence.
        accepted: ``none`` (every sequence starts from its first column), ``sweep`` (1, 2, ...) or ``drawn``.
        pool: How slots lie in memory: ``packed``, ``padded`` with a gap behind each, ``heads`` first.
        padding: Every so manieth sequence is padding; 0 for none.
        dropped: Whether some states have no slot.
    """

    gate: str = "bounded"
    bound: float = 5.0
    amplitude: bool = True
    beta_is_logits: bool = True
    qk_l2norm: bool = True
    state_dtype: str = "float32"
    state_layout: str = "KV"
    offsets: str = "int32"
    layout: str = "apart"
    tail: int = 1
    accepted: str = "sweep"
    pool: str = "packed"
    padding: int = 0
    dropped: bool = False


PLAIN = StepForm()
FORMS = (
    StepForm(layout="projection", pool="padded", padding=3),
    StepForm(gate="softplus", state_layout="VK", offsets="int64", accepted="none", tail=0),
    StepForm(gate="log", beta_is_logits=False, qk_l2norm=False, pool="heads", dropped=True),
    StepForm(bound=3.0, amplitude=False, state_dtype="bfloat16", state_layout="VK", padding=2, pool="padded"),
    StepForm(gate="softplus", amplitude=False, state_dtype="bfloat16", layout="projection", accepted="drawn"),
    StepForm(gate="log", offsets="int64", tail=5, padding=4, dropped=True),
)
INTEGERS = StepForm(gate="log", beta_is_logits=False, qk_l2norm=False, padding=3, dropped=True)
SMALL = ((2, 2, 16, 20), (1, 3, 20, 16), (2, 4, 12, 24), (1, 2, 24, 8))
# plain decoding, drafts of several lengths, empty sequences anywhere
LENS = ([1, 1, 1, 1], [3, 0, 2, 1], [0, 4, 1, 0, 4], [2, 2, 2], [5, 1, 0, 3, 2, 0])
COLUMNS = (1, 4, 4, 3, 6)


def kda_step_cases(request: CaseRequest, op: str) -> list[Case]:
    """Smoke: every family and form. Full: all dtypes and models. Nightly: all is drawn."""
    draw = _Draw(request, op)
    for turn, family in enumerate(FAMILIES):
        draw.add(family, draw.dtype(turn), 1 + turn % (len(LENS) - 1), SMALL[turn % len(SMALL)], _form(family, turn))
    for turn, form in enumerate(FORMS):
        draw.add("diffuse", draw.dtype(turn + 1), turn % len(LENS), SMALL[turn % len(SMALL)], form)
    # logits whose exponential leaves float32
    draw.add("forgetting", draw.dtype(0), 4, SMALL[2], FORMS[1])
    # what an interpreted kernel can take
    for turn in range(2):
        draw.add("slow", draw.dtype(turn), 1, (1, 1, 16, 20), (FORMS[0], PLAIN)[turn])
    draw.add("diffuse", draw.dtype(2), 3, (1, 1, 128, 128), FORMS[3])
    # tokens enough for a state that is carried in the format of the pool, of operands in it as well
    draw.add_batch(FADING, draw.dtype(2), [9, 0, 3, 12], 12, SMALL[0], replace(FORMS[3], padding=0))
    draw.add_batch("slow", draw.dtype(0), crowd(MANY).query_lens, 3, (1, 2, 8, 12), PLAIN)
    if request.tier != "smoke":
        for at, dtype in enumerate(request.dtypes):
            for turn, family in enumerate(FAMILIES):
                draw.add(family, dtype, (turn + at) % len(LENS), SMALL[(turn + at) % len(SMALL)], _form(family, at))
            for turn, form in enumerate(FORMS):
                draw.add("diffuse", dtype, turn % len(LENS), (2, 4, 128, 128), form)
                draw.add("slow", dtype, 4, (1, 2, 60, 100), form)
            draw.add_batch("slow", dtype, [1 + at % 4 for at in range(64)], 4, (32, 32, 128, 128), PLAIN)
    if request.tier == "nightly":
        for _ in range(NIGHTLY_CASES):
            _nightly_case(draw)
    return draw.cases


def _form(family: str, turn: int) -> StepForm:
    if family == EXACT:
        return INTEGERS
    if family == NEAR_EXACT:
        return StepForm(tail=0, padding=2)
    if family == "forgetting":
        return FORMS[5]
    if family == FADING:
        # by the only thing that tells a pool in bfloat16 from a state in bfloat16
        return replace(FORMS[4], gate=("softplus", "bounded", "log")[turn % 3])
    return (PLAIN, *FORMS)[turn % (1 + len(FORMS))]


def _nightly_case(draw: "_Draw") -> None:
    rng = draw.rng
    heads = log_uniform(rng, 1, 6)
    model = (heads, heads * int(rng.integers(1, 5)), log_uniform(rng, 4, 256), log_uniform(rng, 4, 256))
    family = str(rng.choice([name for name in FAMILIES if name not in (EXACT, NEAR_EXACT)]))
    form = StepForm(
        gate="log" if family == "forgetting" else str(rng.choice(["bounded", "softplus", "log"])),
        bound=float(np.round(rng.uniform(0.1, 5.0), 3)),
        amplitude=bool(rng.integers(2)),
        beta_is_logits=bool(rng.integers(2)),
        qk_l2norm=bool(rng.integers(2)) or family == "tiny",
        state_dtype=str(rng.choice(["float32", "bfloat16"])),
        state_layout=str(rng.choice(["KV", "VK"])),
        offsets=str(rng.choice(["int32", "int64"])),
        layout=str(rng.choice(["apart", "projection"])),
        tail=int(rng.integers(3)),
        accepted=str(rng.choice(["none", "sweep", "drawn"])),
        pool=str(rng.choice(["packed", "padded", "heads"])),
        padding=int(rng.choice([0, 2, 3])),
        dropped=bool(rng.integers(2)),
    )
    columns = log_uniform(rng, 1, 9)
    # a last sequence with tokens, so that a step is never empty
    lens = [int(rng.integers(columns + 1)) for _ in range(log_uniform(rng, 1, 12))]
    draw.add_batch(family, draw.dtype(int(rng.integers(9))), [*lens, columns], columns, model, form)


class _Draw(Draw):
    """Draws cases from the seed of the request."""

    def __init__(self, request: CaseRequest, op: str) -> None:
        super().__init__(request, op, op.encode())

    def add(self, family: str, dtype: str, batch: int, model: tuple[int, int, int, int], form: StepForm) -> None:
        self.add_batch(family, dtype, LENS[batch], COLUMNS[batch], model, form)

    def add_batch(
        self, family: str, dtype: str, lens: list[int], columns: int, model: tuple[int, int, int, int], form: StepForm
    ) -> None:
        heads, v_heads, d_k, d_v = model
        if self.request.heads is not None:
            v_heads, heads = self.request.heads * (v_heads // heads), self.request.heads
        sizes: dict[str, Any] = {
            "num_heads": heads,
            "num_v_heads": v_heads,
            "head_dim_k": d_k,
            "head_dim_v": d_v,
            "scale": scale_of(family, d_k),
            "seq_lens": list(lens),
            "columns": columns,
            **asdict(form),
        }
        work = v_heads * d_k * d_v * sum(lens)
        self.append(family, dtype, sizes, needs_device=work > CPU_ELEMENTS)
