"""Small cases with their inputs and answers, and kernels right and wrong, that several tests share."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.gates import judge
from assay.harness.kernels import wrap_function
from assay.harness.operation import AttentionOperation, Rows
from assay.harness.record import GateResult, Record
from assay.harness.runner import run_case
from assay.optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill
from assay.reference import attention as oracle
from assay.reference import mla_prefill as mla_oracle

CPU = torch.device("cpu")
EVERYTHING = 1 << 40
MLA_INDICES = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
MLA_TENSORS = ("q", "kv_c", "k_pe", "kv_b_proj")

Answer = tuple[Tensor, Tensor]


def attention_case(family: str = "diffuse", dtype: str = "float32", *, seed: int = 0, **sizes: Any) -> Case:
    """Two requests, one with more keys than queries, grouped heads."""
    small = {
        "softmax_scale": 0.17,
        "layout": "packed",
        "causal": True,
        "num_heads": 2,
        "num_kv_heads": 1,
        "d_qk": 24,
        "d_v": 16,
        "query_lens": [9, 5],
        "key_lens": [40, 5],
    }
    return Case(op="attention", family=family, dtype=dtype, seed=seed, sizes=small | sizes)


def mla_case(family: str = "diffuse", dtype: str = "float32", *, seed: int = 0, **sizes: Any) -> Case:
    """Two requests, one with a history of three chunks, the last one short."""
    small = {
        "num_heads": 2,
        "kv_lora_rank": 32,
        "d_nope": 16,
        "d_rope": 8,
        "d_v": 12,
        "softmax_scale": 0.17,
        "query_lens": [9, 5],
        "context_lens": [45, 5],
        "history_chunk_size": 16,
        "layout": "split",
    }
    return Case(op="mla_prefill", family=family, dtype=dtype, seed=seed, sizes=small | sizes)


def operation_of(case: Case) -> AttentionOperation:
    return cast(AttentionOperation, operations.load(case.op))


def arguments_of(case: Case) -> dict[str, Any]:
    return operation_of(case).inputs(case, CPU).arguments


def rows_of(case: Case) -> list[Rows]:
    return list(operation_of(case).rows(case, arguments_of(case), budget=EVERYTHING))


def in_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The arguments with every floating tensor in another dtype."""
    return {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def true_answer(case: Case) -> Answer:
    """What the oracle says in float64 about the stored inputs."""
    return _ask_oracle(case.op, in_dtype(arguments_of(case), torch.float64))


def stored(answer: Answer, case: Case) -> Answer:
    """An answer as a kernel hands it out."""
    return answer[0].to(getattr(torch, case.dtype)), answer[1].float()


def _ask_oracle(op: str, arguments: dict[str, Any]) -> Answer:
    named = {name: value for name, value in arguments.items() if name != "history_chunk_size"}
    return oracle.attention(**named) if op == "attention" else mla_oracle.mla_prefill(**named)


def honest_attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Answer:
    """A kernel that is right: the oracle in float32, its output rounded once."""
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    out, lse = oracle.attention(q.float(), k.float(), v.float(), softmax_scale=softmax_scale, causal=causal, **lengths)
    return out.to(q.dtype), lse


def honest_mla(**arguments: Any) -> Answer:
    """The same for ``mla_prefill``."""
    out, lse = _ask_oracle("mla_prefill", in_dtype(arguments, torch.float32))
    return out.to(arguments["q"].dtype), lse


def judged(function: Callable[..., Any], case: Case) -> Record:
    """The record of a stranger's function on a case."""
    operation = operation_of(case)
    return run_case(operation, wrap_function(function, operation), case, CPU)


def answering(change: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """A kernel that is right but for a last change of its answer."""

    def attend(**given: Any) -> Any:
        return change(*honest_attention(**given))

    return attend


def gates_of(case: Case, answer: Answer, contract: Contract | None = None) -> dict[str, GateResult]:
    """The numeric gates of an answer, by name."""
    operation = operation_of(case)
    held_to = contract or operation.default_contract(case)
    tally = judge(*answer, rows_of(case), contract=held_to, family=case.family)
    return {gate.gate: gate for gate in tally.results()}


def failing(gates: dict[str, GateResult]) -> set[str]:
    return {name for name, gate in gates.items() if not gate.passed}


def gates_that_fail(record: Record) -> set[str]:
    """Names of the gates of a record that do not hold."""
    return failing({gate.gate: gate for gate in record.gates})


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How an emulated low-precision kernel orders its work.

    Attributes:
        tile: Keys at a time.
        backwards: Whether the last tile comes first.
        split: Keys of each part whose result is merged in float32 at the end; None for one part.
        from_p: Whether the denominator sums the rounded weights.
    """

    tile: int = 16
    backwards: bool = False
    split: int | None = None
    from_p: bool = False


STYLES = (
    Style(),
    Style(tile=7, backwards=True),
    Style(tile=64, from_p=True),
    Style(tile=5, split=11),
    Style(tile=16, split=32, backwards=True, from_p=True),
)


def flash(q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, scale: float, style: Style) -> Answer:
    """Attention of one request by running maximum: float32 sums, weights rounded to the dtype of ``q``.

    Args:
        q: ``[n, H, Dq]``, half precision or float32; ``k`` and ``v`` have as many heads.
        k: ``[m, H, Dq]``.
        v: ``[m, H, Dv]``.
        last_key: ``[n]``, last visible key.
        scale: Factor on the logits.
        style: Order of the work.

    Returns:
        ``out`` and ``lse`` in float32, not yet rounded.
    """
    ends = [*range(style.split, len(k), style.split), len(k)] if style.split else [len(k)]
    out, lse = torch.zeros(*q.shape[:2], v.shape[2]), torch.full(q.shape[:2], -math.inf)
    for start, end in itertools.pairwise([0, *ends]):
        part = _flash_part(q, k[start:end], v[start:end], last_key - start, scale, style)
        out, lse = _merged((out, lse), part)
    return out, lse


def _merged(a: Answer, b: Answer) -> Answer:
    """Join two partial results with weights that sum to 1 by division, as kernels do."""
    highest = torch.maximum(a[1], b[1])
    shift = highest.masked_fill(highest == -math.inf, 0.0)
    weight_a, weight_b = torch.exp(a[1] - shift), torch.exp(b[1] - shift)
    total = weight_a + weight_b
    mixed = weight_a[..., None] * a[0] + weight_b[..., None] * b[0]
    return mixed / total.clamp(min=1.0)[..., None], shift + torch.log(total)


def _flash_part(q: Tensor, k: Tensor, v: Tensor, last_key: Tensor, scale: float, style: Style) -> Answer:
    heads_first = q.float().transpose(0, 1)
    highest = torch.full((q.shape[1], len(q), 1), -math.inf)
    total, acc = torch.zeros_like(highest), torch.zeros(q.shape[1], len(q), v.shape[2])
    tiles = list(range(0, len(k), style.tile))
    for start in reversed(tiles) if style.backwards else tiles:
        keys = slice(start, start + style.tile)
        logits = scale * heads_first @ k[keys].float().permute(1, 2, 0)
        hidden = torch.arange(len(k))[keys] > last_key[:, None]
        logits = logits.masked_fill(hidden, -math.inf)
        raised = torch.maximum(highest, logits.amax(-1, keepdim=True))
        shift = raised.masked_fill(raised == -math.inf, 0.0)
        weights = torch.exp(logits - shift)
        rounded = weights.to(q.dtype).float()
        shrink = torch.exp(highest - shift)
        total = total * shrink + (rounded if style.from_p else weights).sum(-1, keepdim=True)
        acc = acc * shrink + rounded @ v[keys].float().transpose(0, 1)
        highest = raised
    out = torch.where(total > 0, acc / total.clamp(min=1e-37), 0.0)
    return out.transpose(0, 1), (highest + torch.log(total))[..., 0].T


def emulated_attention(case: Case, style: Style) -> Answer:
    """What an honest kernel of that style answers to a case of ``attention``."""
    given, sizes = arguments_of(case), case.sizes
    group = sizes["num_heads"] // sizes["num_kv_heads"]
    k, v = (given[name].repeat_interleave(group, dim=1) for name in ("k", "v"))
    parts = []
    for queries, keys in zip(ranges(sizes["query_lens"]), ranges(sizes["key_lens"]), strict=True):
        n, m = queries.stop - queries.start, keys.stop - keys.start
        last_key = torch.arange(n) + m - n if sizes["causal"] else torch.full((n,), m - 1)
        parts.append(flash(given["q"][queries], k[keys], v[keys], last_key, sizes["softmax_scale"], style))
    return stored(_joined(parts), case)


def emulated_mla(case: Case, style: Style, merge_dtype: torch.dtype = torch.float32) -> Answer:
    """What an honest chunking kernel answers to a case of ``mla_prefill``: K, V and each partial result are rounded.

    With a ``merge_dtype`` below float32 it is not honest: the running result is kept in that dtype.
    """
    given, sizes, dtype = arguments_of(case), case.sizes, getattr(torch, case.dtype)
    weights = given["kv_b_proj"].float().split([sizes["d_nope"], sizes["d_v"]], dim=1)
    parts = []
    for queries, slots, positions in mla_oracle.requests(*(given[name] for name in MLA_INDICES)):
        latent, rope = given["kv_c"][slots].float(), given["k_pe"][slots].float()
        k, v = (tensor.to(dtype) for tensor in mla_oracle.expand_latent(latent, rope, *weights))
        history = len(slots) - len(positions)
        edges = [*range(0, history, sizes["history_chunk_size"]), *([history] if history else [0]), len(slots)]
        total = None
        for start, end in reversed(list(itertools.pairwise(edges))):
            part, part_lse = flash(
                given["q"][queries], k[start:end], v[start:end], positions - start, sizes["softmax_scale"], style
            )
            part = part.to(dtype).float()
            total = (part, part_lse) if total is None else _merged(total, (part, part_lse))
            total = total[0].to(merge_dtype).float(), total[1]
        if total is not None:
            parts.append(total)
    return stored(_joined(parts), case)


def emulated(case: Case, style: Style) -> Answer:
    return emulated_attention(case, style) if case.op == "attention" else emulated_mla(case, style)


def ranges(lengths: list[int]) -> Iterator[slice]:
    """The range of each request in a packed batch."""
    for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
        yield slice(start, end)


def _joined(parts: list[Answer]) -> Answer:
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def planned(case: Case, given: dict[str, Any], **changes: Any) -> MlaPrefillPlan:
    """A plan of the chunked twin for a case's inputs."""
    sizes = ("num_heads", "kv_lora_rank", "d_nope", "d_rope", "d_v")
    options: dict[str, Any] = {
        "shape": MlaShape(**{name: case.sizes[name] for name in sizes}),
        "dtype": given["q"].dtype,
        "num_slots": len(given["kv_c"]),
        "history_chunk_size": given["history_chunk_size"],
        "provider": "torch",
    }
    index: dict[str, Any] = {name: given[name] for name in MLA_INDICES}
    return plan_mla_prefill(**index | options | changes)


def forward(given: dict[str, Any], plan: MlaPrefillPlan, **changes: Any) -> tuple[Tensor, Tensor | None]:
    """The twin's answer, some tensors changed."""
    tensors = {name: given[name] for name in MLA_TENSORS}
    return mla_prefill(**tensors | changes, softmax_scale=given["softmax_scale"], plan=plan)
