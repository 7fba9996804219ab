"""A failure to take along: the case, its inputs bit by bit, who failed on it, where, and how. JSON and safetensors."""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from .case import Case
from .contract import Contract
from .kernels import is_strange
from .operation import Inputs, Operation
from .poison import Ledger
from .record import GateResult, Location, Record, Verdict

# raised whenever the layout of the JSON file changes
CAPSULE_VERSION = 1
# larger inputs are drawn again from the case, and recognised by their digest
STORED_BYTES = 64 << 20
OTHER_INPUTS = "inputs differ on this machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The run in which a kernel failed: what ``--kernel`` said (None for a kernel of the house), seed and tier."""

    kernel: str | None
    seed: int
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """What a capsule file says.

    Attributes:
        case: On which the kernel failed.
        kernel: How to find the kernel: what ``--kernel`` takes.
        seed: Of the run.
        tier: Of the run.
        device: Where it ran, such as ``cpu`` or the name of a GPU.
        versions: Of Python, torch, triton and this distribution; None for what was not installed.
        contract: What the kernel declared; None where that was not known.
        verdict: How it failed.
        text: The judge's sentence about it.
        worst: The gate that decided, with the place of the worst element; None where no gate did.
        digest: sha256 of all input tensors, see ``inputs_digest``.
        arguments: Of each argument its value, or buffer, offset, shape and stride of its tensor; empty unless stored.
        tensors: The file with the buffers; None if they were too large to be stored.
    """

    case: Case
    kernel: str
    seed: int
    tier: str
    device: str
    versions: dict[str, str | None]
    contract: Contract | None
    verdict: Verdict
    text: str
    worst: GateResult | None
    digest: str
    arguments: dict[str, Any]
    tensors: Path | None


def write_capsule(
    folder: Path,
    record: Record,
    operation: Operation,
    device: torch.device,
    origin: Origin,
    contract: Contract | None = None,
) -> Path:
    """Write ``folder/<case id>-<kernel>.json`` and beside it the inputs, unless they are too large.

    Args:
        folder: Created if need be.
        record: The failure.
        operation: To which its case belongs.
        device: Where it happened; the inputs are drawn there once more.
        origin: The run.
        contract: What the kernel declared for the case; None where that is not known, as of a kernel that crashed in a
            process of its own.

    Returns:
        Path of the JSON file.
    """
    case = Case.from_json(record.case)
    inputs = operation.inputs(case, device)
    size = sum(buffer.nbytes for buffer in inputs.ledger.buffers.values())
    # a kernel is called what its author likes, and a file is not
    path = folder / f"{case.id}-{quote(record.kernel, safe='[]')}.json"
    stored = path.with_suffix(".safetensors") if size < STORED_BYTES else None
    folder.mkdir(parents=True, exist_ok=True)
    if stored is not None:
        save_file({name: buffer.cpu() for name, buffer in inputs.ledger.buffers.items()}, stored)
    judged = json.loads(record.to_json())
    content = {
        "capsule_version": CAPSULE_VERSION,
        "case": record.case,
        "kernel": origin.kernel if is_strange(origin.kernel) else record.kernel,
        "run": {"seed": origin.seed, "tier": origin.tier},
        "device": record.device,
        "versions": versions(),
        "contract": None if contract is None else asdict(contract),
        "verdict": {
            "name": record.verdict.value,
            "text": record.text,
            "worst": None if record.worst is None else judged["gates"][record.gates.index(record.worst)],
        },
        "inputs": {
            "digest": inputs_digest(inputs.arguments),
            "bytes": size,
            "stored": stored is not None,
            "arguments": _described(inputs) if stored is not None else {},
        },
    }
    # last, so that a capsule that can be read is whole
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read_capsule(path: Path) -> Capsule:
    """Read a capsule back.

    Raises:
        ValueError: If the file is none, is of another version or generator, or lacks its tensors.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"a capsule must be a readable JSON file, got {path}: {error}") from error
    found = content.get("capsule_version") if isinstance(content, dict) else None
    if found != CAPSULE_VERSION:
        raise ValueError(f"capsule_version must be {CAPSULE_VERSION}, got {found!r} in {path}")
    try:
        return _parsed(content, path)
    except KeyError as error:
        raise ValueError(f"a capsule must have the entry {error}, {path} has not") from error
    except TypeError as error:
        raise ValueError(f"a capsule must hold what this version writes, got {error} in {path}") from error


def inputs_digest(arguments: dict[str, Any]) -> str:
    """sha256 over name, dtype, shape and bytes of every tensor argument; memory around them does not count."""
    digest = hashlib.sha256()
    for name, value in sorted(arguments.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def recorded_operation(capsule: Capsule, operation: Operation, device: torch.device) -> tuple[Operation, str]:
    """The operation with the inputs that the kernel failed on; and a remark where they are not what is drawn here.

    Stored inputs are laid out as they were, guard bands and strides included.

    Raises:
        ValueError: If the stored tensors are not those of the digest, or nothing is stored and this machine draws
            other inputs for the case.
    """
    try:
        drawn = inputs_digest(operation.inputs(capsule.case, device).arguments)
    except ValueError as error:
        drawn = str(error)
    if capsule.tensors is None:
        if drawn != capsule.digest:
            raise ValueError(
                f"{OTHER_INPUTS}, and the capsule stores none: the digest must be {capsule.digest}, got {drawn}"
            )
        return operation, ""
    recorded = _RecordedInputs(operation, capsule, _load_buffers(capsule.tensors))
    stored = inputs_digest(recorded.inputs(capsule.case, torch.device("cpu")).arguments)
    if stored != capsule.digest:
        raise ValueError(f"{capsule.tensors} must hold tensors of the digest {capsule.digest}, got {stored}")
    remark = "" if drawn == capsule.digest else f"{OTHER_INPUTS}: using the stored tensors"
    # the rest of the protocol is the operation's own
    return cast(Operation, recorded), remark


def versions() -> dict[str, str | None]:
    """Of Python, torch, triton and this distribution; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "kernel-assay"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


