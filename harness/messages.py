"""What a worker and its parent say to each other: JSON with tensors as safetensors, never pickle.

A message is a mark, two lengths, JSON and safetensors. Anything else that arrives was written by somebody who should
not have, and is a ``MessageError``.
"""

import json
import os
import select
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from .answers import Answer
from .contract import Contract
from .conventions import Conventions
from .execution import Execution, Stop
from .metamorphic.rearranged import Rearranged
from .record import GateResult, Location, Verdict

HEADER = struct.Struct("<8sQQ")
MARK = b"assay\x00\xff\n"
# bytes, beyond the JSON of any case and the memory of any machine
MOST_TEXT, MOST_DATA = 1 << 28, 1 << 42
# between two looks at the process on the other side
LOOK_SECONDS = 0.1


class MessageError(ValueError):
    """What arrived is no message, or not the one that was asked for."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait for the other side.

    Attributes:
        end: When the time is over, by ``time.monotonic``.
        gone: Whether its process has ended, although another one may hold the pipe open.
    """

    end: float
    gone: Callable[[], bool]

    def until(self, descriptor: int, event: int) -> None:
        """Return when ``descriptor`` is ready.

        Raises:
            TimeoutError: When the time is over.
            EOFError: When the other side has gone and left nothing to read.
        """
        poll = select.poll()
        poll.register(descriptor, event)
        while (left := self.end - time.monotonic()) > 0:
            # asked first: what it wrote before its end is there by then
            gone = self.gone()
            if poll.poll(min(left, LOOK_SECONDS) * 1000):
                return
            if gone:
                raise EOFError
        raise TimeoutError


def send(descriptor: int, content: dict[str, Any], tensors: dict[str, Tensor], wait: Wait | None = None) -> None:
    """Write one message; BrokenPipeError when nobody can read it."""
    text, data = json.dumps(content).encode(), save_tensors(tensors) if tensors else b""
    left = memoryview(HEADER.pack(MARK, len(text), len(data)) + text + data)
    while left:
        piece = left
        if wait is not None:
            wait.until(descriptor, select.POLLOUT)
            # what a pipe that is ready takes without blocking
            piece = left[: select.PIPE_BUF]
        left = left[os.write(descriptor, piece) :]


def receive(descriptor: int, wait: Wait | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next message.

    Raises:
        TimeoutError: When it is not there in time.
        EOFError: When the other side is gone.
        MessageError: When something else is there.
    """
    mark, text_size, data_size = HEADER.unpack(_read(descriptor, HEADER.size, wait))
    if mark != MARK:
        raise MessageError(f"a message must begin with {MARK!r}, got {mark!r}")
    if text_size > MOST_TEXT or data_size > MOST_DATA:
        raise MessageError(
            f"a message must have at most {MOST_TEXT} + {MOST_DATA} bytes, got {text_size} + {data_size}"
        )
    text, data = _read(descriptor, text_size, wait), _read(descriptor, data_size, wait)
    try:
        content, tensors = json.loads(text), load_tensors(data) if data else {}
    except Exception as error:
        raise MessageError(f"a message must be JSON and safetensors, got {type(error).__name__}: {error}") from error
    if not isinstance(content, dict):
        raise MessageError(f"a message must be a JSON object, got {type(content).__name__}")
    return content, tensors


def _read(descriptor: int, size: int, wait: Wait | None) -> bytes:
    parts = []
    while size:
        if wait is not None:
            wait.until(descriptor, select.POLLIN)
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def encode(result: Execution | Stop) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What came of a run as JSON content and tensors; ``lost`` tells that the process can run nothing further."""
    gates = [asdict(gate) for gate in result.gates]
    if isinstance(result, Stop):
        lost = result.verdict is Verdict.CRASH and "CUDA error" in result.text
        return {"verdict": result.verdict, "text": result.text, "gates": gates, "lost": lost}, {}
    answers, again = {"first": result.first, "last": result.last}, None
    if result.again is not None:
        asked = list(result.again.answers.items())
        for number, (_, parts) in enumerate(asked):
            answers |= {f"again.{number}.{part}": answer for part, answer in enumerate(parts)}
        questions = [[name, at, len(parts)] for (name, at), parts in asked]
        again = {"gates": [asdict(gate) for gate in result.again.gates], "questions": questions}
    tensors = {
        f"{call}.{name}": tensor.contiguous().cpu()
        for call, answer in answers.items()
        for name, tensor in enumerate(answer)
    }
    promises = {"contract": asdict(result.contract), "conventions": asdict(result.conventions)}
    return {**promises, "gates": gates, "again": again, "results": len(result.first)}, tensors


def decode(content: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Execution | Stop:
    """The inverse of ``encode``, with the tensors on ``device``.

    Raises:
        MessageError: If a part is missing or is something else.
    """
    try:
        return _decoded(content, tensors, device)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MessageError(f"an answer must hold all its parts, got {type(error).__name__}: {error}") from error


def _decoded(content: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Execution | Stop:
    gates = _gates(content["gates"])
    if "verdict" in content:
        return Stop(verdict=Verdict(content["verdict"]), text=content["text"], gates=gates)
    contract = {**content["contract"], "mutates": tuple(content["contract"]["mutates"])}
    conventions = {**content["conventions"], "empty_row": tuple(content["conventions"]["empty_row"])}

    def answer(call: str) -> Answer:
        return tuple(tensors[f"{call}.{number}"].to(device) for number in range(int(content["results"])))

    again = None
    if content["again"] is not None:
        answers = {
            (str(name), int(at)): tuple(answer(f"again.{number}.{part}") for part in range(parts))
            for number, (name, at, parts) in enumerate(content["again"]["questions"])
        }
        again = Rearranged(gates=_gates(content["again"]["gates"]), answers=answers)
    return Execution(
        contract=Contract(**contract),
        first=answer("first"),
        last=answer("last"),
        gates=gates,
        conventions=Conventions(**conventions),
        again=again,
    )


def spent_on(content: dict[str, Any]) -> dict[str, float]:
    """The seconds that a worker spent on an answer, by phase.

    Raises:
        MessageError: If they are no numbers.
    """
    spent = content.get("spent")
    if not isinstance(spent, dict) or not all(isinstance(seconds, float) for seconds in spent.values()):
        raise MessageError(f"an answer must say the seconds that it took, got {spent!r}")
    return spent


def _gates(found: list[dict[str, Any]]) -> tuple[GateResult, ...]:
    places = [Location(**gate["where"]) if gate["where"] else None for gate in found]
    return tuple(GateResult(**{**gate, "where": where}) for gate, where in zip(found, places, strict=True))
