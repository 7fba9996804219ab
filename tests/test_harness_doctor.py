"""The doctor says what follows from the facts, and measures the interpreter's traps instead of believing a table."""

import dataclasses
import io
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from assay.harness import _doctor_machine as machine_facts
from assay.harness import doctor
from assay.harness._doctor_machine import Device, InterpreterTraits, Machine, Ptxas
from assay.harness.peers import is_importable

ROOT = Path(__file__).resolve().parents[1]
DTYPES = ("float32", "float16", "bfloat16")

# triton 3.7.1 on the CPU, as measured
TRAITS = InterpreterTraits(
    dot_error={"float32": 9e-8, "float16": 7e-8, "bfloat16": 1.9e9},
    bfloat16_sum_error=9.3e37,
    truncated_share=0.495,
    max_keeps_nan=False,
    runtime_range_error=None,
    inline_asm_error="NotImplementedError: inline_asm not supported in interpreter mode",
    reads_past_end=True,
)
CPU = Machine(
    versions={"python": "3.11.7", "torch": "2.13.0+cpu", "triton": "3.7.1", "numpy": "2.4.6"},
    cuda_build=None,
    driver=None,
    devices=(),
    interpreted=True,
    traits=TRAITS,
    probe_error=None,
    tf32=False,
    ptxas=Ptxas(bundled="12.8.93", override=None, override_version=None),
    providers={},
)
H200 = dataclasses.replace(
    CPU,
    cuda_build="13.0",
    driver="580.159.03",
    devices=(Device(name="NVIDIA H200", capability=(9, 0), memory_bytes=140 * 2**30),),
    interpreted=False,
    traits=None,
    providers={"flashinfer": "0.6.1"},
)


def finding(machine: Machine, subject: str) -> doctor.Finding:
    (found,) = [finding for finding in doctor.findings(machine) if finding.subject == subject]
    return found


def printed(found: list[doctor.Finding], *, width: int) -> str:
    page = io.StringIO()
    Console(width=width, file=page).print(doctor.render(found))
    return page.getvalue()


def states(machine: Machine, kind: str) -> list[str]:
    return [finding(machine, f"{kind}, {dtype}").state for dtype in DTYPES]


def test_a_cpu_judges_torch_in_each_dtype_and_interpreted_triton_but_for_bfloat16() -> None:
    assert states(CPU, "torch kernels") == ["ok", "ok", "ok"]
    assert states(CPU, "triton kernels") == ["limited", "limited", "missing"]
    assert "1.9e+09" in finding(CPU, "triton kernels, bfloat16").text
    assert finding(CPU, "external kernels").state == "missing"


def test_a_gpu_judges_everything() -> None:
    assert states(H200, "torch kernels") == states(H200, "triton kernels") == ["ok", "ok", "ok"]
    external = finding(H200, "external kernels")
    assert (external.state, external.text) == ("ok", "judged on the GPU: flashinfer")
    assert finding(H200, "triton mode").text == "compiled for sm_90"
    assert finding(H200, "cuda:0").text == "NVIDIA H200, compute capability 9.0, 140 GiB"
    assert finding(H200, "driver").text == "NVIDIA 580.159.03"


def test_an_old_gpu_judges_no_triton_kernel() -> None:
    turing = dataclasses.replace(H200, devices=(Device(name="T4", capability=(7, 5), memory_bytes=15 * 2**30),))
    assert states(turing, "triton kernels") == ["missing"] * 3
    assert finding(turing, "triton kernels, float32").text == "needs compute capability 8.0, got 7.5"
    assert finding(turing, "cuda:0").state == "limited"


def test_without_gpu_and_interpreter_no_triton_kernel_runs() -> None:
    bare = dataclasses.replace(CPU, interpreted=False, traits=None)
    assert states(bare, "triton kernels") == ["missing"] * 3
    assert finding(bare, "triton mode").state == "missing"


def test_a_failed_probe_is_told_and_judges_nothing() -> None:
    broken = dataclasses.replace(CPU, traits=None, probe_error="RuntimeError: too late")
    assert "RuntimeError: too late" in finding(broken, "triton mode").text
    assert states(broken, "triton kernels") == ["missing"] * 3


