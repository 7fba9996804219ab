"""The options of ``assay check``, and what they stand for: operations, a device, a request for cases."""

import secrets
from dataclasses import dataclass
from pathlib import Path

import torch

from . import operations
from .discovery import PluginError, load_operation, operation_names
from .kernels import is_strange
from .operation import CaseRequest, Operation
from .plan import DTYPES, TIERS, UsageError
from .record import Record
from .shard import Shard

GEOMETRY_SIZES = {
    "mla_prefill": ("R", "Dn", "Dr", "Dv"),
    **dict.fromkeys(("attention", "masked_mha", "sparse_mla"), ("Dq", "Dv")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of ``assay check``, as given."""

    ops: tuple[str, ...] = ()
    kernel: str | None = None
    tier: str = "smoke"
    device: str = "auto"
    dtypes: tuple[str, ...] = ()
    seed: int = 0
    geometry: str | None = None
    heads: int | None = None
    shapes: Path | None = None
    captured: Path | None = None
    case_id: str | None = None
    family: str | None = None
    shard: str | None = None
    list_cases: bool = False
    fail_fast: bool = False
    max_seconds: float | None = None
    timeout: float = 120.0
    in_process: bool = False
    jobs: int | None = None
    out: Path | None = None
    waivers: Path | None = None
    cases: str | None = None

    @property
    def whole_tier(self) -> bool:
        """Whether no option leaves cases of the tier out."""
        narrowed = (
            self.dtypes,
            self.geometry,
            self.heads,
            self.shapes,
            self.captured,
            self.case_id,
            self.family,
            self.shard,
        )
        return not any(narrowed)


def seed_of(tier: str, seed: int | None) -> int:
    """The seed as given, or else 0; of the nightly tier a fresh one, which is printed and repeats its plan."""
    if seed is not None:
        return seed
    return secrets.randbelow(2**31) if tier == "nightly" else 0


def resolve_device(name: str) -> torch.device:
    """``auto`` is the first CUDA device, or else the CPU.

    Raises:
        UsageError: If the device does not exist.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}") from error
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if device.type != "cuda" or (device.index or 0) >= count:
        raise UsageError(f"--device must be the CPU or one of the {count} CUDA devices here, got {name!r}")
    return torch.device("cuda", device.index or 0)


def chosen_shard(options: CheckOptions) -> Shard:
    """The part of the plan to judge here, all of it unless said otherwise.

    Raises:
        UsageError: If it is none.
    """
    try:
        return Shard.parse(options.shard or "1/1")
    except ValueError as error:
        raise UsageError(f"--shard: {error}") from error


def chosen_operations(options: CheckOptions) -> list[Operation]:
    """The named operations, or all of the house.

    Raises:
        UsageError: If the tier or a name is unknown, or a stranger's kernel comes without its one operation.
    """
    if options.tier not in TIERS:
        raise UsageError(f"--tier must be one of {', '.join(TIERS)}, got {options.tier!r}")
    names, known = options.ops or operations.NAMES, operation_names()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"an operation must be one of {', '.join(known)}, got {unknown[0]!r}")
    if is_strange(options.kernel) and len(names) != 1:
        raise UsageError(f"a kernel of yours needs exactly one operation, got {', '.join(names)}")
    try:
        return [load_operation(name) for name in dict.fromkeys(names)]
    except PluginError as error:
        raise UsageError(str(error)) from error


def case_request(options: CheckOptions, chosen: list[Operation]) -> CaseRequest:
    """What is asked of the operations' case lists.

    Raises:
        UsageError: If a dtype or the geometry is not understood.
    """
    dtypes = options.dtypes or DTYPES
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if unknown:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}, got {unknown[0]!r}")
    geometry = None
    if options.geometry is not None:
        geometry = _geometry(options.geometry, chosen)
    return CaseRequest(
        tier=options.tier, seed=options.seed, dtypes=tuple(dtypes), geometry=geometry, heads=options.heads
    )


def _geometry(text: str, chosen: list[Operation]) -> tuple[int, ...]:
    parts = text.split("/")
    for operation in chosen:
        names = GEOMETRY_SIZES.get(operation.name)
        if names is None:
            raise UsageError(f"--geometry must go with an operation of the house, got {operation.name}")
        if len(parts) != len(names) or not all(part.isdecimal() for part in parts):
            raise UsageError(f"--geometry must be {'/'.join(names)} for {operation.name}, got {text!r}")
    sizes = tuple(int(part) for part in parts)
    if any(size == 0 for at, size in enumerate(sizes) if not (len(sizes) == 4 and at == 2)):
        raise UsageError(f"--geometry must have positive sizes (only Dr may be 0), got {text!r}")
    return sizes


def command_of(options: CheckOptions, record: Record) -> str:
    """The command that judges this one record again."""
    parts = ["assay check", record.op, "--case", record.case["id"], "--tier", options.tier, "--seed", str(options.seed)]
    parts += ["--kernel", f"'{options.kernel or record.kernel}'", "--device", options.device]
    given = {"--geometry": options.geometry, "--heads": options.heads, "--shapes": options.shapes}
    for flag, value in (given | {"--captured": options.captured}).items():
        parts += [flag, str(value)] if value is not None else []
    for dtype in options.dtypes:
        parts += ["--dtype", dtype]
    return " ".join(parts)
