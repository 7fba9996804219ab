"""What goes wrong in a question put differently: its verdict, behind whatever is wrong with the plain answer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import CPU, attention_case, honest_attention, operation_of

from assay.harness import operations
from assay.harness.case import Case
from assay.harness.faults._kda_step_slots import single as single_step
from assay.harness.faults._kda_step_twin import step_twin
from assay.harness.faults._kda_twin import kda_twin
from assay.harness.faults._kda_variants import single
from assay.harness.kernels import wrap_function
from assay.harness.metamorphic.rearranged import BrokenError, MisshapenError, RefusedError, asked, what_it_raises
from assay.harness.operation import CaseRequest
from assay.harness.operations._kda_cases import Form
from assay.harness.operations._kda_step_cases import StepForm
from assay.harness.plugin import kernel
from assay.harness.record import GateResult, Record, Verdict
from assay.harness.runner import run_case

ATTENTION = attention_case(family="peaked", seed=3, query_lens=[9, 5, 1, 12], key_lens=[40, 5, 33, 23])
SMALL: dict[str, Any] = {"num_heads": 1, "num_v_heads": 2, "head_dim_k": 8, "head_dim_v": 12, "scale": 0.25}


def plain(form: Any) -> dict[str, Any]:
    return {name: field.default for name, field in form.__dataclass_fields__.items()}


def kda_case(**sizes: Any) -> Case:
    own = {"seq_lens": [5, 0, 9, 17], "checkpoints": "some"}
    return Case(op="kda", family="diffuse", dtype="float32", seed=3, sizes=SMALL | plain(Form) | own | sizes)


def step_case() -> Case:
    own = {"seq_lens": [3, 0, 2, 1], "columns": 4}
    return Case(op="kda_step", family="diffuse", dtype="float32", seed=5, sizes=SMALL | plain(StepForm) | own)


def judged(function: Callable[..., Any], case: Case, contract: Any = None) -> Record:
    operation = operation_of(case)
    wrapped = function if contract is None else kernel(contract=contract)(function)
    return run_case(operation, wrap_function(wrapped, operation), case, CPU)


def shortened(change: Callable[[tuple[torch.Tensor, ...]], Any], wrong: float = 1.0) -> Callable[..., Any]:
    """The twin of kda whose answer is another one in the form of a call without checkpoints."""

    def answer(**arguments: Any) -> Any:
        out, *states = kda_twin(arguments)
        found = (out * wrong, *states)
        return found if arguments["checkpoints"] is not None else change(found)

    return answer


SHAPES: dict[str, tuple[Callable[[tuple[torch.Tensor, ...]], Any], str]] = {
    "two": (lambda a: a[:2], "a kernel must return (out, final_state, checkpoint_states), got tuple"),
    "nothing": (lambda a: None, "a kernel must return (out, final_state, checkpoint_states), got NoneType"),
    "a row short": (lambda a: (a[0][1:].clone(), *a[1:]), "out must have shape (11, 2, 12), got (10, 2, 12)"),
    "other dtype": (lambda a: (a[0], a[1].bfloat16(), a[2]), "final_state must have the declared precision fp32"),
    "no tensor": (lambda a: (a[0], None, a[2]), "final_state must be a torch.Tensor, got NoneType"),
}


@pytest.mark.parametrize("which", SHAPES)
def test_the_form_of_an_answer_to_another_question_is_structure(which: str) -> None:
    change, text = SHAPES[which]
    record = judged(shortened(change), kda_case(), single)
    assert record.verdict is Verdict.STRUCTURE
    assert record.text.startswith(f"split sequences: {text}")


def test_what_is_wrong_with_the_plain_answer_comes_first() -> None:
    def raises(answer: Any) -> Any:
        raise RuntimeError("no such call")

    for change in (SHAPES["two"][0], raises):
        assert judged(shortened(change, wrong=1.5), kda_case(), single).verdict is Verdict.NUMERIC
    record = judged(shortened(raises), kda_case(), single)
    assert record.verdict is Verdict.METAMORPHIC
    assert record.text == "split sequences: the kernel raised RuntimeError: no such call"


def test_a_plain_answer_of_another_form_is_structure_whatever_would_follow() -> None:
    record = judged(shortened(SHAPES["two"][0]), kda_case(checkpoints="none"), single)
    assert (record.verdict, record.text) == (Verdict.STRUCTURE, SHAPES["two"][1])


@pytest.mark.parametrize("error", [NotImplementedError("no empty lists"), MemoryError("none left")])
def test_a_refusal_of_another_question_says_nothing_and_memory_is_nobodys_fault(error: Exception) -> None:
    def refuses(answer: Any) -> Any:
        raise error

    expected = {NotImplementedError: Verdict.PASS, MemoryError: Verdict.OUT_OF_MEMORY}[type(error)]
    assert judged(shortened(refuses), kda_case(), single).verdict is expected


def test_a_step_on_a_pool_elsewhere_is_asked_with_the_same_care() -> None:
    case, calls = step_case(), []
    first = operations.load("kda_step").inputs(case, CPU).arguments["slot_table"]

    def answering(change: Callable[[Any], Any]) -> Callable[..., Any]:
        def step(**arguments: Any) -> Any:
            found = step_twin(arguments)
            return found if torch.equal(arguments["slot_table"], first) else change(found)

        return step

    def raises(found: Any) -> Any:
        calls.append(1)
        raise RuntimeError("no such slot")

    short = judged(answering(lambda found: found[0][1:].clone()), case, single_step)
    assert short.verdict is Verdict.STRUCTURE
    assert short.text == "relabel slots: out must have shape (7, 2, 12), got (6, 2, 12)"
    broken = judged(answering(raises), case, single_step)
    assert broken.verdict is Verdict.METAMORPHIC
    assert broken.text == "relabel slots: the kernel raised RuntimeError: no such slot"
    # all of them have another table, and each is asked whatever became of those before it
    failed = [gate.gate for gate in broken.gates if not gate.passed]
    assert failed == ["G8 relabel slots", "G8 accepted counts", "G8 permute sequences"]
    assert len(calls) == len(failed)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda out, lse: (out, lse.T.contiguous()), "lse must have shape"),
        (lambda out, lse: (out, lse.double()), "lse must have the declared precision fp32, got torch.float64"),
        (lambda out, lse: out, "a kernel must return (out, lse), got Tensor"),
    ],
)
def test_attention_to_another_batch_must_have_its_form(change: Callable[..., Any], text: str) -> None:
    wanted = ATTENTION.sizes["key_lens"]

    def attend(**arguments: Any) -> Any:
        answer = honest_attention(**arguments)
        return answer if arguments["cu_seqlens_k"].diff().tolist() == wanted else change(*answer)

    record = judged(attend, ATTENTION)
    assert record.verdict is Verdict.STRUCTURE
    assert record.text.startswith(f"permute requests: {text}")


def test_a_relation_ends_where_its_kernel_does() -> None:
    gates: list[GateResult] = []
    for error in (RefusedError("no"), BrokenError("it fell"), MisshapenError("too short")):
        with asked("turn", gates):
            raise error
    assert [(gate.gate, gate.text) for gate in gates] == [("G8 turn", "turn: it fell"), ("G0 turn", "turn: too short")]
    assert not any(gate.passed for gate in gates)
    with pytest.raises(KeyError), asked("turn", gates):
        raise KeyError("a fault of the judge")
    with pytest.raises(BrokenError, match="the kernel raised KeyError: 'x'"), what_it_raises():
        raise KeyError("x")


def test_states_without_initial_ones_are_asked_for_in_both_formats() -> None:
    request = CaseRequest(tier="smoke", seed=0, dtypes=("float32", "float16", "bfloat16"))
    cases = operations.load("kda").cases(request)
    assert {case.sizes["state_dtype"] for case in cases if not case.sizes["initial"]} == {"float32", "bfloat16"}
