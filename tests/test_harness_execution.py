"""Running a kernel: what it returns, writes, keeps and raises is found out before the oracle is asked."""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import Answer, answering, attention_case, gates_that_fail, honest_attention, honest_mla, judged, mla_case
from torch import Tensor

from assay.harness.contract import Contract
from assay.harness.plugin import kernel

STRUCTURES: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "one tensor": (lambda out, lse: out, "must return (out, lse), got Tensor"),
    "a list": (lambda out, lse: [out, lse], "must return (out, lse), got list"),
    "three": (lambda out, lse: (out, lse, out), "must return (out, lse), got tuple"),
    "nothing": (lambda out, lse: None, "must return (out, lse), got NoneType"),
    "flat heads": (lambda out, lse: (out.flatten(1), lse), "out must have shape (14, 2, 16), got (14, 32)"),
    "a token short": (lambda out, lse: (out[1:], lse), "out must have shape (14, 2, 16), got (13, 2, 16)"),
    "heads first": (lambda out, lse: (out, lse.T), "lse must have shape (14, 2), got (2, 14)"),
    "wide out": (lambda out, lse: (out.float(), lse), "out must have the declared precision fp16, got torch.float32"),
    "half lse": (lambda out, lse: (out, lse.half()), "lse must have the declared precision fp32, got torch.float16"),
    "integers": (lambda out, lse: (out.int(), lse), "out must have the declared precision fp16, got torch.int32"),
    "a parameter": (
        lambda out, lse: (torch.nn.Parameter(out), lse),
        "out must be a torch.Tensor, got Parameter",
    ),
    "numbers": (lambda out, lse: (out, lse.tolist()), "lse must be a torch.Tensor, got list"),
    "elsewhere": (lambda out, lse: (out.to("meta"), lse), "out must be on cpu, got meta"),
}


@pytest.mark.parametrize("which", STRUCTURES)
def test_an_answer_of_another_structure_is_named(which: str) -> None:
    change, text = STRUCTURES[which]
    record = judged(answering(change), attention_case(dtype="float16"))
    assert (record.verdict, record.gates) == ("STRUCTURE", [])
    assert text in record.text


def quantized(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


def nested(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(tensor))


UNREADABLE: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "sparse": (lambda out, lse: (out.to_sparse(), lse), "out must be a dense tensor .*, got layout sparse_coo"),
    "foreign": (lambda out, lse: (out.to_mkldnn(), lse), "out must be a dense tensor .*, got layout _mkldnn"),
    "nested": (lambda out, lse: (out, nested(lse)), "lse must be a dense tensor .*, got layout nested"),
    "quantized": (
        lambda out, lse: (quantized(out), lse),
        "out must be .* that stores its values, got quantized torch.qint8",
    ),
    "negated": (lambda out, lse: (torch._neg_view(-out), lse), "out must be .*, got a negated view"),
    "conjugated": (lambda out, lse: (out, torch.complex(lse, lse).conj()), "lse must be .*, got a conjugated view"),
}


@pytest.mark.parametrize("which", UNREADABLE)
def test_an_answer_whose_memory_is_not_its_values_is_named(which: str) -> None:
    change, text = UNREADABLE[which]
    record = judged(answering(change), attention_case())
    assert record.verdict == "STRUCTURE"
    assert re.fullmatch(text, record.text)


def test_a_view_of_an_input_is_no_answer() -> None:
    def attend(**given: Any) -> Answer:
        _, lse = honest_attention(**given)
        return given["q"][..., :16], lse

    record = judged(attend, attention_case())
    assert (record.verdict, record.text) == ("STRUCTURE", "out must own its memory, got a view of an input")


def test_a_head_of_a_token_left_unwritten_is_found() -> None:
    def attend(**given: Any) -> Answer:
        right, lse = honest_attention(**given)
        out = torch.empty_like(right)
        out[:13], out[13, 0] = right[:13], right[13, 0]
        return out, lse

    record = judged(attend, attention_case())
    assert (record.verdict, record.text) == ("WRITE_SCOPE", "16 of 448 elements of out left unwritten")
    assert record.worst is not None
    assert str(record.worst.where).startswith("token 13, head 1, dim 0")


