"""The operation ``sparse_mla``: each query over the latent rows that were selected for it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...optimized._sparse_mla_plan import refusal as shape_refusal
from ...optimized.sparse_mla import IMPLEMENTATIONS, SparseMlaShape, plan_sparse_mla, sparse_mla
from ..case import Case
from ..contract import Contract, default_contract
from ..layouts import DESTINATION
from ..operation import AttentionOutline, CaseRequest, Inputs, Kernel, Rows
from ..poison import Ledger
from ..sampling import sample_heads, sample_queries, sample_requests
from ._mla_prefill_layout import far_apart
from ._sparse_mla_cases import LAYOUTS, sparse_mla_cases
from ._sparse_mla_lists import lists_of
from ._sparse_mla_values import sinks_of, sparse_values

# queries are sampled around the multiples of it
TILE = 64
# logits that take the oracle as long as the steps of a query of few
LEAST_COST = 1 << 13
# NaN between rows: 16 bytes in every dtype, and several times that
GAP = 16
# a step of the interpreter, a tile of rows for a query, takes tens of milliseconds
INTERPRETED_STEPS, INTERPRETED_ROWS = 8, 32
# as libraries ask for them
PADDED_HEADS = (64, 128)


class SparseMla:
    """See ``harness.operation.Operation``; the oracle is ``reference.sparse_mla.sparse_mla``."""

    name = "sparse_mla"
    arguments = ("q", "kv", "indices", "softmax_scale", "d_v", "topk_length", "attn_sink")
    optional_arguments: tuple[str, ...] = ()
    results = ("out", "lse", "max_logits")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_sparse_mla_cases``."""
        return sparse_mla_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Rows of tokens in permuted slots of a cache that is NaN wherever no token lies, and lists of these.

        In ``leverage`` the first and the last slot, if they are free, hold copies of rows that queries are drawn to. By
        layout queries are some heads of wider ones, rows and lists have gaps, or the cache is as large as 32 bits.

        Raises:
            ValueError: If there is no such layout.
        """
        sizes, ledger, lists = case.sizes, Ledger(), lists_of(case)
        if sizes["layout"] not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {sizes['layout']!r}")
        generator = torch.Generator().manual_seed(case.seed + 1)
        widths = {name: sizes[name] for name in ("num_heads", "d_qk", "d_v", "softmax_scale")}
        values = sparse_values(case.family, lists, sizes["context_lens"], generator=generator, **widths)
        q, rows = (tensor.to(getattr(torch, case.dtype)) for tensor in values)
        sink = sinks_of(sizes["sink"], case.family, q, rows, lists, sizes["softmax_scale"], generator)
        slots, indices, num_slots = lists.slots, lists.indices, lists.num_slots
        if sizes["layout"] == "vast":
            slots, indices, num_slots = far_apart(slots, indices, num_slots, sizes["d_qk"], device)
        lures = lists.targets[lists.targets >= 0] if case.family == "leverage" else None
        kv = _cache_of(rows.to(device), slots.to(device), num_slots, lures)
        arguments = _placed(ledger, q, kv, indices.int(), sizes["layout"] in ("strided", "within"), device)
        arguments |= {"softmax_scale": sizes["softmax_scale"], "d_v": sizes["d_v"]}
        for name, tensor in (("topk_length", lists.topk_length), ("attn_sink", sink)):
            arguments[name] = None if tensor is None else ledger.guarded(name, tensor, device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> AttentionOutline:
        """Some queries list nothing, and those that list the NaN of ``visible-nan`` must say so."""
        sizes, lists = case.sizes, lists_of(case)
        queries, heads = len(lists.empty), sizes["num_heads"]
        padded = next((most for most in PADDED_HEADS if heads < most), heads + 2)
        within = (queries + 3, padded, sizes["d_v"] + GAP) if sizes["layout"] == "within" else None
        lens = torch.tensor(sizes["query_lens"])
        return AttentionOutline(
            num_tokens=queries,
            num_heads=heads,
            d_v=sizes["d_v"],
            empty_rows=lists.empty,
            requests=torch.arange(len(lens)).repeat_interleave(lens),
            nan_rows=lists.undefined,
            max_logits=True,
            out_within=within,
            lists=("indices",),
        )

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """The sampled queries of each sampled request, with the rows that they list."""
        sizes, lists, rng = case.sizes, lists_of(case), np.random.default_rng(case.seed)
        heads, query_lens, context_lens = sizes["num_heads"], sizes["query_lens"], sizes["context_lens"]
        costs = [
            n * max(LEAST_COST, min(sizes["topk"], c) * heads) for n, c in zip(query_lens, context_lens, strict=True)
        ]
        everything, starts = sum(costs) <= budget, np.cumsum([0, *query_lens])
        device = arguments["kv"].device
        sink = arguments["attn_sink"]
        for request in sample_requests(costs, budget=budget, rng=rng):
            history = context_lens[request] - query_lens[request]
            chosen = sample_queries(
                query_lens[request], first_position=history, chunk=TILE, everything=everything, rng=rng
            )
            own_heads = sample_heads(heads, everything=everything, rng=rng)
            # rows that see a NaN have no answer to compare with: they are G1's
            chosen = chosen[~lists.undefined[chosen + int(starts[request])]]
            if not len(chosen):
                continue
            tokens = chosen + int(starts[request])
            listed, valid = arguments["indices"][tokens.to(device)].long(), lists.valid[tokens].to(device)
            used, place = listed[valid].unique(return_inverse=True)
            entries = torch.full_like(listed, -1)
            entries[valid] = place
            k = arguments["kv"][used].double()[:, None]
            yield Rows(
                request=request,
                tokens=tokens,
                positions=chosen + history,
                heads=own_heads,
                q=arguments["q"][tokens.to(device)][:, own_heads.to(device)].double(),
                k=k,
                v=k[..., : sizes["d_v"]],
                last_key=valid.sum(1) - 1,
                softmax_scale=sizes["softmax_scale"],
                lists=entries,
                attn_sink=None if sink is None else sink[own_heads.to(device)].double(),
            )

    def default_contract(self, case: Case) -> Contract:
        """Weights meet the values in the dtype of the inputs; nothing is projected or merged."""
        return default_contract(case.dtype, projected=False, splits=False)

    def kernels(self) -> list[Kernel]:
        """All implementations; that of a library is judged by its name."""
        return [_kernel(name) for name in IMPLEMENTATIONS]


def _cache_of(rows: Tensor, slots: Tensor, num_slots: int, lures: Tensor | None) -> Tensor:
    """Rows in their slots, NaN in all others; copies of the first and last lure where an end of the cache is free."""
    kv = rows.new_full((num_slots, rows.shape[1]), torch.nan)
    kv[slots] = rows
    if lures is not None and len(lures):
        ends = torch.tensor([0, num_slots - 1], device=rows.device)
        free = ~torch.isin(ends, slots)
        kv[ends[free]] = rows[lures[[0, -1]].to(rows.device)[free]]
    return kv


def _placed(
    ledger: Ledger, q: Tensor, kv: Tensor, indices: Tensor, strided: bool, device: torch.device
) -> dict[str, Any]:
    """The tensors by themselves, or the midst of padded heads, rows and lists with NaN and padding between."""
    tensors = {"q": q, "kv": kv, "indices": indices}
    if not strided:
        return {name: ledger.guarded(name, tensor, device) for name, tensor in tensors.items()}
    heads, width = q.shape[1:]
    padded = next((most for most in PADDED_HEADS if heads < most), heads + 2)
    first, topk = (padded - heads) // 2 * width, indices.shape[1]
    wide = ledger.guarded_view(
        "q", q.flatten(1), device, lambda b: b[..., first : first + heads * width], width=padded * width
    )
    return {
        "q": wide.unflatten(1, (heads, width)),
        "kv": ledger.guarded_view("kv", kv, device, lambda b: b[..., :width], width=width + GAP),
        "indices": ledger.guarded_view("indices", indices, device, lambda b: b[..., :topk], width=topk + GAP),
    }


def _shape(case: Case, device: torch.device) -> SparseMlaShape:
    """What an implementation is asked about."""
    sizes = case.sizes
    return SparseMlaShape(
        device=device,
        dtype=getattr(torch, case.dtype),
        s_q=sum(sizes["query_lens"]),
        s_kv=lists_of(case).num_slots,
        h_q=sizes["num_heads"],
        d_qk=sizes["d_qk"],
        d_v=sizes["d_v"],
        topk=sizes["topk"],
    )


def _kernel(implementation: str) -> Kernel:
    def contract(case: Case) -> Contract:
        return OPERATION.default_contract(case).promising(capturable=True)

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, kv, indices = (arguments[name] for name in ("q", "kv", "indices"))
        shape = SparseMlaShape(
            device=q.device,
            dtype=q.dtype,
            s_q=q.shape[0],
            s_kv=kv.shape[0],
            h_q=q.shape[1],
            d_qk=q.shape[2],
            d_v=arguments["d_v"],
            topk=indices.shape[1],
        )
        plan = plan_sparse_mla(shape, topk_length=arguments["topk_length"], implementation=implementation)
        named = {name: arguments[name] for name in ("softmax_scale", "attn_sink")}
        destination = arguments.get(DESTINATION)

        def run() -> Any:
            # a new tensor unless there is a buffer that the answer is to be a part of
            given = destination.allocate() if destination is not None and destination.within else {}
            return sparse_mla(q, kv, indices, plan=plan, out=given.get("out"), **named)

        return run

    def unsupported(case: Case, device: torch.device) -> str | None:
        reason = shape_refusal(implementation, _shape(case, device))
        if reason is not None:
            return f"{implementation} refuses: {reason}"
        if implementation == "flashmla" and case.sizes["tail"] == "nan":
            return "flashmla reads rows that are listed past the length: documented, and zero times NaN is NaN"
        return _interpreted_refusal(implementation, case, device)

    return Kernel(
        name=f"sparse_mla[{implementation}]",
        contract=contract,
        bind=bind,
        unsupported=unsupported,
        style="dps",
        by_name=implementation == "flashmla",
    )


def _interpreted_refusal(implementation: str, case: Case, device: torch.device) -> str | None:
    """Why an interpreted kernel would take too long, or None."""
    if device.type != "cpu" or implementation == "torch":
        return None
    heads = 64 if implementation == "padded" else case.sizes["num_heads"]
    steps = sum(case.sizes["query_lens"]) * -(-case.sizes["topk"] // INTERPRETED_ROWS) * -(-heads // 64)
    if steps <= INTERPRETED_STEPS:
        return None
    return f"interpreted on the CPU, where no more than {INTERPRETED_STEPS} steps fit the time; needs a device"


OPERATION = SparseMla()
