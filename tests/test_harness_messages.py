"""Messages between a worker and its parent: whole ones arrive as they were sent, and nothing else is taken for one."""

import os
import time
from collections.abc import Iterator
from io import FileIO
from typing import Any

import pytest
import torch
from builders import CPU, attention_case, honest_attention, operation_of

from assay.harness.execution import Execution, Stop, execute
from assay.harness.kernels import wrap_function
from assay.harness.messages import (
    HEADER,
    MARK,
    MOST_TEXT,
    MessageError,
    Wait,
    decode,
    encode,
    receive,
    send,
    spent_on,
)
from assay.harness.record import GateResult, Location, Verdict

WHOLE = HEADER.pack(MARK, 9, 0) + b'{"a": 12}'


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """Both ends of a pipe."""
    reader, writer = os.pipe()
    with FileIO(reader, "r") as outlet, FileIO(writer, "w") as inlet:
        yield outlet, inlet


def wait(seconds: float = 60.0, *, gone: bool = False) -> Wait:
    return Wait(time.monotonic() + seconds, lambda: gone)


def test_a_message_arrives_as_it_was_sent(pipe: tuple[FileIO, FileIO]) -> None:
    tensors = {"out": torch.arange(6.0).view(2, 3), "lse": torch.tensor([1, 2], dtype=torch.int32)}
    send(pipe[1].fileno(), {"case": [1, None, "x"]}, tensors, wait())
    content, received = receive(pipe[0].fileno(), wait())
    assert content == {"case": [1, None, "x"]}
    assert {name: tensor.tolist() for name, tensor in received.items()} == {
        "out": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "lse": [1, 2],
    }


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (b"Traceback (most recent call last)", "a message must begin with"),
        (HEADER.pack(MARK, MOST_TEXT + 1, 0), "at most"),
        (HEADER.pack(MARK, 0, 1 << 63), f"got 0 \\+ {1 << 63}"),
        (HEADER.pack(MARK, 5, 0) + b'{"a":', "must be JSON and safetensors, got JSONDecodeError"),
        (HEADER.pack(MARK, 2, 0) + b"\xff\xff", "must be JSON and safetensors, got UnicodeDecodeError"),
        (HEADER.pack(MARK, 2, 4) + b"{}torn", "must be JSON and safetensors, got SafetensorError"),
        (HEADER.pack(MARK, 2, 0) + b"[]", "must be a JSON object, got list"),
    ],
    ids=["text", "much JSON", "many tensors", "torn JSON", "no text", "torn tensors", "list"],
)
def test_what_is_no_message_is_refused_at_once(sent: bytes, text: str, pipe: tuple[FileIO, FileIO]) -> None:
    pipe[1].write(sent)
    with pytest.raises(MessageError, match=text):
        receive(pipe[0].fileno(), wait())


def test_a_torn_message_is_not_waited_for_beyond_its_time(pipe: tuple[FileIO, FileIO]) -> None:
    pipe[1].write(WHOLE[:-1])
    with pytest.raises(TimeoutError):
        receive(pipe[0].fileno(), wait(0.05))


def test_a_sender_that_is_gone_is_not_waited_for(pipe: tuple[FileIO, FileIO]) -> None:
    # what it had written as a whole is still read
    pipe[1].write(WHOLE)
    assert receive(pipe[0].fileno(), wait(gone=True)) == ({"a": 12}, {})
    # this process holds the pipe open, as a copy of the sender would
    pipe[1].write(WHOLE[:-1])
    with pytest.raises(EOFError):
        receive(pipe[0].fileno(), wait(gone=True))
    pipe[1].close()
    with pytest.raises(EOFError):
        receive(pipe[0].fileno(), wait())


def test_a_request_that_nobody_takes_is_given_up(pipe: tuple[FileIO, FileIO]) -> None:
    big = {"case": "x" * (1 << 20)}
    with pytest.raises(TimeoutError):
        send(pipe[1].fileno(), big, {}, wait(0.2))
    with pytest.raises(EOFError):
        send(pipe[1].fileno(), big, {}, wait(gone=True))
    pipe[0].close()
    with pytest.raises(BrokenPipeError):
        send(pipe[1].fileno(), big, {}, wait())


def test_an_end_before_an_answer_is_read_back_as_it_was() -> None:
    gate = GateResult(gate="G2 out written", ratio=float("inf"), where=Location(token=3, head=1), text="left unwritten")
    stop = Stop(verdict=Verdict.WRITE_SCOPE, text="1 of 9 elements", gates=(gate,))
    assert decode(*encode(stop), CPU) == stop


def test_an_answer_is_read_back_whole_or_not_at_all() -> None:
    case = attention_case("peaked")
    operation = operation_of(case)
    kernel = wrap_function(honest_attention, operation)
    answer = execute(operation, kernel, case, operation.inputs(case, CPU), CPU)
    assert isinstance(answer, Execution)
    content, tensors = encode(answer)
    whole = decode(content, tensors, CPU)
    assert isinstance(whole, Execution)
    assert (whole.contract, whole.conventions, whole.gates) == (answer.contract, answer.conventions, answer.gates)
    assert torch.equal(whole.last[1], answer.last[1])
    assert answer.again is not None
    assert answer.again.answers
    assert whole.again is not None
    assert whole.again.answers.keys() == answer.again.answers.keys()
    for name in tensors:
        with pytest.raises(MessageError, match=f"got KeyError: '{name}'"):
            decode(content, {other: tensor for other, tensor in tensors.items() if other != name}, CPU)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({}, "KeyError: 'gates'"),
        ({"gates": None}, "TypeError"),
        ({"gates": [], "verdict": "FINE", "text": ""}, "ValueError: 'FINE' is not a valid Verdict"),
        ({"gates": [], "contract": {"p": "fp32", "mutates": []}, "conventions": {}}, "KeyError: 'empty_row'"),
        ({"gates": [], "contract": "bf16"}, "TypeError"),
    ],
)
def test_an_answer_with_a_part_missing_is_no_message(content: dict[str, Any], text: str) -> None:
    with pytest.raises(MessageError, match=f"an answer must hold all its parts, got {text}"):
        decode(content, {}, CPU)


@pytest.mark.parametrize("spent", [None, [1.0], {"kernel": "long"}], ids=str)
def test_an_answer_says_the_time_it_took(spent: Any) -> None:
    assert spent_on({"spent": {"kernel": 0.5}}) == {"kernel": 0.5}
    with pytest.raises(MessageError, match="must say the seconds that it took"):
        spent_on({"spent": spent})