class _RecordedInputs:
    """An operation whose ``inputs`` are those of a capsule."""

    def __init__(self, operation: Operation, capsule: Capsule, buffers: dict[str, Tensor]) -> None:
        self._operation, self._capsule, self._buffers = operation, capsule, buffers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Fresh copies of the stored buffers, and the arguments as views of them."""
        if case != self._capsule.case:
            raise ValueError(f"the case must be {self._capsule.case.id}, whose inputs are recorded, got {case.id}")
        ledger = Ledger()
        for name, stored in self._buffers.items():
            ledger.buffers[name] = stored.to(device, copy=True)
            ledger.copies[name] = ledger.buffers[name].clone()
        arguments = {name: _restored(entry, ledger.buffers) for name, entry in self._capsule.arguments.items()}
        return Inputs(arguments=arguments, ledger=ledger)


def _described(inputs: Inputs) -> dict[str, Any]:
    """Where each argument lies: its value, or the part of a buffer that it is."""
    owners = {buffer.untyped_storage().data_ptr(): name for name, buffer in inputs.ledger.buffers.items()}
    described: dict[str, Any] = {}
    for name, value in inputs.arguments.items():
        if not isinstance(value, Tensor):
            described[name] = {"value": value}
            continue
        place = value.untyped_storage().data_ptr()
        if place not in owners:
            raise ValueError(f"{name} must lie in a buffer of the ledger, got memory of its own")
        described[name] = {
            "buffer": owners[place],
            "offset": value.storage_offset(),
            "shape": list(value.shape),
            "stride": list(value.stride()),
        }
    return described


def _restored(entry: dict[str, Any], buffers: dict[str, Tensor]) -> Any:
    if "value" in entry:
        return entry["value"]
    return buffers[entry["buffer"]].as_strided(entry["shape"], entry["stride"], entry["offset"])


def _load_buffers(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the tensors of a capsule must be a safetensors file, got {path}: {error}") from error


def _parsed(content: dict[str, Any], path: Path) -> Capsule:
    judged, inputs = content["verdict"], content["inputs"]
    tensors = path.with_suffix(".safetensors") if inputs["stored"] else None
    if tensors is not None and not tensors.is_file():
        raise ValueError(f"the tensors of a capsule must lie beside it, {tensors} is missing")
    contract = content["contract"]
    return Capsule(
        case=Case.from_json(content["case"]),
        kernel=content["kernel"],
        seed=content["run"]["seed"],
        tier=content["run"]["tier"],
        device=content["device"],
        versions=content["versions"],
        contract=None if contract is None else Contract(**{**contract, "mutates": tuple(contract["mutates"])}),
        verdict=Verdict(judged["name"]),
        text=judged["text"],
        worst=None if judged["worst"] is None else _gate(judged["worst"]),
        digest=inputs["digest"],
        arguments=inputs["arguments"],
        tensors=tensors,
    )


def _gate(content: dict[str, Any]) -> GateResult:
    """A gate result read back; numbers that JSON lacks were written as text."""
    where = content["where"]
    if where is not None:
        numbers = {name: None if where[name] is None else float(where[name]) for name in ("got", "expected")}
        where = Location(**{**where, **numbers})
    return GateResult(gate=content["gate"], ratio=float(content["ratio"]), where=where, text=content["text"])
