"""``assay compile``: what is read out of a build, that it repeats, and that each kind of fault and change is named."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from assay.harness.cli import app
from assay.harness.counts import compile_gate
from assay.harness.counts._compile_binary import opcodes_of
from assay.harness.counts._compile_coverage import uncovered_kernels
from assay.harness.counts._compile_variants import ARCHITECTURES, Build, builds
from assay.harness.counts.compile_gate import (
    COMMITTED,
    KERNEL_FOLDER,
    CompileOptions,
    build_faults,
    compile_builds,
    run_compile,
)

pytest.importorskip("triton", reason="triton has no wheel outside Linux")
from assay.harness.counts import _compile_worker

Found = dict[str, dict[str, dict[str, Any]]]


def planted(variant: str, call: str, kernel: str = "product_kernel", arch: str = "sm_90a", **arguments: Any) -> Build:
    return Build(
        arch=arch,
        kernel=f"planted_kernels.{kernel}",
        variant=variant,
        ops=("attention",),
        call=f"planted_kernels:{call}",
        arguments=arguments,
    )


PLANTED = [
    planted("plain", "multiply", num_warps=8),
    planted("specialized", "multiply", specialized=True, num_warps=4),
    planted("declined", "multiply", specialized=True, num_warps=8),
    planted("too large", "multiply", num_warps=8, num_stages=8),
    planted("spilling", "multiply", num_warps=4, maxnreg=152),
    planted("gather", "gather", "gather_kernel"),
    planted("gather", "gather", "gather_kernel", arch="sm_100a"),
    planted("nothing", "nothing"),
    planted("dead", "die"),
]
MERGE = next(build for build in builds() if build.name == "sm_90a _merge_kernel 128 bfloat16")


def in_one(found: Found) -> dict[str, dict[str, Any]]:
    return {name: fields for subjects in found.values() for name, fields in subjects.items()}


@pytest.fixture(scope="module")
def from_tests() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
        # the interpreter would leave nothing to compile
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="module")
def compiled(from_tests: None) -> Found:
    return compile_builds([*PLANTED, MERGE])


@pytest.fixture(scope="module")
def fields(compiled: Found) -> dict[str, dict[str, Any]]:
    return in_one(compiled)


def test_a_plain_product_is_described_by_its_machine_code(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a product_kernel plain"]
    assert found["constants"] == "BK 64, BM 128, SPECIALIZED False"
    assert (found["num_warps"], found["threads"]) == (8, 256)
    # 4 steps of 16 in a block of 64, on tiles by the copy engine, one product in flight
    assert (found["wgmma"], found["wgmma_waits"]) == (4, "1 0")
    assert found["tma_loads"] > 0
    assert found["tma_stores"] == found["mma"] == found["spill_stores"] == found["stack_bytes"] == 0
    # two tiles of 128 x 64 halves in three stages, and their barriers
    assert found["shared_bytes"] == 3 * 2 * 128 * 64 * 2 + 24
    assert found["warp_specialization"] == "not asked for"


def test_warp_specialization_is_seen_where_it_is_on(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a product_kernel specialized"]
    assert found["warp_specialization"] == "on"
    # four warps were asked for: two groups of consumers and one of producers that hand over registers
    assert found["threads"] == 384
    assert found["register_moves"] > 0
    assert build_faults(PLANTED[1], found) == []


def test_a_warp_specialization_that_was_left_out_is_a_fault(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a product_kernel declined"]
    assert found["threads"] == 256
    (fault,) = build_faults(PLANTED[2], found)
    assert fault == (
        "sm_90a product_kernel declined: warp specialization was asked for, and the compiler left it out without a word"
    )


def test_more_shared_memory_than_the_gpu_has_is_a_fault(fields: dict[str, dict[str, Any]]) -> None:
    (fault,) = build_faults(PLANTED[3], fields["sm_90a product_kernel too large"])
    assert fault == "sm_90a product_kernel too large: shared_bytes must be at most 232448, got 262208"


def test_spills_are_counted(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a product_kernel spilling"]
    assert found["registers"] <= 152
    assert min(found["spill_stores"], found["spill_loads"], found["stack_bytes"]) > 0


def test_what_one_architecture_lacks_is_data(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a gather_kernel gather"]
    assert not found["builds"]
    assert found["why"].startswith("PTXASError: ptxas error : Feature '.tile::gather4")
    assert found["why"].endswith("requires .target sm_100 or higher")
    assert fields["sm_100a gather_kernel gather"]["builds"]


def test_a_death_of_the_compiler_ends_one_build_only(fields: dict[str, dict[str, Any]]) -> None:
    found = fields["sm_90a product_kernel dead"]
    assert found == {"builds": False, "why": "exit -6: Analysis.cpp:42: Assertion `rank > 0' failed."}
    assert fields[MERGE.name]["builds"]


def test_a_call_that_launches_no_such_kernel_says_so(fields: dict[str, dict[str, Any]]) -> None:
    why = fields["sm_90a product_kernel nothing"]["why"]
    assert why == "RuntimeError: must launch planted_kernels.product_kernel in one form, got 0 of them (nothing)"


def test_the_versions_name_each_architectures_own_assembler(compiled: Found) -> None:
    by_arch = {name.partition(" ")[0]: versions for versions, subjects in compiled.items() for name in subjects}
    assert set(by_arch) == {"sm_90a", "sm_100a"}
    assert all(versions.startswith("triton ") and ", ptxas " in versions for versions in by_arch.values())


def test_a_second_compilation_gives_the_same_numbers(compiled: Found, from_tests: None) -> None:
    again = in_one(compile_builds([PLANTED[1], PLANTED[4], MERGE]))
    assert again == {name: in_one(compiled)[name] for name in again}
    assert len(again) == 3


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_build_that_does_not_end_is_ended() -> None:
    build = {"name": "late", "capability": (9, 0), "call": "signal:pause", "arguments": {}, "kernel": "a.b"}
    child = _compile_worker._Child(build)
    outcome = child.outcome(ended=False)
    assert outcome == {"name": "late", "fields": {"builds": False, "why": "not done after 300 s"}}
    assert not child.process.is_alive()


def test_a_worker_that_fails_as_a_whole_is_an_error(from_tests: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(RuntimeError, match="the compile worker must end with 0, got 1"):
        compile_builds([MERGE])


def test_opcodes_are_read_past_predicates_and_without_modifiers() -> None:
    listing = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 BRA `(.L_x_1) ;
        /*0020*/             @!UPT UTMALDG.2D [UR8], [UR4] ;
        /*12f0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;  // a comment
"""
    assert opcodes_of(listing) == ["LDC", "BRA", "UTMALDG", "HGMMA"]