@pytest.mark.parametrize("place", [-1, 448])
@pytest.mark.parametrize("when", [1, 2])
def test_a_write_beyond_its_own_memory_is_found_at_each_call(place: int, when: int) -> None:
    calls: list[int] = []

    def attend(**given: Any) -> Answer:
        right, lse = honest_attention(**given)
        out = torch.empty_like(right)
        out.copy_(right)
        calls.append(1)
        if len(calls) == when:
            out.as_strided((1,), (1,), out.storage_offset() + place).fill_(1.0)
        return out, lse

    record = judged(attend, attention_case())
    assert (record.verdict, record.text) == ("WRITE_SCOPE", "wrote outside the memory that it allocated")


def scribble(given: dict[str, Any], name: str, offset: int) -> None:
    target = given[name]
    target.as_strided((1,), (1,), target.storage_offset() + offset).fill_(9)


@pytest.mark.parametrize(
    ("name", "offset"), [("q", 0), ("v", -1), ("k", 45 * 24), ("cu_seqlens_k", 3), ("cu_seqlens_q", -256)]
)
def test_a_written_input_is_named_even_beside_its_values(name: str, offset: int) -> None:
    def attend(**given: Any) -> Answer:
        answer = honest_attention(**given)
        scribble(given, name, offset)
        return answer

    record = judged(attend, attention_case())
    assert (record.verdict, record.text) == ("MUTATED_INPUT", f"wrote its input {name}")


def test_the_buffer_behind_a_bundled_cache_is_watched() -> None:
    def attend(**given: Any) -> Answer:
        answer = honest_mla(**given)
        given["k_pe"][0].fill_(1.0)
        return answer

    assert judged(attend, mla_case(layout="bundled")).text == "wrote its input cache"


def test_noise_and_leftovers_are_not_deterministic() -> None:
    source = torch.Generator().manual_seed(1)
    kept: dict[str, Tensor] = {}

    def noisy(**given: Any) -> Answer:
        out, lse = honest_attention(**given)
        return out + 1e-7 * torch.randn(out.shape, generator=source) * out.abs(), lse

    def accumulating(**given: Any) -> Answer:
        out, lse = honest_attention(**given)
        # the sum goes on from call to call
        kept["out"] = kept.setdefault("out", torch.zeros_like(out)) + out
        return kept["out"], lse

    for attend in (noisy, accumulating):
        record = judged(attend, attention_case())
        assert record.verdict == "NONDETERMINISTIC"
        assert "G7 repeat out" in gates_that_fail(record) <= {"G7 repeat out", "G7 other addresses"}
        assert "out differs between equal calls" in record.text
    declared = kernel(contract=Contract(p="fp32", out="fp32", deterministic=False))(noisy)
    assert judged(declared, attention_case()).verdict == "PASS"


def test_a_result_in_the_memory_of_an_earlier_one_is_found() -> None:
    buffers: dict[torch.Size, Tensor] = {}

    def workspace(**given: Any) -> Answer:
        out, lse = honest_attention(**given)
        return buffers.setdefault(out.shape, torch.empty_like(out)).copy_(out), lse

    record = judged(workspace, attention_case())
    assert (record.verdict, record.text) == ("STRUCTURE", "out must own its memory, got that of an earlier result")


def test_answers_to_other_contents_are_not_answers_to_these() -> None:
    kept: list[Answer] = []
    known: dict[int, Answer] = {}

    def late(**given: Any) -> Answer:
        kept.append(honest_attention(**given))
        return copied(kept[-2] if len(kept) > 1 else kept[-1])

    def remembering(**given: Any) -> Answer:
        return copied(known.setdefault(given["q"].data_ptr(), honest_attention(**given)))

    def copied(answer: Answer) -> Answer:
        return answer[0].clone(), answer[1].clone()

    for attend in (late, remembering):
        record = judged(attend, attention_case(seed=1))
        assert (record.verdict, gates_that_fail(record)) == ("NONDETERMINISTIC", {"G7 changed contents"})
    # what it kept from the case before is of the wrong values
    assert judged(late, attention_case(seed=2)).verdict == "NUMERIC"


def test_an_answer_that_no_contents_change_is_no_memory_of_earlier_ones() -> None:
    # every row sees the key that is NaN
    case = attention_case("visible-nan", query_lens=[4, 0], key_lens=[4, 6], causal=False)
    assert judged(honest_attention, case).verdict == "PASS"


