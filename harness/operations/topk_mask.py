"""The operation ``topk_mask``: the keys that each query has selected, one bit a key, and which tiles hold any bit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...optimized.topk_mask import MAX_MASK_BYTES, mask_bytes, plan_topk_mask, topk_mask
from ..answers import Answer
from ..case import Case
from ..contract import Contract
from ..metamorphic.rearranged import Rearranged
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..poison import Ledger
from ._reversed_requests import ask_permuted, moved_rows, put_back, reversed_offsets, reversed_rows
from ._topk_mask_cases import LAYOUTS, topk_mask_cases
from ._topk_mask_gates import MaskOracle, judge_mask, mask_oracle
from ._topk_mask_lists import drawn_lists

# entries behind each list that are none of it, in the strided layout
BESIDE = 3
# a row of the interpreted kernel takes a millisecond
INTERPRETED_ROWS = 300
# another order of requests is about layout, not values: one family is asked for it, of which every seed has chunks
REARRANGED = ("late",)


class TopkMask:
    """See ``harness.operation.Operation``; the oracle is ``reference.topk_mask``, its mask and its map."""

    name = "topk_mask"
    arguments: tuple[str, ...] = ("indices", "cu_seqlens_q", "key_lens", "key_starts", "tile", "max_bytes")
    # a kernel without a map refuses the cases that ask for one; the cap is a matter of the host's
    optional_arguments: tuple[str, ...] = ("tile", "max_bytes")
    results: tuple[str, ...] = ("mask", "tile_map")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_topk_mask_cases``."""
        return topk_mask_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """The lists, with the bounds of the keys that the mask speaks of."""
        ledger, sizes = Ledger(), case.sizes
        starts, counts = key_bounds(case)
        queries = torch.tensor([0, *sizes["query_lens"]]).cumsum(0).int()
        whole = sizes["chunk_start"] == 0
        integers = {"cu_seqlens_q": queries, "key_lens": torch.tensor(counts, dtype=torch.int32)}
        integers |= {} if whole else {"key_starts": torch.tensor(starts, dtype=torch.int32)}
        size = mask_bytes(sum(sizes["query_lens"]), max(counts))
        arguments: dict[str, Any] = {"indices": _laid_out(drawn_lists(case, device), case, ledger, device)}
        arguments |= {name: ledger.guarded(name, tensor, device) for name, tensor in integers.items()}
        arguments.setdefault("key_starts", None)
        tile = sizes["tile_queries"], sizes["tile_keys"]
        arguments |= {"tile": None if tile == (0, 0) else tile}
        arguments |= {"max_bytes": size if sizes["exact_cap"] else max(size, MAX_MASK_BYTES)}
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """A row of words per query, as wide as the longest request needs, and a map where tiles are given."""
        sizes, counts = case.sizes, key_bounds(case)[1]
        words = -(-max(counts) // 32)
        mask = Result(name="mask", shape=(sum(sizes["query_lens"]), words), axes=("token", "dim"), dtype="int32")
        results, (rows, keys) = [mask], (sizes["tile_queries"], sizes["tile_keys"])
        if rows:
            shape = sum(-(-n // rows) for n in sizes["query_lens"]), -(-32 * words // keys)
            results.append(Result(name="tile_map", shape=shape, axes=("position", "dim"), dtype="bool"))
        return Outline(results=tuple(results), follows_contents=_follows(case), lists=("indices",))

    def oracle(self, case: Case, arguments: dict[str, Any]) -> MaskOracle:
        """The reference's words and tiles."""
        return mask_oracle(arguments)

    def judge(self, case: Case, oracle: MaskOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_topk_mask_gates``."""
        return judge_mask(oracle, answer)

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> Rearranged | None:
        """The requests in reverse order, with their lengths, offsets and first keys; see ``_reversed_requests``."""
        if case.family not in REARRANGED or len(case.sizes["query_lens"]) == 1:
            return None
        return ask_permuted(lambda: _permuted(case, arguments, ask), first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Nothing is rounded; what is left of a contract is how a kernel behaves."""
        return Contract(p="fp32", out="fp32")

    def kernels(self) -> list[Kernel]:
        """Either implementation; that of Triton has a builder for one request and one for several."""
        return [_kernel("torch"), _kernel("triton")]


def key_bounds(case: Case) -> tuple[list[int], list[int]]:
    """Of each request the first key that the mask speaks of, and how many."""
    sizes, size = case.sizes, case.sizes["chunk_size"]
    if sizes["chunk_start"] == 0:
        return [0] * len(sizes["context_lens"]), [min(m, size) if size else m for m in sizes["context_lens"]]
    # of reversed requests each chunk begins a key earlier
    step = sizes.get("chunk_step", 1)
    starts = [sizes["chunk_start"] + step * request for request in range(len(sizes["context_lens"]))]
    left = [max(0, m - start) for start, m in zip(starts, sizes["context_lens"], strict=True)]
    return starts, [min(count, size) if size else count for count in left]


def reversed_requests(case: Case, arguments: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    """The case and its arguments with the last request first."""
    sizes, indices = case.sizes, arguments["indices"]
    turned = {name: sizes[name][::-1] for name in ("query_lens", "context_lens")}
    if sizes["chunk_start"]:
        turned |= {"chunk_start": key_bounds(case)[0][-1], "chunk_step": -sizes.get("chunk_step", 1)}
    moved: dict[str, Any] = {"indices": moved_rows(indices, reversed_rows(sizes["query_lens"], indices.device))}
    moved["cu_seqlens_q"] = reversed_offsets(arguments["cu_seqlens_q"])
    for name in ("key_lens", "key_starts"):
        moved[name] = None if arguments[name] is None else arguments[name].flip(0)
    return replace(case, sizes=sizes | turned), arguments | moved


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the requests in reverse order, rows and tiles put back."""
    lens, tile = case.sizes["query_lens"], case.sizes["tile_queries"]
    # each request begins a tile of its own
    counts = [lens, [-(-n // tile) for n in lens]] if tile else [lens]
    found = ask(*reversed_requests(case, arguments))
    return tuple(put_back(part, reversed_rows(own, part.device)) for part, own in zip(found, counts, strict=True))


def _follows(case: Case) -> bool:
    """Whether some query surely selects a key: its first one is lost when all move up by one."""
    sizes, counts = case.sizes, key_bounds(case)[1]
    # a chunk may hold none of the keys of a list, or gain the one before it
    whole = not (sizes["chunk_start"] or sizes["chunk_size"])
    some = any(n > 0 and m > 0 for n, m in zip(sizes["query_lens"], counts, strict=True))
    return whole and some and case.family not in ("holes", "outside", "signs")


def _laid_out(lists: torch.Tensor, case: Case, ledger: Ledger, device: torch.device) -> torch.Tensor:
    layout, topk = case.sizes["layout"], lists.shape[1]
    if layout == "packed":
        return ledger.guarded("indices", lists, device)
    if layout == "columns":
        return ledger.guarded("indices", lists.T.contiguous(), device).T
    if layout == "strided":
        # keys that are there, so that whoever reads them says so in the mask
        beside = lists.roll(1, 0)[:, :1].abs().repeat(1, BESIDE) % max(1, *case.sizes["context_lens"])
        return ledger.guarded("indices", torch.cat([lists, beside], dim=1), device)[:, :topk]
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def _kernel(implementation: str) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        indices, tile = arguments["indices"], arguments["tile"]
        plan = plan_topk_mask(
            arguments["cu_seqlens_q"],
            arguments["key_lens"],
            topk=indices.shape[1],
            device=indices.device,
            key_starts=arguments["key_starts"],
            tile=tile,
            max_bytes=arguments["max_bytes"],
            implementation=implementation,
        )
        if tile is None:
            return lambda: topk_mask(indices, plan=plan)[0]
        return lambda: topk_mask(indices, plan=plan)

    def unsupported(case: Case, device: torch.device) -> str | None:
        rows = sum(case.sizes["query_lens"]) * -(-case.sizes["topk"] // 1024)
        if implementation != "triton" or device.type != "cpu" or rows <= INTERPRETED_ROWS:
            return None
        known = f"the {INTERPRETED_ROWS} that fit the time"
        return f"interpreted on the CPU, {rows} rows are more than {known}; needs a device"

    def contract(case: Case) -> Contract:
        return OPERATION.default_contract(case).promising(capturable=True, batch_invariant=True)

    return Kernel(name=f"topk_mask[{implementation}]", contract=contract, bind=bind, unsupported=unsupported)


OPERATION = TopkMask()
