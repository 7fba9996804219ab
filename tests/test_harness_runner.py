"""Whatever a kernel does, the answer is a record, and its verdict names what was wrong."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from builders import (
    CPU,
    Answer,
    answering,
    arguments_of,
    attention_case,
    gates_that_fail,
    honest_attention,
    honest_mla,
    judged,
    mla_case,
    operation_of,
    rows_of,
)
from torch import Tensor

from assay.harness.case import Case
from assay.harness.kernels import wrap_function
from assay.harness.operation import Kernel, Operation, Rows
from assay.harness.record import Record
from assay.harness.runner import run_case


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_an_honest_kernel_passes_with_every_row_judged(dtype: str) -> None:
    record = judged(honest_attention, attention_case(dtype=dtype))
    assert (record.verdict, record.text, gates_that_fail(record)) == ("PASS", "", set())
    assert record.rows_judged == 14 * 2
    names = {gate.gate for gate in record.gates}
    assert {"G1 out", "G4 envelope", "G5 row rms", "G6 lse", "G6 pooled scale by all", "G7 repeat out"} <= names
    assert record.case == attention_case(dtype=dtype).to_json()
    assert (record.op, record.kernel, record.device) == ("attention", "honest_attention", "cpu")
    assert record.seconds > 0


def test_an_honest_kernel_passes_on_a_slot_mapped_history() -> None:
    for layout in ("split", "bundled"):
        assert judged(honest_mla, mla_case(layout=layout)).verdict == "PASS"


def planted(out: Tensor, lse: Tensor, name: str, value: float) -> Answer:
    (out if name == "out" else lse)[3, 1, ...] = value
    return out, lse


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["out", "lse"])
def test_a_value_that_is_no_number_is_named_with_its_place(name: str, value: float) -> None:
    record = judged(answering(lambda out, lse: planted(out, lse, name, value)), attention_case())
    assert (record.verdict, gates_that_fail(record)) == ("NONFINITE", {f"G1 {name}"})
    assert record.worst is not None
    where = record.worst.where
    assert where is not None
    assert (where.request, where.token, where.head) == (0, 3, 1)


def test_a_row_without_keys_must_be_zero_and_minus_infinity() -> None:
    case = attention_case(query_lens=[4], key_lens=[2])
    assert judged(honest_attention, case).verdict == "PASS"
    wrong: list[tuple[Callable[[Tensor, Tensor], Any], str]] = [
        (lambda out, lse: (out, lse.masked_fill(lse == -math.inf, 0.0)), "G1 lse"),
        (lambda out, lse: (out, lse.masked_fill(lse == -math.inf, math.inf)), "G1 lse"),
        (lambda out, lse: (out.where(out != 0, 1e-30), lse), "G1 out"),
    ]
    for change, gate in wrong:
        record = judged(answering(change), case)
        assert (record.verdict, gates_that_fail(record)) == ("NONFINITE", {gate})


def test_a_wrong_value_is_numeric_with_its_place() -> None:
    def attend(**given: Any) -> Answer:
        out, lse = honest_mla(**given)
        out[4, 1, 7] += 0.5
        return out, lse

    record = judged(attend, mla_case())
    assert record.verdict == "NUMERIC"
    assert record.text.startswith("G4 envelope: ")
    worst = record.worst
    assert worst is not None
    assert worst.where is not None
    where = worst.where
    assert (worst.gate, where.request, where.token, where.head, where.dim) == ("G4 envelope", 0, 4, 1, 7)
    # query 4 of 9 of the 45 tokens of its request
    assert where.position == 40
    given = arguments_of(mla_case())
    assert where.slot == given["slot_table"][given["request_rows"][0], 40]
    assert where.got is not None
    assert where.expected is not None
    assert where.got == pytest.approx(where.expected + 0.5, abs=1e-5)


class Changed:
    """An operation with one method replaced."""

    def __init__(self, operation: Operation, **methods: Any) -> None:
        self._operation = operation
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)


def judged_by(operation: Any, case: Case) -> Record:
    return run_case(operation, wrap_function(honest_attention, operation_of(case)), case, CPU)


def test_a_fault_of_the_judge_is_not_the_kernels() -> None:
    def rows(case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        raise IndexError("lost count")

    case = attention_case()
    record = judged_by(Changed(operation_of(case), rows=rows), case)
    assert record.verdict == "HARNESS_ERROR"
    assert record.text.startswith(f"IndexError: lost count ({__file__}:")


def test_a_case_that_makes_no_sense_is_invalid() -> None:
    case = mla_case("exact-one-hot", kv_lora_rank=8)
    record = judged(honest_mla, case)
    assert record.verdict == "INVALID_CASE"
    assert "kv_lora_rank must be at least 14" in record.text
    assert judged(honest_attention, attention_case("gaussian")).verdict == "INVALID_CASE"


def test_what_cannot_run_here_is_unsupported_and_never_started() -> None:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        raise RuntimeError("was started")

    case = attention_case()
    contract = operation_of(case).default_contract
    picky = Kernel(name="picky", contract=contract, bind=bind, unsupported=lambda case, device: f"no {case.dtype}")
    record = run_case(operation_of(case), picky, case, CPU)
    assert (record.verdict, record.text) == ("UNSUPPORTED", "no float32")
    large = Case(op=case.op, family=case.family, dtype=case.dtype, seed=0, sizes=case.sizes, needs_device=True)
    record = run_case(operation_of(case), picky, large, CPU)
    assert (record.verdict, record.text) == ("UNSUPPORTED", "too large for a CPU, needs a device")


def test_the_rows_of_a_chunked_request_name_its_parts_and_slots() -> None:
    case = mla_case()
    given, (first, second) = arguments_of(case), rows_of(case)
    # 9 of 45 tokens, so 36 of history in chunks of 16; then 5 tokens without history
    assert (first.split_ends, second.split_ends) == ((16, 32, 36, 45), (5,))
    assert (first.tokens.tolist(), second.tokens.tolist()) == (list(range(9)), list(range(9, 14)))
    assert first.positions.tolist() == first.last_key.tolist() == list(range(36, 45))
    assert (first.projected_dims, first.projection_depth) == (16, 32)
    assert first.slots is not None
    assert torch.equal(first.slots, given["slot_table"][given["request_rows"][0], :45].long())
    latent, weights = given["kv_c"][first.slots].double(), given["kv_b_proj"].double()
    assert first.k_terms is not None
    assert first.v_terms is not None
    terms = torch.einsum("hdr,sr->shd", weights.square(), latent.square()).sqrt()
    torch.testing.assert_close(first.k_terms, terms[..., :16], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(first.v_terms, terms[..., 16:], rtol=1e-12, atol=1e-12)


def test_the_outline_of_a_batch_names_rows_without_keys_and_their_requests() -> None:
    case = attention_case(query_lens=[4, 0, 2], key_lens=[2, 3, 0])
    outline = operation_of(case).outline(case)
    assert (outline.num_tokens, outline.num_heads, outline.d_v) == (6, 2, 16)
    assert outline.empty_rows.tolist() == [True, True, False, False, True, True]
    assert outline.requests.tolist() == [0, 0, 0, 0, 2, 2]
