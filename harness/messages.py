"""What a worker and its parent say to each other: JSON with tensors as safetensors, never pickle."""

import json
import os
import select
import struct
import time
from dataclasses import asdict
from typing import IO, Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from .contract import Contract
from .conventions import Conventions
from .execution import Execution, Stop
from .metamorphic import Rearranged
from .record import GateResult, Location, Verdict

HEADER = struct.Struct("<QQ")


def send(stream: IO[bytes] | None, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """One message: two lengths, JSON, safetensors."""
    if stream is None:
        raise BrokenPipeError
    text, data = json.dumps(content).encode(), save_tensors(tensors) if tensors else b""
    stream.write(HEADER.pack(len(text), len(data)) + text + data)
    stream.flush()


def receive(stream: IO[bytes] | None, seconds: float | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The next message; TimeoutError when it is not there in time, EOFError when the other side is gone."""
    if stream is None:
        raise EOFError
    end = None if seconds is None else time.monotonic() + seconds
    text_size, data_size = HEADER.unpack(_read(stream, HEADER.size, end))
    content = json.loads(_read(stream, text_size, end))
    return content, load_tensors(_read(stream, data_size, end)) if data_size else {}


def _read(stream: IO[bytes], size: int, end: float | None) -> bytes:
    parts, descriptor = [], stream.fileno()
    while size:
        if end is not None and not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            raise TimeoutError
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
        for name, tensor in zip(("out", "lse"), answer, strict=True)
    }
    promises = {"contract": asdict(result.contract), "conventions": asdict(result.conventions)}
    return {**promises, "gates": gates, "again": again}, tensors


def decode(content: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Execution | Stop:
    """The inverse of ``encode``, with the tensors on ``device``."""
    gates = _gates(content["gates"])
    if "verdict" in content:
        return Stop(verdict=Verdict(content["verdict"]), text=content["text"], gates=gates)
    contract = {**content["contract"], "mutates": tuple(content["contract"]["mutates"])}
    conventions = {**content["conventions"], "empty_row": tuple(content["conventions"]["empty_row"])}

    def answer(call: str) -> tuple[Tensor, Tensor]:
        return tensors[f"{call}.out"].to(device), tensors[f"{call}.lse"].to(device)

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


def _gates(found: list[dict[str, Any]]) -> tuple[GateResult, ...]:
    places = [Location(**gate["where"]) if gate["where"] else None for gate in found]
    return tuple(GateResult(**{**gate, "where": where}) for gate, where in zip(found, places, strict=True))
