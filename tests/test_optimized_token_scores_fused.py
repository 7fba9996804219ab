"""Token scores within a prefill: nothing is projected again, nothing left over, nothing else moved by a bit."""

import itertools
from typing import Any

import pytest
import torch
from builders import MLA_INDICES, MLA_TENSORS, arguments_of, forward
from score_inputs import CONTEXTS, INF, alone, check, fused, oracle_scores, plans, request_of, score_case
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from assay.harness.case import Case
from assay.optimized.mla_prefill import mla_prefill
from assay.optimized.token_scores import plan_token_scores

MODES = ("logits", "probability")
IMPLEMENTATIONS = ("torch", "triton")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_the_callers_buffer_is_reset_whatever_it_holds_and_however_it_lies(mode: str, implementation: str) -> None:
    case = score_case(dtype="float16", seed=7)
    given = arguments_of(case)
    plan, score_plan = plans(case, given, mode, request_of("sink"), implementation=implementation)
    expected = alone(given, score_plan)
    rows, width = score_plan.score_shape
    # every second row and column of a larger buffer
    inner = slice(1, 2 * rows + 1, 2), slice(2, 2 * width + 2, 2)
    outside = torch.ones(2 * rows + 1, 2 * width + 3, dtype=torch.bool)
    outside[inner] = False
    for held in (1e6, -1e6, torch.nan, INF) if implementation == "torch" else (torch.nan,):
        buffer = torch.full(outside.shape, held)
        fused(given, plan, score_plan, buffer[inner])
        assert torch.equal(buffer[inner], expected)
        buffer[inner] = held
        assert alone(given, score_plan, scores=buffer[inner]).data_ptr() == buffer[inner].data_ptr()
        assert torch.equal(buffer[inner], expected)
        assert bool((buffer[outside].nan_to_num(7.0) == torch.tensor(held).nan_to_num(7.0)).all())


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_of_the_scores_of_the_layer_before(mode: str) -> None:
    case = score_case(dtype="bfloat16", seed=7)
    given = arguments_of(case)
    plan, score_plan = plans(case, given, mode, request_of("full"))
    scores = fused(given, plan, score_plan)[2]
    before, negated = scores.clone(), given | {"q": -given["q"]}
    fused(negated, plan, score_plan, scores)
    assert torch.equal(scores, fused(negated, plan, score_plan)[2])
    assert not torch.equal(scores, before)


class CountedRows(TorchDispatchMode):
    """Counts the rows that are multiplied with the up-projection, and notes the largest result of any operation."""

    def __init__(self, case: Case) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        sizes = case.sizes
        self.weight = sizes["kv_lora_rank"], sizes["num_heads"] * (sizes["d_nope"] + sizes["d_v"])
        self.rows, self.largest = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and args[-1].shape == self.weight:
            self.rows += args[-2].shape[0]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result._is_view() and not func._schema.is_mutable:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mode", MODES)
def test_scores_project_no_row_again(mode: str, implementation: str) -> None:
    case = score_case(dtype="float32")
    given = arguments_of(case)
    plan, score_plan = plans(case, given, mode, request_of("sink"), implementation=implementation)
    with CountedRows(case) as counted:
        fused(given, plan, score_plan)
    assert counted.rows == sum(CONTEXTS) == plan.projected_rows
    with CountedRows(case) as counted:
        alone(given, score_plan)
    # alone, probabilities need no keys, and logits those of each pass that holds a candidate
    assert counted.rows == (sum(CONTEXTS) if mode == "logits" else 0)


def test_passes_without_a_candidate_are_left_out() -> None:
    case = score_case(dtype="float32")
    given = arguments_of(case)
    request = {"query_ranges": torch.tensor([[56, 60], [0, 0], [0, 0], [0, 0]]), "candidate_ranges": None}
    _, score_plan = plans(case, given, "logits", request | {"recent_keep_tokens": 25, "candidate_start": 17})
    # of the chunks of 16 tokens only the second and the third hold any of 17 .. 34
    assert [len(part.spans) for part in score_plan.passes] == [0, 0, 1, 1, 0, 0, 0]
    spans = [span for part in score_plan.passes for span in part.spans]
    assert [(span.first_key, span.position, span.num_keys) for span in spans] == [(1, 17, 15), (0, 32, 3)]
    with CountedRows(case) as counted:
        alone(given, score_plan)
    assert counted.rows == 32


