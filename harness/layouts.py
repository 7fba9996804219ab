"""From the oracle's conventions to a kernel's and back: inputs before the call, answers after it.

A kernel is judged in its own convention: it gets pages, pointers or a bundled cache of the same values, and its answer
is restated. Whatever is not exactly the declared value stays as it is, for the gates to find.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .answers import Answer, dtype_of
from .case import Case
from .contract import PRECISION_OF_DTYPE, Contract
from .conventions import LATENT_CACHES, PACKED_CACHES, Conventions
from .operation import AnyOutline, AttentionOutline, Inputs, Kernel, Result, Rows
from .poison import Ledger, surround, surroundings_intact
from .record import GateResult, Location

DESTINATION = "destination"
_DTYPE_OF_PRECISION = {precision: getattr(torch, dtype) for dtype, precision in PRECISION_OF_DTYPE.items()}
_VALUES = {"zero": 0.0, "nan": math.nan, "-inf": -math.inf, "+inf": math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the keys of each request lie in a cache of pages.

    Attributes:
        page_size: Tokens of a page.
        num_pages: Of the cache; more than are used.
        pages: Pages of each request in order, int64 on the CPU.
        lengths: Keys of each request.
    """

    page_size: int
    num_pages: int
    pages: tuple[Tensor, ...]
    lengths: tuple[int, ...]

    def rows(self) -> list[Tensor]:
        """``page * page_size + offset`` of each key, request by request."""
        inside = torch.arange(self.page_size)
        return [
            (pages[:, None] * self.page_size + inside).flatten()[:length]
            for pages, length in zip(self.pages, self.lengths, strict=True)
        ]


