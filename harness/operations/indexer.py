"""The operation ``indexer``: for each query the keys of the highest index scores, with those scores."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...optimized.indexer import IndexerShape, indexer, plan_indexer
from ..answers import Answer
from ..case import Case
from ..contract import Contract
from ..metamorphic.rearranged import Rearranged
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..poison import Ledger
from ..providers import interpreted_tiles_refusal
from ._indexer_cases import LAYOUTS, indexer_cases
from ._indexer_gates import IndexOracle, index_oracle, judge_index
from ._indexer_values import CLUSTER, EXACT_FAMILIES, drawn_values
from ._reversed_requests import ask_permuted, moved_rows, put_back, reversed_offsets, reversed_rows

# elements behind each row that are none of it, in the strided layout
BESIDE = 5
# keys, none like another, from which it is certain that other contents have another order
CERTAIN = 64
# dimensions below which a query of whole numbers may well be 0
FEW = 16
# another order of requests is about layout, not values: one family is asked for it
REARRANGED = ("diffuse",)


class Indexer:
    """See ``harness.operation.Operation``; the oracle is ``reference.indexer.indexer``."""

    name = "indexer"
    arguments: tuple[str, ...] = ("q", "k", "weights", "topk", "cu_seqlens_q", "cu_seqlens_k")
    optional_arguments: tuple[str, ...] = ()
    results: tuple[str, ...] = ("topk_indices", "topk_scores")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_indexer_cases``."""
        return indexer_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tensors in one of the layouts, NaN wherever nobody may look."""
        ledger, sizes = Ledger(), case.sizes
        named = zip(("q", "k", "weights"), drawn_values(case), strict=True)
        arguments: dict[str, Any] = {
            name: _laid_out(name, tensor, sizes["layout"], ledger, device) for name, tensor in named
        }
        arguments["topk"] = sizes["topk"]
        for name, lens in (("cu_seqlens_q", sizes["query_lens"]), ("cu_seqlens_k", sizes["key_lens"])):
            arguments[name] = ledger.guarded(name, torch.tensor([0, *lens]).cumsum(0).int(), device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """A list per query, and its scores."""
        sizes = case.sizes
        shape, axes = (sum(sizes["query_lens"]), sizes["topk"]), ("token", "position")
        results = (
            Result(name="topk_indices", shape=shape, axes=axes, dtype="int32"),
            Result(name="topk_scores", shape=shape, axes=axes, field="out"),
        )
        # with the weights of the other sign the last come first, where not all scores are 0
        alike = CLUSTER if case.family == "clustered" else 1
        # a kernel may well round scores of ``near`` to the same, before and after
        follows = case.family not in ("exact-dead", "near") and sizes["head_dim"] >= FEW
        follows = follows and _visible(case) >= CERTAIN * alike
        return Outline(results=results, follows_contents=follows)

    def oracle(self, case: Case, arguments: dict[str, Any]) -> IndexOracle:
        """The reference's scores of all keys with the terms of their errors."""
        return index_oracle(arguments)

    def judge(self, case: Case, oracle: IndexOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_indexer_gates``."""
        return judge_index(oracle, answer, contract, exact=case.family in EXACT_FAMILIES)

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> Rearranged | None:
        """The requests in reverse order, with the offsets of queries and keys; see ``_reversed_requests``."""
        if case.family not in REARRANGED or len(case.sizes["query_lens"]) == 1:
            return None
        return ask_permuted(lambda: _permuted(case, arguments, ask), first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Inputs are taken as they are; products, sums and scores are float32."""
        return Contract(p="fp32", out="fp32")

    def kernels(self) -> list[Kernel]:
        """Either implementation."""
        return [_kernel("torch"), _kernel("triton")]


def reversed_requests(case: Case, arguments: dict[str, Any]) -> tuple[Case, dict[str, Any]]:
    """The case and its arguments with the last request first."""
    sizes, device = case.sizes, arguments["q"].device
    turned = {name: sizes[name][::-1] for name in ("query_lens", "key_lens")}
    queries, keys = (reversed_rows(sizes[name], device) for name in turned)
    moved = {
        name: moved_rows(arguments[name], rows) for name, rows in (("q", queries), ("weights", queries), ("k", keys))
    }
    moved |= {name: reversed_offsets(arguments[name]) for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return replace(case, sizes=sizes | turned), arguments | moved


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the requests in reverse order, put back; positions are those within a request."""
    rows = reversed_rows(case.sizes["query_lens"], arguments["q"].device)
    return tuple(put_back(part, rows) for part in ask(*reversed_requests(case, arguments)))


def _visible(case: Case) -> int:
    """Keys that all queries see together."""
    pairs = zip(case.sizes["query_lens"], case.sizes["key_lens"], strict=True)
    return sum(max(0, m - n + 1 + at) for n, m in pairs for at in range(n))


def _laid_out(name: str, tensor: Tensor, layout: str, ledger: Ledger, device: torch.device) -> Tensor:
    width = tensor.shape[-1]
    if layout == "packed":
        return ledger.guarded(name, tensor, device)
    if layout == "strided":
        return ledger.guarded_view(name, tensor, device, lambda b: b[..., :width], width=width + BESIDE)
    if layout == "heads-first":
        turned = tensor.transpose(0, 1).contiguous()
        return ledger.guarded(name, turned, device).transpose(0, 1)
    raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")


def _kernel(implementation: str) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, k, weights = (arguments[name] for name in ("q", "k", "weights"))
        shape = IndexerShape(
            device=q.device, dtype=q.dtype, num_heads=q.shape[1], head_dim=q.shape[2], topk=arguments["topk"]
        )
        lens = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
        plan = plan_indexer(*lens, shape=shape, implementation=implementation)
        return lambda: indexer(q, k, weights, plan=plan)

    def unsupported(case: Case, device: torch.device) -> str | None:
        sizes = case.sizes
        lens = {"query_lens": sizes["query_lens"], "key_lens": sizes["key_lens"]}
        return interpreted_tiles_refusal(implementation, device, heads=sizes["num_heads"], **lens)

    def contract(case: Case) -> Contract:
        return OPERATION.default_contract(case).promising(capturable=True)

    return Kernel(name=f"indexer[{implementation}]", contract=contract, bind=bind, unsupported=unsupported)


OPERATION = Indexer()
