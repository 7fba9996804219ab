"""A stranger's kernel says what it is; what it says is checked where it is said, and held against it when it runs."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from builders import Answer, attention_case, honest_attention, judged, mla_case
from torch import Tensor

import assay.harness
from assay.harness import Contract, Conventions, Unsupported, kernel, operations
from assay.harness.case import Case
from assay.harness.contract import default_contract
from assay.harness.kernels import KernelNotFoundError, wrap_function
from assay.harness.plugin import Declaration, declaration_of, is_declared

ATTENTION = operations.load("attention")


def honest(**given: Any) -> Answer:
    return honest_attention(**given)


def honest_into(*, out: Tensor, lse: Tensor, **given: Any) -> None:
    """The same by destination passing."""
    right, right_lse = honest_attention(**given)
    out.copy_(right)
    lse.copy_(right_lse)


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout


def test_declaring_and_checking_are_imported_without_torch() -> None:
    code = (
        "import sys; from assay.harness import Contract, Conventions, Unsupported, check, kernel; "
        "import assay.harness.pytest_plugin; "
        "print([name for name in ('torch', 'triton', 'numpy', 'rich', 'typer') if name in sys.modules])"
    )
    assert run_python(code).strip() == "[]"


def test_the_public_names_are_listed_and_others_do_not_exist() -> None:
    assert set(assay.harness.__all__) <= set(dir(assay.harness))
    assert all(hasattr(assay.harness, name) for name in assay.harness.__all__)
    with pytest.raises(AttributeError, match=r"module 'assay.harness' has no attribute 'kernle'"):
        _ = assay.harness.kernle


def test_the_decorator_keeps_the_function_and_attaches_what_it_says() -> None:
    contract, conventions = Contract(p="fp16", out="fp16"), Conventions(lse_base="2")

    def supports(case: Case) -> bool | Unsupported:
        return True

    @kernel(
        "attention", name="acme.v3", style="dps", contract=contract, conventions=conventions, supports=supports,
        mutates=("out", "q"), api=1,
    )  # fmt: skip
    def attend() -> int:
        return 7

    assert attend() == 7
    assert is_declared(attend)
    assert declaration_of(attend) == Declaration(
        name="acme.v3", op="attention", style="dps", contract=contract, conventions=conventions, supports=supports,
        mutates=("out", "q"),
    )  # fmt: skip


def test_a_function_that_says_nothing_is_called_by_its_own_name() -> None:
    assert not is_declared(honest)
    assert declaration_of(honest) == Declaration(name="honest")
    assert declaration_of(kernel()(lambda: 0)).name == "<lambda>"


def test_a_declaration_of_another_kind_is_not_overlooked() -> None:
    def attend(**given: Any) -> None: ...

    vars(attend)["assay_kernel"] = {"op": "attention"}
    with pytest.raises(TypeError, match="assay_kernel of attend must be set by @kernel, got <class 'dict'>"):
        declaration_of(attend)


def test_a_kernel_may_be_an_object_that_is_called() -> None:
    class Launcher:
        def __call__(self, **given: Any) -> Answer:
            return honest_attention(**given)

    launcher = kernel(op="attention")(Launcher())
    assert judged(launcher, attention_case()).verdict == "PASS"
    assert judged(launcher, attention_case()).kernel == "Launcher"


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "api": ({"api": 2}, ValueError, "api must be 1, the only version that this assay serves, got 2"),
    "style": ({"style": "inplace"}, ValueError, "style must be 'return' or 'dps', got 'inplace'"),
    "contract": ({"contract": {"p": "bf16"}}, TypeError, "contract must be a Contract, got dict"),
    "conventions": ({"conventions": {"lse_base": "2"}}, TypeError, "conventions must be a Conventions, got dict"),
    "supports": ({"supports": True}, TypeError, "supports must be a function of a case, got bool"),
    "mutates": ({"mutates": "out"}, TypeError, "mutates must be a tuple of argument names, got 'out'"),
    "op": ({"op": 3}, TypeError, "op must be a text, got 3"),
    "name": ({"name": ""}, TypeError, "name must be a text, got ''"),
    "brackets": ({"op": honest}, TypeError, r"write @kernel\(\) rather than @kernel"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_cannot_be_meant_is_refused_where_it_is_written(which: str) -> None:
    said, error, text = WRONG[which]
    with pytest.raises(error, match=text):
        kernel(**said)


def test_what_cannot_carry_a_declaration_is_refused() -> None:
    builtin: Any = len
    with pytest.raises(TypeError, match="takes attributes, got builtin_function_or_method; wrap it"):
        kernel()(builtin)


@pytest.mark.parametrize("reason", ["", "  ", None])
def test_a_refusal_needs_a_reason(reason: Any) -> None:
    with pytest.raises(ValueError, match="reason must be a text, got"):
        Unsupported(reason)


def test_a_kernel_of_another_operation_is_not_called() -> None:
    @kernel("mla_prefill")
    def attend(**given: Any) -> None: ...

    with pytest.raises(KernelNotFoundError, match="attend must be declared for attention, got op 'mla_prefill'"):
        wrap_function(attend, ATTENTION)


def test_a_contract_may_depend_on_the_case() -> None:
    def promise(case: Case) -> Contract:
        return default_contract(case.dtype, projected=False, splits=False).promising(batch_invariant=True)

    wrapped = wrap_function(kernel(contract=promise)(lambda **given: honest(**given)), ATTENTION)
    assert wrapped.contract(attention_case(dtype="float16")).out == "fp16"
    assert wrapped.contract(attention_case(dtype="bfloat16")).out == "bf16"
    assert wrapped.contract(attention_case()).batch_invariant


def test_a_contract_of_another_kind_is_a_crash_of_the_kernel() -> None:
    promise: Any = lambda case: "bf16"  # noqa: E731
    record = judged(kernel(name="odd", contract=promise)(lambda **given: honest(**given)), attention_case())
    assert record.verdict == "CRASH"
    assert "contract of odd must give a Contract, got str" in record.text


def half_only(case: Case) -> bool | Unsupported:
    return case.dtype == "float16" or Unsupported(f"float16 only, not {case.dtype}")


def test_what_is_not_supported_is_not_run() -> None:
    def attend(**given: Any) -> Answer:
        if given["q"].dtype != torch.float16:
            raise RuntimeError("called in spite of it")
        return honest_attention(**given)

    careful = kernel(supports=half_only)(attend)
    refused = judged(careful, attention_case(dtype="bfloat16"))
    assert (refused.verdict, refused.text) == ("UNSUPPORTED", "float16 only, not bfloat16")
    assert judged(careful, attention_case(dtype="float16")).verdict == "PASS"


@pytest.mark.parametrize(
    ("supports", "text"),
    [
        (lambda case: False, "supports of odd must return True or Unsupported(reason), got False"),
        (lambda case: "no", "supports of odd must return True or Unsupported(reason), got 'no'"),
        (lambda case: 1 / 0, "ZeroDivisionError"),
        (lambda case: sys.exit(3), "SystemExit"),
    ],
)
def test_a_question_that_is_not_answered_is_a_crash_of_the_kernel_and_not_of_the_judge(
    supports: Any, text: str
) -> None:
    record = judged(kernel(name="odd", supports=supports)(lambda **given: honest(**given)), attention_case())
    assert record.verdict == "CRASH"
    assert text in record.text


def test_an_input_may_be_written_only_if_that_is_declared() -> None:
    def attend(**given: Any) -> Answer:
        answer = honest_attention(**given)
        # a key that no query of this case sees
        given["k"][0] = 0.0
        return answer

    unseen = attention_case(query_lens=[0, 5], key_lens=[3, 5], causal=False)
    assert judged(attend, unseen).verdict == "MUTATED_INPUT"
    assert judged(attend, unseen).text == "wrote its input k"
    assert judged(kernel(mutates=("k",))(attend), unseen).verdict == "PASS"
    both = kernel(contract=Contract(p="fp32", out="fp32", mutates=("q",)), mutates=("k", "q"))(attend)
    assert wrap_function(both, ATTENTION).contract(unseen).mutates == ("q", "k")


def test_a_name_that_is_no_argument_may_not_be_written() -> None:
    with pytest.raises(TypeError, match="mutates must name arguments of attention, got workspace, out"):
        wrap_function(kernel(mutates=("q", "workspace", "out"))(lambda **given: None), ATTENTION)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_kernel_that_writes_into_what_it_is_given_passes(dtype: str) -> None:
    record = judged(kernel(style="dps", mutates=("out", "lse"))(honest_into), attention_case(dtype=dtype))
    assert (record.verdict, record.text) == ("PASS", "")
    assert record.rows_judged == 28


def test_the_destination_has_the_shape_the_precision_and_the_poison_of_the_judge() -> None:
    seen: list[tuple[Any, ...]] = []

    @kernel(style="dps", contract=Contract(p="fp16", out="fp32", projected="fp16", splits_store="fp16"))
    def attend(*, out: Tensor, lse: Tensor, **given: Any) -> None:
        seen.append((out.dtype, tuple(out.shape), lse.dtype, tuple(lse.shape), float(out[0, 0, 0]), float(lse[0, 0])))

    judged(attend, mla_case(dtype="float16"))
    assert seen[0][:4] == (torch.float32, (14, 2, 12), torch.float32, (14, 2))
    assert seen[0][4] != seen[0][4]
    assert seen[1][4:] == (-24576.0, -24576.0)


def test_what_a_kernel_returns_besides_writing_does_not_count() -> None:
    record = judged(kernel(style="dps")(lambda *, out, lse, **given: honest_attention(**given)), attention_case())
    assert (record.verdict, record.text) == ("WRITE_SCOPE", "448 of 448 elements of out left unwritten")


@pytest.mark.parametrize("place", [-1, 448])
def test_a_write_beyond_the_destination_is_found(place: int) -> None:
    def attend(*, out: Tensor, lse: Tensor, **given: Any) -> None:
        honest_into(out=out, lse=lse, **given)
        out.as_strided((1,), (1,), out.storage_offset() + place).fill_(1.0)

    record = judged(kernel(style="dps")(attend), attention_case())
    assert (record.verdict, record.text) == ("WRITE_SCOPE", "wrote outside the memory that it allocated")


def test_a_destination_that_no_tensor_can_have_is_refused() -> None:
    eight_bits = kernel(style="dps", contract=Contract(p="e4m3", out="e4m3"))(honest_into)
    record = judged(eight_bits, attention_case())
    assert record.verdict == "CRASH"
    assert "out of a dps kernel must be one of fp64, fp32, fp16, bf16, got 'e4m3'" in record.text


def test_a_kernel_that_takes_no_destination_is_refused() -> None:
    def attend(q: Any, k: Any, v: Any, softmax_scale: Any, causal: Any, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
        """Nowhere to write."""

    wrap_function(attend, ATTENTION)
    with pytest.raises(TypeError, match="attend lacks out, lse"):
        wrap_function(kernel(style="dps")(attend), ATTENTION)


def test_a_kernel_that_needs_more_than_it_is_given_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must need only q, .*, <lambda> also needs workspace"):
        wrap_function(lambda workspace, **given: None, ATTENTION)
    wrap_function(lambda workspace=None, *rest, **given: None, ATTENTION)


def test_a_kernel_without_a_signature_is_refused() -> None:
    class Opaque:
        __signature__ = "none that Python can read"

        def __call__(self) -> None: ...

    with pytest.raises(TypeError, match="must have a signature that Python can read, wrap Opaque in a function"):
        wrap_function(Opaque(), ATTENTION)


def test_a_kernel_is_asked_about_the_case_itself() -> None:
    asked: list[Case] = []

    def supports(case: Case) -> bool:
        asked.append(case)
        return True

    judged(kernel(supports=supports)(lambda **given: honest(**given)), attention_case(seed=3))
    assert set(case.id for case in asked) == {attention_case(seed=3).id}
