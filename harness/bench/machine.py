"""The circumstances of a run: device, versions, clocks, temperature and power."""

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass
from typing import Any

import torch

_QUERY = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
_NAMES = ("sm_mhz", "memory_mhz", "celsius", "watt")
_TOOL_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What ``nvidia-smi`` says now; None where it does not answer, or not about this."""

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    celsius: float | None = None
    watt: float | None = None

    def __str__(self) -> str:
        """For a line of text."""
        units = {"sm_mhz": "MHz", "memory_mhz": "MHz memory", "celsius": "C", "watt": "W"}
        known = [f"{getattr(self, name):.0f} {unit}" for name, unit in units.items() if getattr(self, name) is not None]
        return ", ".join(known) or "unknown"


def read_clocks(device: torch.device) -> Clocks:
    """Ask ``nvidia-smi`` about the device, named by its own id, as its number may be another's under a filter."""
    if device.type != "cuda":
        return Clocks()
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    command = ["nvidia-smi", f"--id={identity}", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return Clocks()
    return parse_clocks(done.stdout)


def parse_clocks(text: str) -> Clocks:
    """One line of comma-separated numbers; whatever is no number is unknown."""
    lines = text.strip().splitlines()
    values = [_number(part) for part in lines[0].split(",")] if lines else []
    return Clocks(**dict(zip(_NAMES, values, strict=False)))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def describe_device(device: torch.device) -> dict[str, Any]:
    """Name and sizes, for the record."""
    if device.type != "cuda":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": properties.L2_cache_size,
    }


def versions() -> dict[str, str | None]:
    """Of everything that has a part in a time."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name: installed(name) for name in ("torch", "triton", "kernel-assay")}
    found["cuda"] = torch.version.cuda
    found["cudnn"] = str(torch.backends.cudnn.version()) if torch.backends.cudnn.is_available() else None
    found["driver"] = _driver()
    return found


def installed(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else None
