"""What there is on this machine, as plain data: versions, devices, compilers, libraries, interpreter behaviour."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .peers import LIBRARIES, distribution, is_importable

# import name -> distributions that may hold it; torch itself has a line of its own
PROVIDERS: dict[str, tuple[str, ...]] = {
    module: distributions
    for library in LIBRARIES
    for module, distributions in library.homes.items()
    if module != "torch"
}
# those that can also be judged without a CUDA device
ON_CPU = ("torch.nn.attention.flex_attention",)

_TOOL_SECONDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One CUDA device."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InterpreterTraits:
    """Measured behaviour of the Triton interpreter.

    Attributes:
        dot_error: Greatest error of a 16 x 16 ``tl.dot`` by input dtype, as a share of the greatest product.
        bfloat16_sum_error: Greatest error of a bfloat16 addition, as a share of the greatest sum.
        truncated_share: Share of float32 values that a store as bfloat16 does not round to the nearest.
        max_keeps_nan: Whether ``tl.max`` over values with a NaN is NaN.
        runtime_range_error: The exception of ``range(n)`` with a run-time ``n``; None if it works.
        inline_asm_error: The exception of ``tl.inline_asm_elementwise``; None if it works.
        reads_past_end: Whether a load past the end of a tensor returns the memory behind it without a complaint.
    """

    dot_error: dict[str, float]
    bfloat16_sum_error: float
    truncated_share: float
    max_keeps_nan: bool
    runtime_range_error: str | None
    inline_asm_error: str | None
    reads_past_end: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ptxas:
    """The assembler that Triton calls.

    Attributes:
        bundled: Version of the one inside the triton package, such as ``12.8.93``; None if it does not run.
        override: Value of ``TRITON_PTXAS_PATH``; None if unset.
        override_version: Version of that one; None if unset or if it does not run.
    """

    bundled: str | None
    override: str | None
    override_version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that the findings are drawn from.

    Attributes:
        versions: Of ``python``, ``torch``, ``triton`` and ``numpy``; None for what does not import.
        cuda_build: CUDA version that torch was built for; None for a build without CUDA.
        driver: Version of the NVIDIA driver; None without one.
        devices: The CUDA devices that torch sees.
        interpreted: Whether Triton kernels run in its interpreter.
        traits: What the interpreter does; None unless ``interpreted``, or if the probe failed.
        probe_error: Why the probe failed; None if it did not.
        tf32: Whether torch may multiply float32 matrices in TF32.
        ptxas: The assembler.
        providers: Version of each importable library of ``PROVIDERS``, "unknown" for one without metadata.
    """

    versions: dict[str, str | None]
    cuda_build: str | None
    driver: str | None
    devices: tuple[Device, ...]
    interpreted: bool
    traits: InterpreterTraits | None
    probe_error: str | None
    tf32: bool
    ptxas: Ptxas
    providers: dict[str, str]


def inspect_machine() -> Machine:
    """Look at this process and its machine; imports torch and triton, but none of ``PROVIDERS``."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _imported_version(name) for name in ("torch", "triton", "numpy")}
    has_torch, has_triton = versions["torch"] is not None, versions["triton"] is not None
    interpreted = has_triton and _interpreted()
    traits, probe_error = _interpreter_traits() if interpreted else (None, None)
    return Machine(
        versions=versions,
        cuda_build=_cuda_build() if has_torch else None,
        driver=_driver_version(),
        devices=_devices() if has_torch else (),
        interpreted=interpreted,
        traits=traits,
        probe_error=probe_error,
        tf32=_tf32() if has_torch else False,
        ptxas=_ptxas(),
        providers=installed_providers(),
    )


def installed_providers() -> dict[str, str]:
    """Version of each library of ``PROVIDERS`` that an import would find; nothing is imported."""
    return {name: _distribution_version(PROVIDERS[name]) for name in PROVIDERS if is_importable(name)}


def tool_version(path: str | Path) -> str | None:
    """Version that a CUDA tool such as ptxas prints, such as ``13.0.88``; None if it does not run."""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", _output_of(str(path), "--version"))
    return found.group(1) if found else None


def _imported_version(name: str) -> str | None:
    try:
        return str(importlib.import_module(name).__version__)
    except ImportError:
        return None


def _distribution_version(distributions: tuple[str, ...]) -> str:
    return distribution(distributions)[1] or "unknown"


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


def _interpreter_traits() -> tuple[InterpreterTraits | None, str | None]:
    """Measured traits, or why they could not be measured."""
    # whatever is wrong with this installation is what the reader wants to hear
    try:
        from ._interpreter_probe import interpreter_traits

        return interpreter_traits(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _cuda_build() -> str | None:
    import torch

    return torch.version.cuda


def _devices() -> tuple[Device, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Device(name=d.name, capability=(d.major, d.minor), memory_bytes=d.total_memory) for d in found)


def _tf32() -> bool:
    import torch

    # the older allow_tf32 raises once the newer setting was used, and "none" means: as the global one says
    setting = torch.backends.cuda.matmul.fp32_precision
    return bool((getattr(torch.backends, "fp32_precision", "none") if setting == "none" else setting) == "tf32")


def _driver_version() -> str | None:
    tool = shutil.which("nvidia-smi")
    listed = _output_of(tool, "--query-gpu=driver_version", "--format=csv,noheader") if tool else ""
    found = re.match(r"\d+(\.\d+)+", listed)
    return found.group(0) if found else None


def _ptxas() -> Ptxas:
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent if triton is not None and triton.origin else None
    override = os.environ.get("TRITON_PTXAS_PATH")
    return Ptxas(
        bundled=tool_version(folder / "backends" / "nvidia" / "bin" / "ptxas") if folder else None,
        override=override,
        override_version=tool_version(override) if override else None,
    )


def _output_of(*command: str) -> str:
    """What a command prints; nothing if it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
