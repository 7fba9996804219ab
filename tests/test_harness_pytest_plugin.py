"""In a stranger's test suite one line judges a kernel, one option replays a case, and nothing judged is not green."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

# imported here, because pytester forgets what is first imported by a test that it runs
import assay.harness.session
import assay.reference.attention  # noqa: F401
from assay.harness import check, operations  # noqa: F401
from assay.harness.operation import CaseRequest

pytest_plugins = ["pytester"]

KERNELS = """
import pytest
import torch
from assay.harness import Unsupported, check, kernel
from assay.reference.attention import attention

def right(**given):
    wide = {n: v.double() if n in "qkv" else v for n, v in given.items()}
    out, lse = attention(**wide)
    return out.to(given["q"].dtype), lse.float()

def wrong(**given):
    out, lse = right(**given)
    return out * 1.01, lse

@kernel("attention", supports=lambda case: case.dtype == "float16" or Unsupported("half only"))
def half(**given):
    return right(**given)
"""
MARK = '@pytest.mark.assay(op="attention", dtypes=["float32"], families=["diffuse"])\n'
CASES = [case.id for case in operations.load("attention").cases(CaseRequest(tier="smoke", seed=0, dtypes=("float32",)))]
DIFFUSE = next(case for case in CASES if "-diffuse-" in case)


def options(*arguments: str) -> list[str]:
    """The plugin by name, unless an installed distribution brings it already."""
    installed = any(point.value == "assay.harness.pytest_plugin" for point in entry_points(group="pytest11"))
    return [
        *([] if installed else ["-p", "assay.harness.pytest_plugin"]),
        "--strict-markers",
        "-W",
        "error",
        *arguments,
    ]


def run(pytester: pytest.Pytester, tests: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(KERNELS + tests)
    return pytester.runpytest_inprocess(*options(*arguments))


def section(result: pytest.RunResult) -> list[str]:
    """The lines below the heading of the plugin."""
    lines = [line.strip("= ") if line.startswith("=") else line for line in result.outlines]
    if "assay" not in lines:
        return []
    start = lines.index("assay") + 1
    ends = [at for at in range(start, len(result.outlines)) if result.outlines[at].startswith("=")]
    return [line for line in lines[start : ends[0]] if line]


def test_a_marked_test_that_returns_a_kernel_judges_it(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{MARK}def test_right():\n    return right\n\n{MARK}def test_wrong():\n    return wrong\n")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"E *KernelRejected: NUMERIC  wrong  {DIFFUSE}", "*G4 envelope*its limit*"])
    lines = section(result)
    assert [line.split(" (")[0] for line in lines] == [
        "attention  right: 1 PASS",
        "attention  wrong: 1 NUMERIC",
        "all: 1 NUMERIC, 1 PASS",
    ]


def test_the_report_of_a_rejected_kernel_is_shown_without_the_judge_s_own_frames(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{MARK}def test_wrong(assay_check):\n    assay_check(wrong)\n")
    result.assert_outcomes(failed=1)
    assert not any("checking.py" in line and "def " in line for line in result.outlines)
    assert not any(line.startswith(">") and "raise KernelRejected" in line for line in result.outlines)
    result.stdout.fnmatch_lines([">*assay_check(wrong)"])


def test_the_fixture_takes_the_marker_s_arguments_and_lets_a_call_change_them(pytester: pytest.Pytester) -> None:
    tests = f"""
{MARK}def test_both(assay_check):
    first = assay_check(right)
    assert [record.case["id"] for record in first.records] == ["{DIFFUSE}"]
    second = assay_check(half, families=["peaked"], dtypes=["float16"], seed=4)
    assert second.seed == 4 and set(second.verdicts) == {{"PASS"}}
    assay_check("attention[torch]")

def test_unmarked(assay_check):
    assay_check(half, families=["diffuse"])

class TestClass:
    {MARK}    def test_method(self):
        return right
"""
    result = run(pytester, tests)
    result.assert_outcomes(passed=3)
    lines = section(result)
    assert len([line for line in lines if line.startswith("attention  ")]) == 5
    assert "not judged:" in lines
    assert "  half: 2 cases: half only" in lines


def test_a_marked_test_that_judges_nothing_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{MARK}def test_forgot():\n    right\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*must return a kernel or call assay_check, it did neither*"])


def test_what_is_no_kernel_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{MARK}def test_number():\n    return 3\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*fn must be a function or the name of a kernel, got int*"])


@pytest.mark.parametrize(
    ("marker", "text"),
    [
        ('@pytest.mark.assay(op="attention", teir="full")', "*must have keywords among op, tier, *, got teir*"),
        ('@pytest.mark.assay("attention")', "*must have keywords among op, tier, *, got 'attention'*"),
    ],
)
def test_a_marker_that_cannot_be_served_stops_the_run(marker: str, text: str, pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{marker}\ndef test_right():\n    return right\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([text])


def test_the_seed_of_the_command_line_wins(pytester: pytest.Pytester) -> None:
    tests = '@pytest.mark.assay(op="attention", families=["diffuse"], seed=3)\ndef test_right():\n    return right\n'
    assert "(seed 3, " in section(run(pytester, tests))[0]
    assert "(seed 11, " in section(run(pytester, tests, "--assay-seed", "11"))[0]


def test_one_case_is_replayed_wherever_it_is_planned(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.assay(op="attention", dtypes=["float32"])
def test_all():
    return right

@pytest.mark.assay(op="mla_prefill", dtypes=["float32"])
def test_other_operation(assay_check):
    assay_check("mla_prefill[torch]")
"""
    result = run(pytester, tests, "--assay-replay", DIFFUSE[-8:])
    result.assert_outcomes(passed=1, skipped=1)
    lines = section(result)
    assert lines[0].startswith("attention  right: 1 PASS (seed 0, 1 cases")
    assert any(line.startswith("  1 test: --assay-replay: case must end the id of a case of mla_pre") for line in lines)


