"""What this machine can judge, and why not the rest.

``diagnose`` looks; the functions that draw findings from a ``Machine`` are pure, so that any machine can be tested.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ._doctor_machine import ON_CPU, PROVIDERS, InterpreterTraits, Machine, inspect_machine

if TYPE_CHECKING:
    from rich.table import Table

State = Literal["ok", "limited", "missing"]

DTYPES = ("float32", "float16", "bfloat16")

# the first supported version and the first that no longer is; a test keeps both equal to pyproject.toml
SUPPORTED: dict[str, tuple[str, str | None]] = {
    "python": ("3.11", "3.14"),
    "torch": ("2.11", None),
    "triton": ("3.6", None),
    "numpy": ("1.26", None),
}

# bfloat16 tensor cores, and Triton's own lower limit
_LEAST_CAPABILITY = (8, 0)
# an interpreted product of 16 terms in float32 is off by about 1e-7; one read as other bits, by more than 1
_DOT_ERROR_LIMIT = 1e-3
# a correctly rounded bfloat16 sum is off by 2^-8 of itself
_SUM_ERROR_LIMIT = 2.0**-7
# this assembler produced wrong code for sm_90a: flash-linear-attention, issue 1262
_SUSPECT_PTXAS, _SUSPECT_CAPABILITY = "12.8.93", (9, 0)

_STYLES: dict[State, str] = {"ok": "green", "limited": "yellow", "missing": "red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is about, such as ``triton kernels, bfloat16``.
        state: ``ok``; ``limited``: works, with a reservation; ``missing``: not here, or cannot be judged.
        text: The fact, and the way out where there is one.
    """

    subject: str
    state: State
    text: str


def diagnose() -> list[Finding]:
    """Examine this process and its machine; imports torch and triton, and runs a few kernels of 16 elements."""
    return findings(inspect_machine())


def findings(machine: Machine) -> list[Finding]:
    """Say what follows from the facts, in the order in which a reader asks."""
    return [
        *version_findings(machine),
        *device_findings(machine),
        *interpreter_findings(machine),
        *compiler_findings(machine),
        tf32_finding(machine),
        *provider_findings(machine),
        *judgement_findings(machine),
    ]


