"""A question about lists put differently gets the same answer, and a kernel that sees the difference is found."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU
from sparse_cases import OPERATION, judged_sparse, sparse_arguments, sparse_case
from torch import Tensor

from assay.harness.faults._softmax import normalised_first
from assay.harness.faults._sparse import sparse_twin
from assay.harness.metamorphic.sparse_mla import MOVES
from assay.harness.poison import same_bits
from assay.harness.record import Verdict

LISTS: dict[str, Any] = {"holes": "between", "repeats": "some", "sink": "mixed", "layout": "within"}
PEAKED = sparse_case("peaked", "bfloat16", query_lens=[4, 3], **LISTS)


def test_moves_leave_the_question_as_it_is() -> None:
    inputs = OPERATION.inputs(PEAKED, CPU)
    before, first = dict(inputs.arguments), sparse_twin(inputs.arguments)
    kept = {name: before[name].clone() for name in ("q", "kv", "indices")}
    MOVES.relabel(inputs, torch.Generator().manual_seed(3))  # type: ignore[misc]
    assert not torch.equal(before["indices"], kept["indices"])
    assert torch.isfinite(before["kv"][[0, -1]]).all()
    assert all(map(same_bits, sparse_twin(inputs.arguments), first))
    inputs.ledger.restore()
    assert torch.equal(before["indices"], kept["indices"])
    MOVES.poison(PEAKED, inputs, {0}, math.nan)
    poisoned = sparse_twin(inputs.arguments)
    assert bool(poisoned[0][:4].isnan().any())
    assert all(same_bits(new[4:], old[4:]) for new, old in zip(poisoned, first, strict=True))
    inputs.ledger.restore()
    MOVES.scale_values(inputs.arguments, 2.0**12)
    scaled = sparse_twin(inputs.arguments)
    assert same_bits(scaled[0], first[0] * 2**12)
    assert all(map(same_bits, scaled[1:], first[1:]))
    half = sparse_arguments(replace(PEAKED, dtype="float16"))
    assert MOVES.largest_value(half) == 65504.0
    assert 3 < MOVES.largest_value(sparse_arguments(PEAKED)) < 6


def rounded_elsewhere(arguments: dict[str, Any], where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As right an answer: in some queries weights are divided before they are rounded, not after."""
    out, lse, top = sparse_twin(arguments)
    return torch.where(where, sparse_twin(arguments, softmax=normalised_first)[0], out), lse, top


def by_place(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where a list begins at an odd place."""
    return rounded_elsewhere(arguments, arguments["indices"][:, :1, None] % 2 == 1)


def by_content_of_free_rows(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows that nobody lists are numbers."""
    return rounded_elsewhere(arguments, arguments["kv"].isfinite().all())


def by_size_of_rows(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where rows are large."""
    return rounded_elsewhere(arguments, arguments["kv"][arguments["indices"][0, 0].long()].abs().max() > 100)


@pytest.mark.parametrize(
    ("function", "relation"),
    [(by_place, "relabel slots"), (by_content_of_free_rows, "unused content"), (by_size_of_rows, "scale values")],
)
def test_the_same_question_put_differently_gets_the_same_bits(function: Any, relation: str) -> None:
    record = judged_sparse(PEAKED, function)
    assert record.verdict is Verdict.METAMORPHIC
    assert record.text.startswith(relation)
    clean = judged_sparse(PEAKED, lambda **arguments: sparse_twin(arguments))
    assert clean.verdict is Verdict.PASS
    asked = [gate.gate for gate in clean.gates if gate.gate.startswith("G8")]
    assert asked == ["G8 relabel slots", "G8 unused content", "G8 poisoned neighbours", "G8 scale values"]


def test_a_neighbour_may_change_bits_and_no_more() -> None:
    def neighbourly(spoilt: bool) -> Any:
        def attend(**arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
            others = arguments["q"].isnan().any()
            out, lse, top = rounded_elsewhere(arguments, others)
            return torch.where(others & torch.tensor(spoilt), 2 * out, out), lse, top

        return attend

    assert judged_sparse(PEAKED, neighbourly(spoilt=False)).verdict is Verdict.PASS
    record = judged_sparse(PEAKED, neighbourly(spoilt=True))
    assert record.verdict is Verdict.METAMORPHIC
    assert record.text.startswith("poisoned neighbours")