def place(lengths: list[int], page_size: int, *, seed: int) -> Placement:
    """Give each request as many pages as it needs, in random order.

    The first page, the last one and a fifth of the others belong to nobody.
    """
    counts = [-(-length // page_size) for length in lengths]
    total = sum(counts)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(total + total // 4, generator=generator)[:total] + 1
    num_pages = total + total // 4 + 2
    return Placement(page_size=page_size, num_pages=num_pages, pages=tuple(drawn.split(counts)), lengths=tuple(lengths))


def block_table(placement: Placement) -> Tensor:
    """``[N, most pages + 1]``, int32, a row per request; unused entries name page 0, which holds no token."""
    width = max((len(pages) for pages in placement.pages), default=0) + 1
    table = torch.zeros(len(placement.pages), width, dtype=torch.int32)
    for row, pages in zip(table, placement.pages, strict=True):
        row[: len(pages)] = pages.int()
    return table


def page_indices(placement: Placement) -> dict[str, Tensor]:
    """``kv_indptr``, ``[N + 1]``, ``kv_indices`` and ``kv_last_page_len``, ``[N]`` (0 without keys); all int32."""
    ends = itertools.accumulate((len(pages) for pages in placement.pages), initial=0)
    last = [length - (len(p) - 1) * placement.page_size if length else 0 for length, p in _zip(placement)]
    return {
        "kv_indptr": torch.tensor(list(ends), dtype=torch.int32),
        "kv_indices": torch.cat([*placement.pages, torch.empty(0, dtype=torch.int64)]).int(),
        "kv_last_page_len": torch.tensor(last, dtype=torch.int32),
    }


def paged(cache: Tensor, slots: list[Tensor], placement: Placement) -> Tensor:
    """Copy rows into pages: ``[num_pages, page_size, ...]``, NaN wherever no key lies, page tails included.

    Args:
        cache: ``[slots, ...]``, floating.
        slots: Row of each key, request by request.
        placement: Where they go.
    """
    pages = cache.new_full((placement.num_pages * placement.page_size, *cache.shape[1:]), math.nan)
    for old, new in zip(slots, placement.rows(), strict=True):
        pages[new.to(cache.device)] = cache[old.to(cache.device)]
    return pages.view(placement.num_pages, placement.page_size, *cache.shape[1:])


def request_slots(arguments: dict[str, Any]) -> list[Tensor]:
    """Cache rows of the keys of each request, int64 on the CPU: from a slot table, or from packed lengths."""
    if "slot_table" in arguments:
        table, rows, lens = (arguments[name].cpu().long() for name in ("slot_table", "request_rows", "context_lens"))
        return [table[row, :length] for row, length in zip(rows.tolist(), lens.tolist(), strict=True)]
    return [torch.arange(start, end) for start, end in itertools.pairwise(arguments["cu_seqlens_k"].tolist())]


def placement_of(arguments: dict[str, Any], case: Case, conventions: Conventions) -> Placement:
    """The pages of a case: the same for whoever asks."""
    lengths = [len(slots) for slots in request_slots(arguments)]
    return place(lengths, conventions.page_size or 1, seed=case.seed)


def prepared(inputs: Inputs, kernel: Kernel, case: Case, contract: Contract, outline: AnyOutline) -> Inputs:
    """The inputs as ``kernel`` takes them, with a destination if it wants one; the oracle's are left as they are.

    Tensors that do not differ are shared. The ledger holds both, under the kernel's own names.
    """
    given, conventions = dict(inputs.arguments), kernel.conventions
    if not conventions.rearranges and kernel.style == "return":
        return inputs
    ledger = Ledger(buffers=dict(inputs.ledger.buffers), copies=dict(inputs.ledger.copies))
    if conventions.rearranges:
        _rearrange(given, ledger, case, conventions)
    if kernel.style == "dps":
        device = next(buffer.device for buffer in ledger.buffers.values())
        given[DESTINATION] = _destination(contract, outline, conventions, device)
    return Inputs(arguments=given, ledger=ledger)


def settled(given: Inputs, home: Inputs) -> Inputs:
    """``given``, with what was arranged anew where ``home``, of the same kernel, has what it is the counterpart of.

    Whoever knows inputs by their addresses is wrong then. What is of another form stays where it is.
    """
    arguments, buffers = dict(given.arguments), dict(given.ledger.buffers)
    for name, tensor in given.arguments.items():
        place, memory = home.arguments.get(name), home.ledger.buffers.get(name)
        # a tensor that somebody else made is not what the ledger holds under its name
        if memory is None or not isinstance(place, Tensor) or not _lies_in(tensor, buffers.get(name)):
            continue
        forms = [(one.shape, one.stride(), one.storage_offset(), one.dtype) for one in (place, tensor)]
        if memory is not buffers[name] and forms[0] == forms[1] and memory.shape == buffers[name].shape:
            arguments[name], buffers[name] = place, memory.copy_(buffers[name])
    return Inputs(arguments=arguments, ledger=Ledger(buffers=buffers, copies=dict(given.ledger.copies)))


def _lies_in(tensor: Any, buffer: Tensor | None) -> bool:
    if not isinstance(tensor, Tensor) or buffer is None:
        return False
    return tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def _rearrange(given: dict[str, Any], ledger: Ledger, case: Case, conventions: Conventions) -> None:
    device = given["q"].device
    caches = {name: given[name] for names in (LATENT_CACHES, PACKED_CACHES) for name in names if name in given}
    if conventions.bundled:
        caches = {"kv_cache": torch.cat([given.pop(name) for name in LATENT_CACHES], dim=-1)}
    if conventions.cache != "slots":
        placement, slots = placement_of(given, case, conventions), request_slots(given)
        caches = {name: paged(cache, slots, placement) for name, cache in caches.items()}
        if conventions.page_size is None:
            caches = {name: cache.flatten(0, 1) for name, cache in caches.items()}
        index = {"block_table": block_table(placement)} if conventions.cache == "blocks" else page_indices(placement)
        index["context_lens"] = torch.tensor(placement.lengths, dtype=torch.int32)
        given |= {name: ledger.guarded(name, tensor, device) for name, tensor in index.items()}
        for name in ("slot_table", "request_rows", "cu_seqlens_k"):
            given.pop(name, None)
    if conventions.cache != "slots" or conventions.bundled or conventions.row_gap:
        leading = 2 if conventions.page_size is not None else 1
        for name, cache in caches.items():
            given[name] = _with_gaps(ledger, name, cache, leading, conventions.row_gap)
    if conventions.flat_projection:
        projection = given["kv_b_proj"]
        given["kv_b_proj"] = projection.view(-1, projection.shape[-1])


def _with_gaps(ledger: Ledger, name: str, cache: Tensor, leading: int, gap: int) -> Tensor:
    """Guard a cache, each row (what lies below the ``leading`` dimensions) followed by ``gap`` elements of NaN."""
    inner = cache.shape[leading:]
    rows = cache.flatten(leading) if len(inner) > 1 else cache
    width = rows.shape[-1]
    stored = ledger.guarded_view(name, rows, cache.device, lambda buffer: buffer[..., :width], width=width + gap)
    return stored.unflatten(-1, inner) if len(inner) > 1 else stored


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """What a kernel that writes into given tensors is to be given, by name.

    Attributes:
        shapes: In the kernel's own layout.
        dtypes: Of its contract.
        device: Where.
        within: Size of the buffer in whose midst a tensor lies, of those that are not alone.
        lent: The last such buffers with the tensors in them.
    """

    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    device: torch.device
    within: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lent: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def allocate(self) -> dict[str, Tensor]:
        """The tensors, uninitialised: poisoned and guarded inside the judge's block."""
        tensors = {}
        for name, shape in self.shapes.items():
            size = self.within.get(name, shape)
            whole = torch.empty(size, dtype=self.dtypes[name], device=self.device)
            tensors[name] = whole[
                tuple(slice((w - s) // 2, (w - s) // 2 + s) for w, s in zip(size, shape, strict=True))
            ]
            if name in self.within:
                surround(whole, tensors[name])
                self.lent[name] = whole, tensors[name]
        return tensors

    def written_beside(self) -> list[str]:
        """Names of tensors beside which the buffer that they lie in was written."""
        return [name for name, (whole, inner) in self.lent.items() if not surroundings_intact(whole, inner)]


def _destination(
    contract: Contract, outline: AnyOutline, conventions: Conventions, device: torch.device
) -> Destination:
    shapes = {result.name: result.shape for result in outline.results}
    if conventions.lse_layout == "HT":
        shapes |= {name: shape[::-1] for name, shape in shapes.items() if name in ("lse", "max_logits")}
    # what is written in place has been given already
    shapes = {name: shape for name, shape in shapes.items() if name not in outline.in_place}
    dtypes = {result.name: result_dtype(result, contract) for result in outline.results if result.name in shapes}
    within = {result.name: result.within for result in outline.results if result.within is not None}
    return Destination(shapes=shapes, dtypes=dtypes, device=device, within=within)


def result_dtype(result: Result, contract: Contract) -> torch.dtype:
    """The dtype of a result under a contract.

    Raises:
        ValueError: If torch has none of the declared precision.
    """
    if result.dtype is not None:
        return dtype_of(result.dtype)
    precision = getattr(contract, str(result.field))
    if precision not in _DTYPE_OF_PRECISION:
        known = ", ".join(_DTYPE_OF_PRECISION)
        raise ValueError(f"{result.name} of a dps kernel must be one of {known}, got {precision!r}")
    dtype: torch.dtype = _DTYPE_OF_PRECISION[precision]
    return dtype


def tokens_first(answer: Any, conventions: Conventions) -> Any:
    """What belongs to a row as ``[T, H]``: a view of what a ``"HT"`` kernel returned, of anything else itself."""
    if conventions.lse_layout == "HT" and isinstance(answer, tuple) and len(answer) > 1:
        out, *others = answer
        if all(isinstance(one, Tensor) and one.ndim == 2 for one in others):
            return out, *(one.T for one in others)
    return answer


def restated(answer: Answer, conventions: Conventions, empty_rows: Tensor) -> Answer:
    """An answer in the oracle's conventions: ``(0, -inf)`` for the declared values of empty rows, natural logarithms.

    A log-sum-exp to base 2 becomes float64, so that the change of base adds no error that the kernel would answer for;
    so does a highest logit, which is in the same units.

    Args:
        answer: ``out``, ``[T, H, Dv]``, ``lse``, ``[T, H]``, and what else there is, as the kernel states them.
        conventions: Of the kernel.
        empty_rows: ``[T]``, bool, rows that see no key.
    """
    out, lse, *others = answer
    if conventions.lse_base == "2":
        lse, *others = (one.double() * math.log(2.0) for one in (lse, *others))
    empty = empty_rows.to(out.device)
    if conventions.empty_row[0] != "zero":
        out = torch.where(empty[:, None, None] & _holds(out, conventions.empty_row[0]), 0.0, out)
    if conventions.empty_row[1] != "-inf":
        lse = torch.where(empty[:, None] & _holds(lse, conventions.empty_row[1]), -math.inf, lse)
    return out, lse, *others


def empty_row_gates(answer: Answer, conventions: Conventions, outline: AttentionOutline) -> list[GateResult]:
    """G1 in the kernel's own words: every empty row holds what was declared. None for the oracle's convention.

    Args:
        answer: As the kernel states it.
        conventions: Of the kernel.
        outline: Which rows are empty.
    """
    gates = []
    declared = zip(("out", "lse"), answer[:2], conventions.empty_row, Conventions().empty_row, strict=True)
    for name, values, wanted, canonical in declared:
        if wanted == canonical:
            continue
        empty = outline.empty_rows.to(values.device).view(-1, *[1] * (values.ndim - 1))
        wrong = empty & ~_holds(values, wanted)
        where = _first(wrong, values, outline, expected=_VALUES[wanted]) if bool(wrong.any()) else None
        text = f"{int(wrong.sum())} elements of {name} in empty rows are not the declared {wanted}" if where else ""
        gates.append(GateResult(gate=f"G1 {name} empty row", ratio=math.inf if where else 0.0, where=where, text=text))
    return gates


def relocated(rows: Iterable[Rows], arguments: dict[str, Any], case: Case, conventions: Conventions) -> Iterator[Rows]:
    """The oracle's rows with the places that the kernel knows: ``page * page_size + offset`` instead of a slot.

    Args:
        rows: Of the operation.
        arguments: The oracle's.
        case: From which the pages were drawn.
        conventions: Of the kernel.
    """
    if conventions.cache == "slots":
        yield from rows
        return
    places = placement_of(arguments, case, conventions).rows()
    for part in rows:
        yield part if part.slots is None else replace(part, slots=places[part.request])


def _holds(values: Tensor, wanted: str) -> Tensor:
    return values.isnan() if wanted == "nan" else values == _VALUES[wanted]


def _first(wrong: Tensor, values: Tensor, outline: AttentionOutline, *, expected: float) -> Location:
    index = [int(i) for i in wrong.nonzero()[0]]
    return Location(
        request=int(outline.requests[index[0]]),
        token=index[0],
        head=index[1],
        dim=index[2] if len(index) > 2 else None,
        got=float(values[tuple(index)]),
        expected=expected,
    )


def _zip(placement: Placement) -> Iterator[tuple[int, Tensor]]:
    return zip(placement.lengths, placement.pages, strict=True)
