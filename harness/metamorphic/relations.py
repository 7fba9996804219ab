"""The metamorphic relations: each rearranges a case into questions whose answers follow from the first answer."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..case import Case
from ..contract import SUBNORMAL, Contract
from ..operation import Inputs
from .moves import Moves, Part

HUGE = 1e30
# powers of two for the values; float16 has no room below, where its subnormal numbers lose bits, and little above
POWERS = (12, -12)
POWER_FP16 = 3
STORES = ("out", "inputs", "splits_store", "projected", "pv_acc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A case with what its rearrangements depend on; the same for whoever asks and whoever judges.

    Attributes:
        case: The first question.
        inputs: Its inputs; rearranged in place, and restored after each question.
        contract: What the kernel promised.
        moves: The rearrangements of the operation.
        requests: ``[T]``, owner of each row of the answer.
        defined: ``[T]``, bool, rows that see no NaN; the others have no bits to compare.
        paged: Whether the kernel gets its keys in pages, wherever the operation puts them.
    """

    case: Case
    inputs: Inputs
    contract: Contract
    moves: Moves
    requests: Tensor
    defined: Tensor
    paged: bool

    @property
    def invariant(self) -> bool:
        """Whether equal bits are promised to a row in other company."""
        return self.contract.batch_invariant and self.contract.deterministic

    def generator(self, salt: int) -> torch.Generator:
        """A source of numbers of its own for each relation."""
        return torch.Generator().manual_seed(self.case.seed ^ (salt << 32))

    def question(self, *, case: Case | None = None, **changes: object) -> "Question":
        """The inputs as they are now, under ``case`` if it is another one."""
        part = case or self.case, self.inputs
        rows = self.defined.nonzero()[:, 0]
        base = Question(parts=(part,), whole=part, bits="must", rows=rows, place=rows)
        return replace(base, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask, and what the answer must be.

    Attributes:
        parts: Asked one by one; the answers of several are merged by log-sum-exp.
        whole: The case and the inputs that the answer belongs to.
        bits: Whether the answer must, may (then it need not be judged) or need not have the bits of the first one.
        rows: Tokens of the first answer that count.
        place: Where each of them is in the new answer.
        power: The power of two by which outputs grow.
        ends: End of each stretch of keys of each request, if it is not the operation's own.
        unused: What lies where no token does; NaN as everywhere if None.
        text: What was done, for reports.
    """

    parts: tuple[Part, ...]
    whole: Part
    bits: Literal["must", "may", "need not"]
    rows: Tensor
    place: Tensor
    power: int = 0
    ends: Sequence[tuple[int, ...]] | None = None
    unused: float | None = None
    text: str = ""


def _relabel(scene: Scene) -> Iterator[Question]:
    if scene.moves.relabel is not None:
        scene.moves.relabel(scene.inputs, scene.generator(1))
    if scene.moves.relabel is not None or scene.paged:
        # pages are drawn from the seed of the case: other pages, the same contents
        case = replace(scene.case, seed=scene.case.seed + 1) if scene.paged else scene.case
        yield scene.question(parts=((case, scene.inputs),))


def _unused_content(scene: Scene) -> Iterator[Question]:
    for value in (HUGE, 0.0):
        yield scene.question(unused=value, text=f"{value:g} where no token lies")


def _poisoned_neighbours(scene: Scene) -> Iterator[Question]:
    query_lens = scene.moves.query_lens(scene.case)
    count = len(query_lens)
    owners = torch.repeat_interleave(torch.arange(count), torch.tensor(query_lens, dtype=torch.long))
    for parity in (0, 1):
        rows = ((owners % 2 == parity) & scene.defined).nonzero()[:, 0]
        if count > 1 and len(rows):
            scene.moves.poison(scene.case, scene.inputs, set(range(1 - parity, count, 2)), math.nan)
            yield scene.question(rows=rows, place=rows, bits=scene.moves.company)


def _scale_values(scene: Scene) -> Iterator[Question]:
    for power in _powers(scene):
        scene.moves.scale_values(scene.inputs.arguments, 2.0**power)
        yield scene.question(power=power, text=f"values times 2^{power}")


def _powers(scene: Scene) -> tuple[int, ...]:
    if scene.case.dtype != "float16" and not _stores_fp16(scene.contract, STORES):
        return POWERS
    largest = max(scene.moves.largest_value(scene.inputs.arguments), 1.0)
    power = min(POWER_FP16, math.floor(math.log2(torch.finfo(torch.float16).max / 4 / largest)))
    return (power,) if power > 0 else ()


def _permute(scene: Scene) -> Iterator[Question]:
    query_lens = scene.moves.query_lens(scene.case)
    order = torch.randperm(len(query_lens), generator=scene.generator(2)).tolist()
    if order == sorted(order):
        order.reverse()
    # which request sees the NaN of a case is said by its lengths, and those are permuted, too
    if scene.moves.permute is None or len(order) < 2 or not bool(scene.defined.all()):
        return
    case = scene.moves.permute(scene.case, scene.inputs, order)
    tokens = torch.arange(len(scene.requests)).split(query_lens)
    place = torch.cat([tokens[request] for request in order]).argsort()
    yield scene.question(case=case, place=place, bits="must" if scene.invariant else "may")


def _split(scene: Scene) -> Iterator[Question]:
    split = scene.moves.split and scene.moves.split(scene.case, scene.inputs, scene.generator(3))
    if split is not None:
        yield scene.question(parts=split.parts, whole=split.whole, ends=split.ends, bits="need not")


def _alone(scene: Scene) -> Iterator[Question]:
    lens = list(zip(scene.moves.query_lens(scene.case), scene.moves.key_lens(scene.case), strict=True))
    # the one with most keys is the first that a kernel would split otherwise
    request = max(range(len(lens)), key=lambda one: (lens[one][0] > 0, lens[one][1]))
    if not scene.invariant or lens[request][0] == 0 or not bool(scene.defined.all()):
        return
    for move in (scene.moves.alone, scene.moves.last_query):
        if move is not None:
            part, tokens = move(scene.case, scene.inputs, request)
            rows = torch.arange(tokens.start, tokens.stop)
            text = f"{len(rows)} queries of request {request}"
            yield scene.question(parts=(part,), whole=part, rows=rows, place=torch.arange(len(rows)), text=text)


RELATIONS: dict[str, Callable[[Scene], Iterator[Question]]] = {
    "relabel slots": _relabel,
    "unused content": _unused_content,
    "poisoned neighbours": _poisoned_neighbours,
    "scale values": _scale_values,
    "permute requests": _permute,
    "split keys": _split,
    "alone": _alone,
}


def scaled_back(got: Tensor, first: Tensor, power: int, contract: Contract) -> Tensor:
    """Outputs for values times ``2^power`` in the unit of the first ones, exactly, underflow in float16 forgiven."""
    if power == 0:
        return got
    back = (got.double() * 2.0**-power).to(got.dtype)
    forgiven = (back.double() - first.double()).abs() <= underflow_slack(first, contract)
    return torch.where(forgiven, first, back)


def underflow_slack(out: Tensor, contract: Contract) -> Tensor:
    """By how much an output may change when its values are scaled up out of the subnormal numbers of float16.

    A stored output loses at most one subnormal spacing. Where projected values, partial results or the accumulator are
    stored in float16, it may besides fall on the other side of a rounding boundary.

    Args:
        out: The output for the unscaled values, in its stored dtype.
        contract: What the kernel promised.

    Returns:
        Of the shape of ``out``, float64; 0 where no number is stored in float16.
    """
    tiny = SUBNORMAL["fp16"]
    if _stores_fp16(contract, STORES[1:]):
        spacing = torch.exp2(torch.frexp(out.float())[1].double()) * contract.roundoff("out")
        return spacing + 4 * tiny
    if contract.out != "fp16":
        return torch.zeros_like(out, dtype=torch.float64)
    return torch.where(out.double().abs() < torch.finfo(torch.float16).tiny, tiny, 0.0)


def _stores_fp16(contract: Contract, names: tuple[str, ...]) -> bool:
    return any(getattr(contract, name) == "fp16" for name in names)