def test_every_kernel_of_the_house_is_compiled() -> None:
    assert uncovered_kernels(KERNEL_FOLDER, {build.kernel for build in builds()}) == []


FORMS = {
    "plain": "@triton.jit\ndef extra(x):\n    pass\n",
    "called": "@triton.jit(do_not_specialize=['x'])\ndef extra(x):\n    pass\n",
    "bare": "from triton import jit\n@jit\ndef extra(x):\n    pass\n",
    "stacked": "@triton.autotune(configs=[], key=[])\n@triton.jit\ndef extra(x):\n    pass\n",
    "gluon": "@gluon.jit\ndef extra(x):\n    pass\n",
    "wrapped": "def extra(x):\n    pass\nkernel = triton.jit(extra)\n",
    "in an if": "if HOPPER:\n    @triton.jit\n    def extra(x):\n        pass\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_new_kernel_outside_the_list_is_seen(form: str, tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(f"import triton\n{FORMS[form]}")
    assert uncovered_kernels(tmp_path, set()) == ["new.extra"]
    assert uncovered_kernels(tmp_path, {"new.extra"}) == []


def test_functions_that_a_kernel_calls_are_covered_with_it(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("@triton.jit\ndef load(x):\n    pass\n@triton.jit\ndef unused(x):\n    pass\n")
    source = "from .parts import load as fetch\n@triton.jit\ndef step(x):\n    return fetch(x)\n"
    (tmp_path / "kernel.py").write_text(
        f"{source}@triton.jit\ndef entry(x):\n    return step(x)\ndef host():\n    pass\n"
    )
    assert uncovered_kernels(tmp_path, {"kernel.entry"}) == ["parts.unused"]
    assert uncovered_kernels(tmp_path, set()) == ["kernel.entry", "kernel.step", "parts.load", "parts.unused"]


def test_names_of_builds_are_their_own_and_every_architecture_has_some() -> None:
    names = [build.name for build in builds()]
    assert len(set(names)) == len(names)
    assert {build.arch for build in builds()} == set(ARCHITECTURES)


def test_the_committed_file_holds_every_build_of_each_triton() -> None:
    tables = json.loads(COMMITTED.read_text())
    tritons = {versions.partition(",")[0] for versions in tables}
    assert tritons
    for triton in tritons:
        committed = [name for versions, table in tables.items() if versions.startswith(f"{triton},") for name in table]
        assert sorted(committed) == sorted(build.name for build in builds())


def fake_builds(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Let every build come out alike, but the first attention build of sm_90a with other fields."""
    usual = {"builds": True, "registers": 100, "spill_stores": 0, "shared_bytes": 1024, "wgmma": 8, "tma_loads": 4}
    special = next(build.name for build in builds() if build.arch == "sm_90a")

    def compile_them(chosen: Sequence[Build]) -> Found:
        found: Found = {}
        for build in chosen:
            one = usual | (changed if build.name == special else {})
            found.setdefault(f"triton 9, ptxas {build.arch}", {})[build.name] = one
        return found

    monkeypatch.setattr(compile_gate, "compile_builds", compile_them)


@pytest.fixture
def gate(tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(**options: Any) -> tuple[int, str]:
        console = Console(record=True, width=200)
        return run_compile(CompileOptions(**options), console, tmp_path / "base.json"), console.export_text()

    return run


def test_unknown_versions_have_no_baseline(gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builds(monkeypatch)
    code, text = gate()
    assert code == 3
    assert "no baseline for triton 9, ptxas sm_90a: --accept makes one" in text
    assert gate(archs=("sm_80",), accept=True)[0] == 0
    code, text = gate()
    assert code == 3
    assert "ptxas sm_80:" not in text
    assert gate(archs=("sm_80",))[0] == 0


def test_a_change_names_kernel_field_and_both_values(gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builds(monkeypatch)
    assert gate(accept=True)[0] == 0
    assert gate()[0] == 0
    fake_builds(monkeypatch, registers=140, spill_stores=12, warp_specialization="on")
    code, text = gate()
    assert code == 1
    name = "sm_90a attention_kernel 192/128 bfloat16, causal"
    assert [line for line in text.splitlines() if line.startswith("CHANGED")] == [
        f"CHANGED {name}: registers was 100, is 140",
        f"CHANGED {name}: spill_stores was 0, is 12",
        f"CHANGED {name}: warp_specialization was missing, is on",
    ]
    # a change outside of what was asked for is not looked at, and survives an acceptance of the rest
    assert gate(archs=("sm_80",), accept=True)[0] == 0
    assert gate(archs=("sm_80",))[0] == 0
    assert gate()[0] == 1
    assert gate(accept=True)[0] == 0
    assert gate()[0] == 0


def test_a_build_that_is_gone_is_a_change(
    gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_builds(monkeypatch)
    gate(accept=True)
    path = tmp_path / "base.json"
    tables = json.loads(path.read_text())
    table = tables["triton 9, ptxas sm_80"]
    table["sm_80 old_kernel 1"] = table.pop("sm_80 _merge_kernel 128 bfloat16")
    path.write_text(json.dumps(tables))
    code, text = gate(archs=("sm_80",))
    assert code == 1
    assert "CHANGED sm_80 _merge_kernel 128 bfloat16: found, and not committed" in text
    assert "CHANGED sm_80 old_kernel 1: no longer found" in text
    gate(archs=("sm_80",), accept=True)
    assert "sm_80 old_kernel 1" not in json.loads(path.read_text())["triton 9, ptxas sm_80"]


def test_a_fault_cannot_be_accepted(gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_builds(monkeypatch, shared_bytes=232449)
    assert gate(accept=True)[0] == 1
    code, text = gate(out=tmp_path / "run")
    assert code == 1
    assert "FAULT sm_90a attention_kernel 192/128 bfloat16, causal: shared_bytes must be at most 232448" in text
    record = json.loads((tmp_path / "run" / "compile.json").read_text())
    assert len(record["faults"]) == 1
    assert record["changes"] == []
    assert set(record["found"]) == {f"triton 9, ptxas {arch}" for arch in ARCHITECTURES}


def test_an_uncovered_kernel_fails_the_gate(
    gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_builds(monkeypatch)
    gate(accept=True)
    (tmp_path / "new.py").write_text(FORMS["plain"])
    monkeypatch.setattr(compile_gate, "KERNEL_FOLDER", tmp_path)
    code, text = gate()
    assert code == 1
    assert "FAULT new.extra: no build compiles it" in text


def test_a_build_that_fails_is_shown_with_its_reason(gate: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_builds(monkeypatch)
    gate(accept=True)
    failed = {"builds": False, "why": "no [luck]"}

    def compile_them(chosen: Sequence[Build]) -> Found:
        return {"triton 9, ptxas sm_80": {build.name: failed for build in chosen}}

    monkeypatch.setattr(compile_gate, "compile_builds", compile_them)
    code, text = gate(ops=("mla_prefill",), archs=("sm_80",))
    assert code == 1
    assert "does not build: no [luck]" in text
    assert "sm_80 _merge_kernel 128 bfloat16: builds was True, is False" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["compile", "nothing"], "an operation must be one of attention, mla_prefill"),
        (["compile", "--arch", "sm_70"], "--arch must be one of sm_80, sm_90a, sm_100a, got 'sm_70'"),
    ],
)
def test_usage(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
