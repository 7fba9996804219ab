"""Rearranged questions get the same answer from right kernels, and every relation trips on a kernel made for it."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import (
    CPU,
    MLA_INDICES,
    Answer,
    attention_case,
    honest_attention,
    honest_mla,
    mla_case,
    operation_of,
    ranges,
)
from torch import Tensor

from assay.harness import plugin
from assay.harness.case import Case
from assay.harness.conventions import Conventions
from assay.harness.kernels import wrap_function
from assay.harness.layouts import prepared
from assay.harness.metamorphic import gate as metamorphic_gate
from assay.harness.metamorphic.gate import ask_again, judge_again, metamorphic_gates
from assay.harness.operation import Kernel
from assay.harness.record import GateResult

ATTENTION = attention_case(seed=3, query_lens=[9, 5, 1, 12], key_lens=[40, 5, 33, 23])
FULL = attention_case(seed=4, query_lens=[9, 5, 3], key_lens=[40, 7, 33], causal=False, layout="strided")
MLA = mla_case(seed=5, query_lens=[9, 5, 1, 2], context_lens=[45, 5, 18, 33])
LOG2_E = math.log2(math.e)
INVARIANT = {"deterministic": True, "batch_invariant": True}


def found(function: Callable[..., Any], case: Case, **promises: Any) -> dict[str, GateResult]:
    """The relations of a kernel on a case, by name; its first answer is taken as it is."""
    operation = operation_of(case)
    contract = operation.default_contract(case).promising(**promises)
    kernel = wrap_function(function, operation)
    first = kernel.bind(operation.inputs(case, CPU).arguments)()
    return {gate.gate: gate for gate in metamorphic_gates(operation, kernel, case, CPU, first, contract)}


def tripped(function: Callable[..., Any], case: Case, **promises: Any) -> set[str]:
    return {name.removeprefix("G8 ") for name, gate in found(function, case, **promises).items() if not gate.passed}


def row_by_row(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
) -> Answer:
    """Batch invariant: each row is computed by itself, in the same order whatever stands beside it."""
    return _rows(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, lambda request, count: 1)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    starts_q: Tensor,
    starts_k: Tensor,
    parts: Callable[[int, int], int],
) -> Answer:
    """Row by row, the keys of request ``r`` in ``parts(r, N)`` parts that are summed apart."""
    group = q.shape[1] // k.shape[1]
    out, lse = torch.zeros(*q.shape[:2], v.shape[2]), torch.full(q.shape[:2], -math.inf)
    lens_q, lens_k = starts_q.diff().tolist(), starts_k.diff().tolist()
    for request, (queries, keys) in enumerate(zip(ranges(lens_q), ranges(lens_k), strict=True)):
        for i in range(queries.stop - queries.start):
            seen = i + 1 + lens_k[request] - lens_q[request] if causal else lens_k[request]
            for head in range(q.shape[1]):
                if seen <= 0:
                    continue
                row, own = q[queries][i, head].float(), slice(keys.start, keys.start + seen)
                logits = scale * (k[own][:, head // group].float() * row).sum(-1)
                lse[queries.start + i, head] = torch.logsumexp(logits, 0)
                weights = torch.exp(logits - lse[queries.start + i, head]).to(q.dtype).float()
                terms = weights[:, None] * v[own][:, head // group].float()
                pieces = terms.tensor_split(parts(request, len(lens_q)))
                out[queries.start + i, head] = sum((piece.sum(0) for piece in pieces), torch.zeros(v.shape[2]))
    return out.to(q.dtype), lse


ALL_ATTENTION = {"unused content", "poisoned neighbours", "scale values", "permute requests", "split keys"}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("family", ["diffuse", "peaked", "exact-one-hot"])
@pytest.mark.parametrize("case", [ATTENTION, FULL], ids=["causal", "full and strided"])
def test_an_honest_attention_passes_every_relation(case: Case, family: str, dtype: str) -> None:
    gates = found(honest_attention, replace(case, family=family, dtype=dtype))
    assert {name.removeprefix("G8 ") for name in gates} == ALL_ATTENTION
    assert {name: gate for name, gate in gates.items() if not gate.passed} == {}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["split", "bundled"])
def test_an_honest_mla_passes_every_relation(layout: str, dtype: str) -> None:
    gates = found(honest_mla, mla_case(seed=6, dtype=dtype, layout=layout, query_lens=[9, 5], context_lens=[45, 5]))
    assert {name.removeprefix("G8 ") for name in gates} == {*ALL_ATTENTION, "relabel slots"}
    assert {name: gate for name, gate in gates.items() if not gate.passed} == {}


@pytest.mark.parametrize("op", ["attention", "mla_prefill"])
def test_rows_that_see_a_nan_are_left_out(op: str) -> None:
    case = replace(FULL if op == "attention" else MLA, family="visible-nan")
    outline = operation_of(case).outline(case)
    assert outline.nan_rows is not None
    assert bool(outline.nan_rows.any())
    gates = found(honest_attention if op == "attention" else honest_mla, case)
    assert [gate for gate in gates.values() if not gate.passed] == []
    assert set(gates) >= {"G8 unused content", "G8 poisoned neighbours", "G8 scale values"}


@pytest.mark.parametrize("op", ["attention", "mla_prefill"])
def test_the_twins_of_the_house_pass(op: str) -> None:
    case = ATTENTION if op == "attention" else MLA
    operation = operation_of(case)
    for kernel in operation.kernels()[:2]:
        if kernel.unsupported(case, CPU) is not None:
            continue
        first = kernel.bind(operation.inputs(case, CPU).arguments)()
        gates = metamorphic_gates(operation, kernel, case, CPU, first, kernel.contract(case))
        assert [gate for gate in gates if not gate.passed] == []


def test_a_row_by_row_kernel_keeps_a_promise_of_batch_invariance() -> None:
    gates = found(row_by_row, ATTENTION, **INVARIANT)
    assert "G8 alone" in gates
    assert [gate for gate in gates.values() if not gate.passed] == []


def attention_fault(name: str) -> Callable[..., Answer]:
    """A kernel that answers like the honest one until a relation asks."""

    def kernel(**arguments: Any) -> Answer:
        changed = dict(arguments)
        if name == "absolute threshold":
            changed["v"] = torch.where(arguments["v"].abs() < 1e-6, 0.0, arguments["v"])
        if name == "clamped":
            changed["v"] = arguments["v"].clamp(-448, 448)
        out, lse = honest_attention(**changed)
        if name == "last tile reads on":
            # the key after the last one of each request, with weight 0
            after = arguments["cu_seqlens_k"][1:].long().clamp(max=len(arguments["v"]) - 1)
            owner = torch.repeat_interleave(torch.arange(len(after)), arguments["cu_seqlens_q"].diff())
            out = out + 0 * arguments["v"][after][owner].repeat_interleave(2, dim=1)
        if name == "base 2":
            lse = lse * LOG2_E
        if name == "short keys":
            # a result that is wrong only where few keys are passed
            lse = torch.where(torch.tensor(len(arguments["k"]) < 90), lse + 0.01, lse)
        return out, lse

    return kernel


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("absolute threshold", "scale values"),
        ("clamped", "scale values"),
        ("last tile reads on", "poisoned neighbours"),
        ("base 2", "split keys"),
        ("short keys", "split keys"),
    ],
)
def test_each_relation_trips_on_its_fault(name: str, relation: str) -> None:
    trips = tripped(attention_fault(name), ATTENTION)
    # a wrong log-sum-exp is no longer merely rearranged once the gates see it
    assert relation in trips
    assert trips <= {relation, "permute requests"}


def test_a_scale_that_matters_in_half_precision_is_found_in_float16() -> None:
    def flushes(**arguments: Any) -> Answer:
        return honest_attention(**arguments | {"v": arguments["v"].clamp(-6, 6)})

    assert "scale values" in tripped(flushes, replace(ATTENTION, dtype="float16"))


def by_batch(parts: Callable[[int, int], int]) -> Callable[..., Answer]:
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor
    ) -> Answer:
        return _rows(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, parts)

    return kernel


def test_a_split_by_batch_size_breaks_the_promise_of_batch_invariance() -> None:
    splits = by_batch(lambda request, count: 4 if count == 1 else 1)
    assert tripped(splits, ATTENTION, **INVARIANT) == {"alone"}
    assert tripped(splits, ATTENTION) == set()


def test_a_split_by_place_in_the_batch_breaks_the_promise_of_batch_invariance() -> None:
    splits = by_batch(lambda request, count: 1 + request)
    assert "permute requests" in tripped(splits, ATTENTION, **INVARIANT)
    assert tripped(splits, ATTENTION) == set()


def test_a_neighbours_key_with_weight_is_found_without_any_promise() -> None:
    def leaks(**arguments: Any) -> Answer:
        starts = arguments["cu_seqlens_k"].clone()
        starts[1] += 1
        return honest_attention(**arguments | {"cu_seqlens_k": starts})

    assert {"permute requests", "poisoned neighbours"} <= tripped(leaks, FULL)


def unused_slot(name: str) -> Callable[..., Answer]:
    """The first slot, which holds no token, read in three ways."""

    def kernel(**arguments: Any) -> Answer:
        out, lse = honest_mla(**arguments)
        unused = sorted(set(range(len(arguments["kv_c"]))) - set(arguments["slot_table"].flatten().tolist()))
        pad = arguments["kv_c"][unused[0], 0]
        if name == "weight 0":
            return out + 0 * pad, lse
        if name == "weight 0, squared":
            return out + 0 * pad.nan_to_num(nan=0.0) ** 2, lse
        return out * torch.fmax(pad, torch.tensor(-1.0)).clamp(max=1).ne(1), lse

    return kernel


@pytest.mark.parametrize("name", ["weight 0", "weight 0, squared", "maximum over NaN"])
def test_a_read_of_an_unused_slot_is_found(name: str) -> None:
    assert "unused content" in tripped(unused_slot(name), MLA)


def test_a_slot_number_that_leaks_into_a_value_is_found() -> None:
    def leaks(**arguments: Any) -> Answer:
        out, lse = honest_mla(**arguments)
        first = arguments["slot_table"][arguments["request_rows"].long(), 0]
        owner = torch.repeat_interleave(torch.arange(len(first)), arguments["cu_seqlens"].diff())
        return out + 2.0**-30 * first[owner][:, None, None], lse

    trips = tripped(leaks, MLA)
    assert "relabel slots" in trips
    # an offset does not scale with the values, either
    assert trips <= {"relabel slots", "scale values"}


def test_a_failure_on_a_rearranged_case_is_a_finding_and_a_refusal_is_none() -> None:
    wanted = ATTENTION.sizes["key_lens"]

    def stops(error: Exception) -> Callable[..., Answer]:
        def kernel(**arguments: Any) -> Answer:
            if arguments["cu_seqlens_k"].diff().tolist() != wanted:
                raise error
            return honest_attention(**arguments)

        return kernel

    broken = found(stops(RuntimeError("no such batch")), ATTENTION)
    assert math.isinf(broken["G8 permute requests"].ratio)
    assert broken["G8 permute requests"].text == "permute requests: the kernel raised RuntimeError: no such batch"
    refusing = found(stops(NotImplementedError("no such batch")), ATTENTION)
    assert set(refusing) == {"G8 unused content", "G8 poisoned neighbours", "G8 scale values"}


def test_a_remark_of_numpy_on_nan_is_no_failure() -> None:
    """Tests turn warnings into errors; an interpreted kernel computes in numpy, which remarks on rows full of NaN."""

    def remarks(**arguments: Any) -> Answer:
        if arguments["q"].isnan().any():
            warnings.warn("All-NaN slice encountered", RuntimeWarning, stacklevel=1)
        return honest_attention(**arguments)

    assert tripped(remarks, ATTENTION) == set()


def test_a_refusal_by_case_is_no_finding() -> None:
    operation = operation_of(ATTENTION)
    honest = wrap_function(honest_attention, operation)
    kernel = Kernel(
        name="causal only",
        contract=honest.contract,
        bind=honest.bind,
        unsupported=lambda case, device: None if case.sizes["causal"] else "causal only",
    )
    first = honest.bind(operation.inputs(ATTENTION, CPU).arguments)()
    gates = metamorphic_gates(operation, kernel, ATTENTION, CPU, first, honest.contract(ATTENTION))
    assert {gate.gate.removeprefix("G8 ") for gate in gates} == ALL_ATTENTION - {"split keys"}


def test_a_kernel_that_promises_no_determinism_is_held_to_the_gates() -> None:
    generator = torch.Generator().manual_seed(0)

    def any_order(**arguments: Any) -> Answer:
        order = [torch.randperm(part, generator=generator) for part in arguments["cu_seqlens_k"].diff().tolist()]
        index = torch.cat([own + start for own, start in zip(order, arguments["cu_seqlens_k"].tolist(), strict=False)])
        return honest_attention(**arguments | {"k": arguments["k"][index], "v": arguments["v"][index]})

    assert tripped(any_order, FULL) >= {"unused content", "scale values"}
    assert tripped(any_order, FULL, deterministic=False) == set()
    gates = found(any_order, FULL, deterministic=False)
    assert {name for name, gate in gates.items() if gate.ratio > 0} >= {"G8 poisoned neighbours", "G8 split keys"}


def test_a_finding_points_at_the_element() -> None:
    def fault(**arguments: Any) -> Answer:
        out, lse = honest_attention(**arguments)
        if arguments["v"].abs().max() > 1000:
            out[17, 1, 3] *= 1 + 2.0**-23
        return out, lse

    where = found(fault, ATTENTION)["G8 scale values"].where
    assert where is not None
    assert (where.token, where.head, where.dim) == (17, 1, 3)


def test_a_finding_in_company_is_named_by_its_place_there() -> None:
    splits = by_batch(lambda request, count: 4 if count == 1 else 1)
    case = attention_case(seed=3, query_lens=[5, 9, 1, 12], key_lens=[5, 40, 33, 23])
    gate = found(splits, case, **INVARIANT)["G8 alone"]
    assert gate.where is not None
    assert gate.where.request == 1
    assert gate.where.token is not None
    assert 5 <= gate.where.token < 14


def test_an_unknown_operation_is_refused() -> None:
    kernel = wrap_function(honest_attention, operation_of(ATTENTION))
    other: Any = SimpleNamespace(name="kda", inputs=operation_of(ATTENTION).inputs)
    with pytest.raises(NotImplementedError, match=r"operation must be one of attention, .*mla_prefill, .*, got kda"):
        metamorphic_gates(other, kernel, ATTENTION, CPU, (torch.zeros(1), torch.zeros(1)), kernel.contract(ATTENTION))


def test_asking_leaves_the_inputs_as_they_were_and_needs_no_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, kernel = operation_of(MLA), wrap_function(honest_mla, operation_of(MLA))
    inputs, contract = operation.inputs(MLA, CPU), kernel.contract(MLA)
    first = kernel.bind(inputs.arguments)()
    with monkeypatch.context() as patch:
        patch.setattr("assay.harness.metamorphic.gate.judge", None)
        again = ask_again(operation, kernel, MLA, inputs, CPU, first, contract)
    assert inputs.ledger.written() == []
    assert {name for name, _ in again.answers} == {"split keys"}
    gates = judge_again(operation, MLA, inputs, contract, kernel.conventions, again)
    assert inputs.ledger.written() == []
    assert gates == metamorphic_gates(operation, kernel, MLA, CPU, first, contract)


def test_relations_are_the_same_for_the_same_case() -> None:
    once, again = found(honest_mla, MLA), found(honest_mla, MLA)
    assert once == again
    assert set(MLA_INDICES) <= set(operation_of(MLA).arguments)


def test_pages_move_where_the_operation_has_no_slots() -> None:
    @plugin.kernel(conventions=Conventions(cache="blocks", page_size=16))
    def paged(*, leak: bool = False, **arguments: Any) -> Answer:
        lens = arguments["context_lens"].tolist()
        keys: dict[str, Any] = {}
        for name in ("k", "v"):
            pages = arguments[name]
            rows = [
                pages[row.long()].flatten(0, 1)[:length]
                for row, length in zip(arguments["block_table"], lens, strict=True)
            ]
            keys[name] = torch.cat(rows)
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        given = {name: arguments[name] for name in ("q", "softmax_scale", "causal", "cu_seqlens_q")}
        out, lse = honest_attention(**given, **keys, cu_seqlens_k=starts)
        return out + leak * 2.0**-30 * arguments["block_table"][0, 0], lse

    @plugin.kernel(conventions=Conventions(cache="blocks", page_size=16))
    def leaking(**arguments: Any) -> Answer:
        return paged(leak=True, **arguments)

    operation = operation_of(ATTENTION)
    for function, trips in ((paged, False), (leaking, True)):
        kernel = wrap_function(function, operation)
        contract = kernel.contract(ATTENTION)
        inputs = prepared(operation.inputs(ATTENTION, CPU), kernel, ATTENTION, contract, operation.outline(ATTENTION))
        first = kernel.bind(inputs.arguments)()
        gates = {gate.gate: gate for gate in metamorphic_gates(operation, kernel, ATTENTION, CPU, first, contract)}
        assert gates["G8 relabel slots"].passed != trips
        assert gates["G8 unused content"].passed
        assert gates["G8 split keys"].passed


def test_equal_bits_settle_a_question_without_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    honest = metamorphic_gate._judged
    monkeypatch.setattr(metamorphic_gate, "_judged", lambda *args: judged.append(args[1].bits) or honest(*args))  # type: ignore[func-returns-value]
    assert tripped(row_by_row, FULL, deterministic=False) == set()
    # only what no bits can decide: keys split in two and merged
    assert judged == ["need not"]