def render(found: Sequence[Finding]) -> "Table":
    """Lay the findings out as a table of subject, state and text."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("subject", "state", "finding", title="assay doctor", title_justify="left")
    for finding in found:
        style = _STYLES[finding.state]
        table.add_row(escape(finding.subject), f"[{style}]{finding.state}[/{style}]", escape(finding.text))
    return table


def version_findings(machine: Machine) -> list[Finding]:
    """One finding for each version that the project sets bounds on."""
    return [_version_finding(name, machine.versions.get(name)) for name in SUPPORTED]


def _version_finding(name: str, version: str | None) -> Finding:
    first, end = SUPPORTED[name]
    supported = f"{first} or newer" + (f", below {end}" if end else "")
    if version is None:
        return Finding(subject=name, state="missing", text=f"does not import; supported: {supported}")
    fits = _release(version) >= _release(first) and (end is None or _release(version) < _release(end))
    text = f"{version}; supported: {supported}"
    return Finding(subject=name, state="ok" if fits else "limited", text=text)


def device_findings(machine: Machine) -> list[Finding]:
    """The driver and each CUDA device, or the reason why there is none."""
    driver = Finding(subject="driver", state="missing", text="no NVIDIA driver answers")
    if machine.driver is not None:
        driver = Finding(subject="driver", state="ok", text=f"NVIDIA {machine.driver}")
    if not machine.devices:
        return [driver, Finding(subject="cuda", state="missing", text=_why_no_device(machine))]
    built = Finding(subject="cuda", state="ok", text=f"torch is built for CUDA {machine.cuda_build}")
    return [driver, built, *(_device_finding(machine, index) for index in range(len(machine.devices)))]


def _device_finding(machine: Machine, index: int) -> Finding:
    device = machine.devices[index]
    text = f"{device.name}, compute capability {_dotted(device.capability)}, {device.memory_bytes / 2**30:.0f} GiB"
    if device.capability < _LEAST_CAPABILITY:
        return Finding(subject=f"cuda:{index}", state="limited", text=f"{text}; {_dotted(_LEAST_CAPABILITY)} is needed")
    return Finding(subject=f"cuda:{index}", state="ok", text=text)


def _why_no_device(machine: Machine) -> str:
    if machine.versions["torch"] is None:
        return "no CUDA device: torch does not import"
    if machine.cuda_build is None:
        return f"no CUDA device: torch {machine.versions['torch']} is built without CUDA"
    return f"no CUDA device: torch is built for CUDA {machine.cuda_build} and finds none"


def interpreter_findings(machine: Machine) -> list[Finding]:
    """How Triton runs and, where it is interpreted, what its interpreter does wrongly, as measured just now."""
    if machine.versions["triton"] is None:
        return []
    if not machine.interpreted:
        return [_compiled_finding(machine)]
    mode = "interpreted on the CPU (TRITON_INTERPRET=1)"
    if machine.traits is None:
        text = f"{mode}, but its probe failed: {machine.probe_error}"
        return [Finding(subject="triton mode", state="missing", text=text)]
    return [
        Finding(subject="triton mode", state="limited", text=mode),
        *_arithmetic_traps(machine.traits),
        *_feature_traps(machine.traits, _numpy_advice(machine)),
    ]


def _arithmetic_traps(traits: InterpreterTraits) -> list[Finding]:
    worst = max(traits.dot_error, key=lambda dtype: traits.dot_error[dtype])
    dot, total, truncated = traits.dot_error[worst], traits.bfloat16_sum_error, traits.truncated_share
    dot_text = f"greatest error {dot:.1e} of the greatest product, for {worst} inputs"
    sum_text = f"greatest error of a sum {total:.1e} of the greatest sum"
    return [
        _trap("tl.dot", dot > _DOT_ERROR_LIMIT, dot_text),
        _trap("bfloat16 arithmetic", total > _SUM_ERROR_LIMIT, sum_text),
        _trap("float32 to bfloat16", truncated > 0, f"{truncated:.0%} of the values are not rounded to the nearest"),
        _trap("tl.max", not traits.max_keeps_nan, "keeps NaN" if traits.max_keeps_nan else "drops NaN"),
    ]


def _feature_traps(traits: InterpreterTraits, numpy_advice: str) -> list[Finding]:
    range_error, asm_error = traits.runtime_range_error, traits.inline_asm_error
    bounds = "a load past the end of a tensor reads the memory behind it" if traits.reads_past_end else "checked"
    return [
        _trap("range(n)", range_error is not None, f"with a run-time n: {range_error or 'works'}{numpy_advice}"),
        _trap("inline assembly", asm_error is not None, asm_error or "works"),
        _trap("bounds", traits.reads_past_end, bounds),
        _trap("Gluon", True, "has no interpreter: gluon.jit kernels need a GPU"),
    ]


def _trap(subject: str, is_trap: bool, text: str) -> Finding:
    return Finding(subject=f"interpreter, {subject}", state="limited" if is_trap else "ok", text=text)


def _numpy_advice(machine: Machine) -> str:
    """The way out of the one trap that a version pin mends."""
    if machine.traits is None or machine.traits.runtime_range_error is None:
        return ""
    return f" (triton {machine.versions['triton']} with numpy {machine.versions['numpy']}; numpy<2.4 mends triton 3.6)"


def _compiled_finding(machine: Machine) -> Finding:
    if not machine.devices:
        text = "no CUDA device, and TRITON_INTERPRET=1 was not set before triton was imported: no kernel can run"
        return Finding(subject="triton mode", state="missing", text=text)
    targets = sorted({f"sm_{major}{minor}" for major, minor in (device.capability for device in machine.devices)})
    return Finding(subject="triton mode", state="ok", text=f"compiled for {', '.join(targets)}")


def compiler_findings(machine: Machine) -> list[Finding]:
    """The ptxas inside triton, and the one that ``TRITON_PTXAS_PATH`` names instead."""
    if machine.versions["triton"] is None:
        return []
    return [_bundled_finding(machine), _override_finding(machine)]


def _bundled_finding(machine: Machine) -> Finding:
    ptxas = machine.ptxas
    if ptxas.bundled is None:
        return Finding(subject="ptxas", state="missing", text="the ptxas inside the triton package does not run")
    text = f"{ptxas.bundled}, inside the triton package"
    if not machine.devices:
        return Finding(subject="ptxas", state="ok", text=f"{text}; unused without a CUDA device")
    suspect = any(device.capability == _SUSPECT_CAPABILITY for device in machine.devices)
    if ptxas.bundled == _SUSPECT_PTXAS and suspect and ptxas.override_version is None:
        advice = "it gave wrong code for sm_90a (flash-linear-attention issue 1262); check with a newer one as well"
        return Finding(subject="ptxas", state="limited", text=f"{text}; {advice}")
    return Finding(subject="ptxas", state="ok", text=text)


def _override_finding(machine: Machine) -> Finding:
    ptxas, subject = machine.ptxas, "TRITON_PTXAS_PATH"
    if ptxas.override is None:
        return Finding(subject=subject, state="ok", text="not set: the bundled ptxas is used")
    if ptxas.override_version is None:
        text = f"{ptxas.override} does not run as a ptxas; triton takes the bundled one without saying so"
        return Finding(subject=subject, state="missing", text=text)
    return Finding(subject=subject, state="ok", text=f"{ptxas.override}, version {ptxas.override_version}")


def tf32_finding(machine: Machine) -> Finding:
    """Whether a float32 product on a GPU would silently be a TF32 one."""
    if machine.tf32:
        text = "on: float32 products on a GPU keep 10 mantissa bits, so no float32 result can serve as the truth"
        return Finding(subject="allow_tf32", state="limited", text=text)
    return Finding(subject="allow_tf32", state="ok", text="off: float32 matrix products are float32")


def provider_findings(machine: Machine) -> list[Finding]:
    """Which libraries of other authors an import would find; none is imported."""
    return [_provider_finding(name, machine) for name in PROVIDERS]


def _provider_finding(name: str, machine: Machine) -> Finding:
    version = machine.providers.get(name)
    if version is None:
        return Finding(subject=name, state="missing", text="not installed")
    if not machine.devices and name not in ON_CPU:
        return Finding(subject=name, state="limited", text=f"version {version}, found, but it needs a CUDA device")
    return Finding(subject=name, state="ok", text=f"version {version}, found (not imported)")


def judgement_findings(machine: Machine) -> list[Finding]:
    """What can be judged here: each kind of kernel in each dtype."""
    kinds = (("torch kernels", _torch_judgement), ("triton kernels", _triton_judgement))
    found = []
    for kind, judgement in kinds:
        for dtype in DTYPES:
            state, text = judgement(dtype, machine)
            found.append(Finding(subject=f"{kind}, {dtype}", state=state, text=text))
    state, text = _external_judgement(machine)
    return [*found, Finding(subject="external kernels", state=state, text=text)]


def _torch_judgement(dtype: str, machine: Machine) -> tuple[State, str]:
    if machine.versions["torch"] is None:
        return "missing", "torch does not import"
    return "ok", "judged on the CPU and on the GPU" if machine.devices else "judged on the CPU"


def _triton_judgement(dtype: str, machine: Machine) -> tuple[State, str]:
    if machine.versions["torch"] is None or machine.versions["triton"] is None:
        return "missing", "torch and triton must both import"
    if machine.interpreted:
        return _interpreted_judgement(dtype, machine)
    if not machine.devices:
        return "missing", "needs a CUDA device, or TRITON_INTERPRET=1"
    best = max(device.capability for device in machine.devices)
    if best < _LEAST_CAPABILITY:
        needed = f"needs compute capability {_dotted(_LEAST_CAPABILITY)}"
        return "missing", f"{needed}, got {_dotted(best)}"
    return "ok", "compiled and judged on the GPU"


def _interpreted_judgement(dtype: str, machine: Machine) -> tuple[State, str]:
    if machine.traits is None:
        return "missing", f"the probe of the interpreter failed: {machine.probe_error}"
    if machine.traits.runtime_range_error is not None:
        return "missing", f"kernels with a run-time range() fail here{_numpy_advice(machine)}"
    error = machine.traits.dot_error[dtype]
    if error > _DOT_ERROR_LIMIT:
        wrong = f"the interpreter's {dtype} tl.dot is wrong (error {error:.1e} of the greatest product)"
        return "missing", f"{wrong}: judge a torch twin, upcast under a constexpr, or use a GPU"
    return (
        "limited",
        "interpreted: indexing, masks, loops and merging are judged, not the GPU's rounding, races or speed",
    )


def _external_judgement(machine: Machine) -> tuple[State, str]:
    if not machine.devices:
        here = [name for name in machine.providers if name in ON_CPU]
        if here:
            return "limited", f"judged on the CPU: {', '.join(here)}; the other libraries above need a CUDA device"
        return "missing", "the libraries above need a CUDA device"
    if not machine.providers:
        return "missing", "none of the libraries above is installed"
    return "ok", f"judged on the GPU: {', '.join(machine.providers)}"


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``2.13.0+cpu`` gives ``(2, 13, 0)``."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in leading.group(0).split(".")) if leading else ()


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