def test_a_failing_run_time_range_blocks_triton_kernels_and_names_the_pin() -> None:
    traits = dataclasses.replace(TRAITS, runtime_range_error="TypeError: only 0-dimensional arrays")
    versions = CPU.versions | {"triton": "3.6.0", "numpy": "2.4.6"}
    machine = dataclasses.replace(CPU, traits=traits, versions=versions)
    assert states(machine, "triton kernels") == ["missing"] * 3
    assert "numpy<2.4" in finding(machine, "interpreter, range(n)").text


def test_a_mended_interpreter_has_no_traps_left_but_gluon() -> None:
    mended = InterpreterTraits(
        dot_error=dict.fromkeys(DTYPES, 1e-7),
        bfloat16_sum_error=2.0**-8,
        truncated_share=0.0,
        max_keeps_nan=True,
        runtime_range_error=None,
        inline_asm_error=None,
        reads_past_end=False,
    )
    machine = dataclasses.replace(CPU, traits=mended)
    traps = [f for f in doctor.findings(machine) if f.subject.startswith("interpreter, ") and f.state != "ok"]
    assert [trap.subject for trap in traps] == ["interpreter, Gluon"]
    assert states(machine, "triton kernels") == ["limited"] * 3


@pytest.mark.parametrize(
    ("name", "version", "state"),
    [
        ("torch", "2.10.1", "limited"),
        ("torch", "2.11.0+cu130", "ok"),
        ("torch", "2.9.0", "limited"),
        ("triton", "3.5.1", "limited"),
        ("triton", "3.10.0", "ok"),
        ("numpy", "1.26.4", "ok"),
        ("python", "3.10.9", "limited"),
        ("python", "3.13.2", "ok"),
        ("python", "3.14.0", "limited"),
        ("triton", None, "missing"),
    ],
)
def test_versions_are_held_against_the_supported_range(name: str, version: str | None, state: str) -> None:
    machine = dataclasses.replace(CPU, versions=CPU.versions | {name: version})
    assert finding(machine, name).state == state


def test_the_supported_range_is_that_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[>=<;]", line)[0]: line for line in project["dependencies"]}
    declared["python"] = f"python{project['requires-python']}"
    for name, (first, end) in doctor.SUPPORTED.items():
        bounds = f"{name}>={first}" + (f",<{end}" if end else "")
        assert declared[name].split(";")[0] == bounds


def test_tf32_is_a_reservation() -> None:
    assert finding(CPU, "allow_tf32").state == "ok"
    assert finding(dataclasses.replace(CPU, tf32=True), "allow_tf32").state == "limited"


@pytest.mark.parametrize(
    ("ptxas", "bundled", "override"),
    [
        (Ptxas(bundled="12.8.93", override=None, override_version=None), "limited", "ok"),
        (Ptxas(bundled="12.8.93", override="/cuda/ptxas", override_version="13.1.80"), "ok", "ok"),
        (Ptxas(bundled="12.8.93", override="/gone", override_version=None), "limited", "missing"),
        (Ptxas(bundled="13.1.80", override=None, override_version=None), "ok", "ok"),
        (Ptxas(bundled=None, override=None, override_version=None), "missing", "ok"),
    ],
)
def test_ptxas_is_suspect_on_hopper_unless_replaced(ptxas: Ptxas, bundled: str, override: str) -> None:
    machine = dataclasses.replace(H200, ptxas=ptxas)
    assert finding(machine, "ptxas").state == bundled
    assert finding(machine, "TRITON_PTXAS_PATH").state == override
    ada = dataclasses.replace(machine, devices=(Device(name="L4", capability=(8, 9), memory_bytes=24 * 2**30),))
    assert finding(ada, "ptxas").state == ("missing" if bundled == "missing" else "ok")


def test_a_library_without_a_gpu_is_a_reservation() -> None:
    found = dataclasses.replace(CPU, providers={"fla": "0.4.1"})
    assert (finding(found, "fla").state, finding(found, "flash_mla").state) == ("limited", "missing")
    assert finding(H200, "flashinfer").state == "ok"


def test_flex_attention_comes_with_torch_and_needs_no_gpu() -> None:
    name = "torch.nn.attention.flex_attention"
    assert machine_facts.installed_providers()[name] == machine_facts._distribution_version(("torch",))
    here = dataclasses.replace(CPU, providers={name: "2.13.0", "fla": "0.4.1"})
    assert (finding(here, name).state, finding(here, "fla").state) == ("ok", "limited")
    external = finding(here, "external kernels")
    assert external.state == "limited"
    assert external.text == f"judged on the CPU: {name}; the other libraries above need a CUDA device"