@pytest.mark.parametrize(
    ("option", "value"), [("--assay-replay", "00000000"), ("--assay-kernels", "nothing*")], ids=["case", "kernels"]
)
def test_a_session_that_was_to_judge_something_and_did_not_fails(
    option: str, value: str, pytester: pytest.Pytester
) -> None:
    result = run(pytester, f"{MARK}def test_right():\n    return right\n", option, value)
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert f"{option} {value}: nothing was judged, so the run fails" in section(result)
    again = run(pytester, "def test_other():\n    pass\n", option, value)
    assert again.ret == pytest.ExitCode.TESTS_FAILED


def test_kernels_are_picked_by_name(pytester: pytest.Pytester) -> None:
    tests = f"{MARK}def test_right():\n    return right\n\n{MARK}def test_named(assay_check):\n    assay_check(wrong)\n"
    result = run(pytester, tests, "--assay-kernels", "r*")
    result.assert_outcomes(passed=1, skipped=1)
    assert result.ret == pytest.ExitCode.OK
    assert "  1 test: --assay-kernels r* leaves out wrong" in section(result)


def test_a_skip_is_counted_and_fails_where_that_is_asked(pytester: pytest.Pytester) -> None:
    tests = '@pytest.mark.assay(families=["diffuse"])\ndef test_half():\n    return half\n'
    result = run(pytester, tests)
    result.assert_outcomes(passed=1)
    assert section(result)[1:] == ["not judged:", "  half: 2 cases: half only"]
    strict = run(pytester, tests, "--assay-strict-skips")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["*UNSUPPORTED is a failure here: strict skips are on*"])


def test_a_kernel_that_serves_nothing_fails(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"{MARK}def test_half():\n    return half\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*NothingJudged*"])
    assert "  half: 1 case: half only" in section(result)


def test_a_marked_test_that_is_skipped_is_listed(pytester: pytest.Pytester) -> None:
    tests = f"@pytest.mark.skip(reason='no GPU')\n{MARK}def test_right():\n    return right\n\ndef test_plain(): pass\n"
    result = run(pytester, tests)
    result.assert_outcomes(skipped=1, passed=1)
    assert section(result) == ["not judged:", "  1 test: no GPU"]


def test_known_faults_are_waived(pytester: pytest.Pytester) -> None:
    waiver = pytester.path / "waivers.toml"
    waiver.write_text(
        '[[waiver]]\nkernel = "wrong"\ncase = "diffuse"\nverdict = "NUMERIC"\nreason = "scale"\n'
        'link = "https://example.org/1"\nexpires = 2999-01-01\n'
    )
    result = run(pytester, f"{MARK}def test_wrong():\n    return wrong\n", "--assay-waivers", str(waiver))
    result.assert_outcomes(passed=1)
    assert section(result)[0].startswith("attention  wrong: 1 WAIVED (")


def test_a_parametrized_test_and_a_fixture_may_provide_the_kernel(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.fixture(params=[right, half], ids=["right", "half"])
def candidate(request):
    return request.param

@pytest.mark.assay(op="attention", dtypes=["float16"], families=["diffuse"])
def test_candidate(candidate):
    return candidate
"""
    run(pytester, tests).assert_outcomes(passed=2)


def test_a_fault_that_is_expected_is_judged_and_not_called_idle(pytester: pytest.Pytester) -> None:
    result = run(pytester, f"@pytest.mark.xfail(strict=True)\n{MARK}def test_wrong():\n    return wrong\n")
    result.assert_outcomes(xfailed=1)
    (line,) = section(result)
    assert line.startswith("attention  wrong: 1 NUMERIC (")


def test_the_counts_are_in_the_junit_report(pytester: pytest.Pytester) -> None:
    run(pytester, f"{MARK}def test_right():\n    return right\n", "--junitxml", "report.xml")
    text = (pytester.path / "report.xml").read_text().replace("&quot;", '"')
    assert '<property name="assay-op" value="attention"' in text
    value = text.split('<property name="assay" value="')[1].split('" />')[0]
    assert json.loads(value)["verdicts"] == {"PASS": 1}


def test_a_project_that_does_not_use_it_sees_nothing_of_it(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_plain(): assert 1 + 1 == 2\n")
    result = pytester.runpytest_inprocess(*options())
    result.assert_outcomes(passed=1)
    assert section(result) == []
    assert not any("assay" in line for line in result.outlines if not line.startswith(("plugins:", "rootdir:")))


def test_loading_it_imports_nothing_heavy(tmp_path: Path) -> None:
    names = "('torch', 'triton', 'numpy', 'rich', 'typer', 'safetensors')"
    (tmp_path / "test_plain.py").write_text(
        f"import sys\n\ndef test_plain():\n    print('loaded:', [n for n in {names} if n in sys.modules])\n"
    )
    command = [sys.executable, "-m", "pytest", *options("-q", "-s", "-p", "no:hypothesispytest", "-p", "no:benchmark")]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "loaded: []" in done.stdout