class NotLaunched:
    """Stands where a kernel does, and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: None


@pytest.mark.parametrize("mode", MODES)
def test_scratch_does_not_grow_with_the_history(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the interpreter copies whole tensors: only what the host allocates counts
    host = pytest.importorskip("assay.optimized._token_scores_triton")
    for kernel in ("logits_kernel", "denominator_kernel", "join_kernel", "probability_kernel"):
        monkeypatch.setattr(host, kernel, NotLaunched())
    largest, planned_bytes = [], []
    for history in (64, 1024):
        case = score_case(query_lens=[6], context_lens=[6 + history], num_heads=2, history_chunk_size=64)
        given = arguments_of(case)
        request = {"query_ranges": torch.tensor([[history, history + 6]]), "candidate_start": 1}
        _, score_plan = plans(case, given, mode, request, implementation="triton")
        scores = torch.empty(score_plan.score_shape)
        with CountedRows(case) as counted:
            alone(given, score_plan, scores=scores)
        largest.append(counted.largest)
        planned_bytes.append(score_plan.workspace_bytes)
    assert largest[0] == largest[1] > 0
    assert planned_bytes[0] == planned_bytes[1]
    assert (planned_bytes[0] > 0) == (mode == "probability")


def test_a_layer_without_scores_between_two_with_them() -> None:
    case = score_case(dtype="float32")
    given = arguments_of(case)
    plan, logits = plans(case, given, "logits", request_of("full"))
    probability = plan_token_scores(plan, mode="probability", implementation="torch", **request_of("sink"))
    first = fused(given, plan, logits)
    plain = forward(given, plan)
    assert torch.equal(plain[0], first[0])
    second = fused(given, plan, probability)
    assert torch.equal(second[0], first[0])
    check(second[2], given, "probability", request_of("sink"))
    assert torch.equal(fused(given, plan, logits)[2], first[2])


def test_the_output_is_the_same_whether_or_not_the_lse_is_asked_for() -> None:
    case = score_case(dtype="float32")
    given = arguments_of(case)
    plan, score_plan = plans(case, given, "probability", request_of("full"))
    expected = fused(given, plan, score_plan)
    scores = torch.zeros(score_plan.score_shape)
    tensors = (given[name] for name in MLA_TENSORS)
    out, lse = mla_prefill(
        *tensors,
        softmax_scale=given["softmax_scale"],
        plan=plan,
        return_lse=False,
        scores=scores,
        score_plan=score_plan,
    )
    assert lse is None
    assert torch.equal(out, expected[0])
    assert torch.equal(scores, expected[2])


def test_inputs_are_not_written() -> None:
    case = score_case(dtype="bfloat16")
    given = arguments_of(case)
    before = {name: given[name].clone() for name in (*MLA_TENSORS, *MLA_INDICES)}
    for mode, name in itertools.product(MODES, ("full", "sink")):
        plan, score_plan = plans(case, given, mode, request_of(name))
        fused(given, plan, score_plan)
        alone(given, score_plan)
    for name, tensor in before.items():
        assert torch.equal(tensor.nan_to_num(7.0), given[name].nan_to_num(7.0)), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_window_that_spans_two_steps(implementation: str) -> None:
    case = score_case(dtype="float32", seed=9)
    given = arguments_of(case)
    whole = {"query_ranges": torch.tensor([[54, 60], [0, 0], [0, 0], [0, 0]])}
    expected = {mode: oracle_scores(given, mode, whole)[:1] for mode in MODES}
    # the nine current tokens of the first request in steps of six and three
    rows = {"request_rows": given["request_rows"][:1]}
    steps = [
        given | rows | {"q": given["q"][:6], "cu_seqlens": torch.tensor([0, 6]), "context_lens": torch.tensor([57])},
        given | rows | {"q": given["q"][6:9], "cu_seqlens": torch.tensor([0, 3]), "context_lens": torch.tensor([60])},
    ]
    windows = [{"query_ranges": torch.tensor([[54, 57]])}, {"query_ranges": torch.tensor([[57, 60]])}]
    parts, lses = [], []
    for step, window in zip(steps, windows, strict=True):
        plan, score_plan = plans(case, step, "logits", window, implementation=implementation)
        _, lse, scores = fused(step, plan, score_plan)
        parts.append(scores)
        lses.append(lse)
    joined = torch.maximum(*parts)
    assert torch.equal(joined == -INF, expected["logits"] == -INF)
    torch.testing.assert_close(joined.double(), expected["logits"], rtol=1e-5, atol=1e-4)

    # probabilities are scored once, from the rows that the caller kept of both steps
    kept = (
        given
        | rows
        | {
            "q": torch.cat([steps[0]["q"][3:], steps[1]["q"]]),
            "cu_seqlens": torch.tensor([0, 6]),
            "context_lens": torch.tensor([60]),
        }
    )
    _, score_plan = plans(case, kept, "probability", {"query_ranges": torch.tensor([[54, 60]])})
    scores = alone(kept, score_plan, lse=torch.cat([lses[0][3:], lses[1]]))
    torch.testing.assert_close(scores.double(), expected["probability"], rtol=1e-5, atol=1e-7)