def test_flash_attention_3_is_also_looked_for_inside_vllm() -> None:
    assert finding(H200, "vllm.vllm_flash_attn").state == "missing"
    found = dataclasses.replace(H200, providers={"vllm.vllm_flash_attn": "0.18.1"})
    assert finding(found, "vllm.vllm_flash_attn").state == "ok"


def test_a_submodule_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "heavy_attention"
    (package / "cute").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "cute" / "__init__.py").touch()
    (tmp_path / "flat_module.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert is_importable("heavy_attention.cute")
    assert not is_importable("heavy_attention.hopper")
    assert not is_importable("flat_module.cute")
    assert not is_importable("no_such_library.cute")
    assert "heavy_attention" not in sys.modules


def test_the_version_of_a_tool_is_the_exact_one(tmp_path: Path) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    tool.chmod(0o755)
    assert machine_facts.tool_version(tool) == "13.0.88"
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert machine_facts.tool_version(tool) is None
    assert machine_facts.tool_version(tmp_path / "gone") is None


def test_tf32_is_seen_in_whichever_way_it_was_set() -> None:
    settings = ("torch.backends.cuda.matmul.allow_tf32 = True", "torch.backends.cuda.matmul.fp32_precision = 'tf32'")
    ask = "from assay.harness import _doctor_machine; print(_doctor_machine._tf32())"
    for setting, answer in (*((setting, "True") for setting in settings), ("pass", "False")):
        # in a process of its own: a setting of the newer kind cannot be taken back
        command = [sys.executable, "-c", f"import torch; {setting}; {ask}"]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == answer


def test_the_module_is_cheap_to_import() -> None:
    code = "import sys; import assay.harness.doctor; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_this_machine_can_be_diagnosed_and_shown() -> None:
    found = doctor.diagnose()
    subjects = [finding.subject for finding in found]
    assert len(subjects) == len(set(subjects))
    torch_version = next(finding for finding in found if finding.subject == "torch")
    assert torch_version.text.startswith(f"{torch.__version__};")
    shown = printed(found, width=200)
    assert [finding.text for finding in found if finding.text[:80] not in shown] == []


def test_text_in_brackets_is_shown_as_it_is() -> None:
    assert "shape [T, H]" in printed([doctor.Finding(subject="[x]", state="ok", text="shape [T, H]")], width=80)


needs_interpreter = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")


@needs_interpreter
def test_the_probe_measures_the_interpreter_of_this_process() -> None:
    from assay.harness._interpreter_probe import interpreter_traits

    traits = interpreter_traits()
    # a sum of 16 exact products in float32
    assert traits.dot_error["float32"] < 16 * 2.0**-24
    assert traits.dot_error["float16"] < 16 * 2.0**-24
    assert traits.truncated_share == 0.0 or 0.4 < traits.truncated_share < 0.6
    assert interpreter_traits() == traits


@needs_interpreter
def test_the_probe_tells_a_wrong_kernel_from_a_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.harness import _interpreter_probe as probe

    class Launch:
        """Stands for a kernel that does what its torch function does."""

        def __init__(self, run: object) -> None:
            self.run = run

        def __getitem__(self, grid: object) -> object:
            return self.run

    def right_dot(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **_: int) -> None:
        out.copy_(a.float() @ b.float())

    def rounding_copy(x: torch.Tensor, out: torch.Tensor, **_: int) -> None:
        out[: len(x)] = x.to(out.dtype)

    def nan_max(x: torch.Tensor, out: torch.Tensor, **_: int) -> None:
        out[0] = x.max()

    monkeypatch.setattr(probe, "_dot_kernel", Launch(right_dot))
    monkeypatch.setattr(probe, "_copy_kernel", Launch(rounding_copy))
    monkeypatch.setattr(probe, "_max_kernel", Launch(nan_max))
    traits = probe.interpreter_traits()
    assert max(traits.dot_error.values()) < 16 * 2.0**-24
    assert (traits.truncated_share, traits.max_keeps_nan, traits.reads_past_end) == (0.0, True, False)


def test_the_probe_refuses_compiled_kernels() -> None:
    code = "from assay.harness._interpreter_probe import interpreter_traits as probe; probe()"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "RuntimeError: TRITON_INTERPRET must be 1 before this module is imported" in done.stderr