def crashing(**given: Any) -> Answer:
    raise RuntimeError("no such tile")


def test_a_crash_names_the_line_of_the_kernel() -> None:
    line = inspect.getsourcelines(crashing)[1] + 1
    record = judged(crashing, attention_case())
    assert record.verdict == "CRASH"
    assert record.text == f"RuntimeError: no such tile ({__file__}:{line})"


def test_a_crash_of_a_later_call_is_a_crash() -> None:
    calls: list[int] = []

    def attend(**given: Any) -> Answer:
        calls.append(1)
        return crashing() if len(calls) == 2 else honest_attention(**given)

    record = judged(attend, attention_case())
    assert record.verdict == "CRASH"
    assert "no such tile" in record.text


@pytest.mark.parametrize("call", [2, 3, 4, 5])
def test_a_case_that_was_served_cannot_be_refused_any_more(call: int) -> None:
    calls: list[int] = []

    def attend(**given: Any) -> Answer:
        calls.append(1)
        if len(calls) == call:
            raise NotImplementedError("only heads of 128")
        return honest_attention(**given)

    # the fourth and the fifth call are those of changed contents and of other addresses
    record = judged(attend, attention_case())
    assert record.verdict == "CRASH"
    assert record.text.startswith("refused a case that it had served: NotImplementedError: only heads of 128")


def test_memory_that_a_cpu_does_not_have_is_no_crash() -> None:
    def attend(**given: Any) -> Answer:
        torch.empty(1 << 60)
        return honest_attention(**given)

    record = judged(attend, attention_case())
    assert record.verdict == "OUT_OF_MEMORY"
    assert "you tried to allocate 4611686018427387904 bytes" in record.text


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (NotImplementedError("only heads of 128"), "UNSUPPORTED"),
        (MemoryError("too large"), "OUT_OF_MEMORY"),
        (torch.cuda.OutOfMemoryError("too large"), "OUT_OF_MEMORY"),
        (RuntimeError("CUDA error: out of memory"), "OUT_OF_MEMORY"),
        (ValueError("bad"), "CRASH"),
        (AssertionError("bad"), "CRASH"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value,
)
def test_an_error_of_a_kernel_has_its_verdict(error: Exception, verdict: str) -> None:
    def attend(**given: Any) -> Answer:
        raise error

    record = judged(attend, attention_case())
    assert record.verdict == verdict
    assert str(error) in record.text


def test_an_interrupt_is_not_swallowed() -> None:
    def attend(**given: Any) -> Answer:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        judged(attend, attention_case())


def test_a_crash_inside_a_library_names_the_line_of_the_kernel_too() -> None:
    def attend(**given: Any) -> Answer:
        torch.einsum("ab,cd", given["q"])
        raise AssertionError

    record = judged(attend, attention_case())
    assert record.text.startswith("RuntimeError: einsum()")
    assert __file__ in record.text


@pytest.mark.parametrize("later", [None, "short"])
def test_a_later_answer_of_another_structure_is_no_crash(later: str | None) -> None:
    calls: list[int] = []

    def attend(**given: Any) -> Any:
        calls.append(1)
        out, lse = honest_attention(**given)
        if len(calls) == 1:
            return out, lse
        return None if later is None else (out[1:], lse)

    assert judged(attend, attention_case()).verdict in ("STRUCTURE", "NONDETERMINISTIC")


def test_an_input_that_may_be_written_is_whole_again_at_each_call() -> None:
    @kernel(contract=Contract(p="fp32", out="fp32", mutates=("q",)))
    def attend(**given: Any) -> Answer:
        answer = honest_attention(**given)
        given["q"].mul_(2.0)
        return answer

    assert judged(attend, attention_case()).verdict == "PASS"


def test_a_kernel_that_exits_has_crashed() -> None:
    def attend(**given: Any) -> Answer:
        sys.exit(0)

    assert judged(attend, attention_case()).verdict == "CRASH"


@pytest.mark.parametrize("wanted", [{"dtype": torch.complex64}, {"device": "meta"}], ids=["complex", "meta"])
def test_unusual_memory_is_no_fault(wanted: dict[str, Any]) -> None:
    def attend(**given: Any) -> Answer:
        torch.empty(3, **wanted)
        return honest_attention(**given)

    assert judged(attend, attention_case()).verdict == "PASS"
