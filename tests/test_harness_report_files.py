"""The files of a report: Markdown for a comment, JUnit for a CI system, and what the command says and refuses."""

import io
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from report_runs import cases, failing, mixed, passing, refused, write_run
from rich.console import Console

from assay.harness.options import CheckOptions
from assay.harness.plan import UsageError
from assay.harness.record import Record, Verdict
from assay.harness.report.command import run_report
from assay.harness.report.junit import junit_report
from assay.harness.report.markdown import markdown_report
from assay.harness.report.run_folder import Run, read_run
from assay.harness.report.run_summary import ratio_text, worst_records
from assay.harness.session import run_check

PLACE = "request 1, token 12, head 1, dim 3, position 40 -> slot 77, got 0.5, must be 0.25"


def run_of(tmp_path: Path, records: list[Record], **fields: object) -> Run:
    return read_run(write_run(tmp_path / "run", records, **fields))


def test_junit_has_a_suite_per_kernel_and_a_test_case_per_case(tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit_report(run_of(tmp_path, mixed())))
    assert [suite.get("name") for suite in root] == ["mla_prefill[torch]", "attend"]
    counts = {name: root.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "12", "failures": "2", "errors": "1", "skipped": "2"}
    attend = root[1]
    assert [attend.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["6", "2", "1", "2"]
    found = attend.findall("testcase")
    assert [case.get("name") for case in found] == [case.id for case in cases()]
    assert {case.get("classname") for case in found} == {"mla_prefill.attend"}
    assert [[child.tag for child in case] for case in found] == [
        ["failure"], [], ["skipped"], ["failure"], ["error"], ["skipped"]
    ]  # fmt: skip


def test_junit_failures_have_text_and_place_and_skips_a_reason(tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit_report(run_of(tmp_path, mixed())))
    (failure, crash), (refusal, waived) = root.findall(".//failure"), root.findall(".//skipped")
    assert (failure.get("type"), failure.get("message")) == ("NUMERIC", "G3 exact: inf x its limit")
    assert failure.text is not None
    assert failure.text.splitlines() == [
        f"G3 exact: ∞ its limit at {PLACE}",
        f"G4 envelope: 12.5× its limit at {PLACE}",  # noqa: RUF001
        f"assay check mla_prefill --case {cases()[0].id} --kernel 'mine.py:attend'",
    ]
    assert refusal.get("message") == "UNSUPPORTED: heads of 128 only"
    assert waived.get("message") == "WAIVED: known: issue 7"
    # what XML cannot hold is replaced, and the rest stays
    message = "RuntimeError: \ufffd[31mbad\ufffd[0m <b>address</b> | & more (kernel.py:7)"
    assert crash.get("message") == message


def test_junit_has_the_settings_and_the_notes(tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit_report(run_of(tmp_path, [passing(cases()[0])], cases=2)))
    properties = {element.get("name"): element.get("value") for element in root.iter("property")}
    assert (properties["seed"], properties["torch"], properties["triton"]) == ("3", "2.13.0", "none")
    assert root.findtext(".//system-err") == "1 of 2 planned cases were not started."


def test_junit_of_an_empty_run_is_empty(tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit_report(run_of(tmp_path, [])))
    assert (len(root), root.get("tests")) == (0, "0")


def test_markdown_has_a_line_per_kernel(tmp_path: Path) -> None:
    lines = markdown_report(run_of(tmp_path, mixed())).splitlines()
    assert lines[0] == "## assay: 3 of 12 judgements failed"
    start = lines.index("| kernel | verdict | pass | fail | set aside | nearest gate | of limit |")
    assert lines[start + 2 : start + 4] == [
        "| `mla_prefill[torch]` | ✅ passed | 6 | 0 | 0 | G4 envelope | 0.4× |",  # noqa: RUF001
        "| `attend` | ❌ failed | 1 | 3 | 2 | G3 exact | ∞ |",
    ]


def test_markdown_gives_reasons_places_commands_and_settings(tmp_path: Path) -> None:
    text = markdown_report(run_of(tmp_path, mixed()))
    assert "| `attend` | UNSUPPORTED | 1 | heads of 128 only |" in text
    assert "| `attend` | WAIVED | 1 | known: issue 7 |" in text
    assert f"- G3 exact at ∞ its limit: {PLACE}" in text
    assert f"```bash\nassay check mla_prefill --case {cases()[0].id} --kernel 'mine.py:attend'\n```" in text
    assert "| seed | 3 |" in text


def test_markdown_cells_hold_what_would_end_them(tmp_path: Path) -> None:
    text = markdown_report(run_of(tmp_path, [refused(cases()[0], text="a | b\n<details> c")]))
    assert "| UNSUPPORTED | 1 | a \\| b &lt;details> c |" in text


def test_markdown_tables_have_as_many_cells_in_every_line(tmp_path: Path) -> None:
    text = markdown_report(run_of(tmp_path, mixed()))
    tables = re.findall(r"(?:^\|.*\|$\n?)+", text, flags=re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_markdown_fits_into_a_comment_whatever_failed(tmp_path: Path) -> None:
    long = [failing(case, verdict=Verdict.CRASH, gates=[], text="error " * 5000) for case in cases(300)]
    refusals = [refused(case, "other", text=f"{case.seed} " * 5000) for case in cases(300)]
    text = markdown_report(run_of(tmp_path, long + refusals))
    assert "… and 280 more failures." in text
    assert "… and 280 more reasons." in text
    assert len(text) < 65536


def test_markdown_says_when_nothing_was_judged(tmp_path: Path) -> None:
    assert markdown_report(run_of(tmp_path, [], cases=4)).startswith(
        "## assay: nothing was judged\n\n> 4 of 4 planned cases were not started.\n"
    )
    text = markdown_report(run_of(tmp_path, [refused(cases()[0])]))
    assert "⚪ not judged | 0 | 0 | 1 |  |  |" in text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.4, "0.4×"), (999.4, "999×"), (12345.0, "1.2e+04×"), (float("inf"), "∞"), (float("nan"), "undefined")],  # noqa: RUF001
)
def test_ratios_are_short(ratio: float, text: str) -> None:
    assert ratio_text(ratio) == text


def test_the_worst_records_are_failures_of_every_kind_first(tmp_path: Path) -> None:
    nine = cases(9)
    records = [passing(case, ratio=0.1 * (at + 1)) for at, case in enumerate(nine)]
    records += [failing(nine[0], "a"), failing(nine[3], "a"), failing(nine[1], "a")]
    chosen = worst_records(run_of(tmp_path, records), 5)
    # one of each family that failed, then the second of one, then what passed nearest to its limit
    assert [(r.kernel, r.case["family"]) for r in chosen[:3]] == [("a", "diffuse"), ("a", "peaked"), ("a", "diffuse")]
    assert [(r.kernel, r.case["id"]) for r in chosen[3:]] == [
        ("mla_prefill[torch]", nine[8].id),
        ("mla_prefill[torch]", nine[7].id),
    ]


def test_the_command_shows_the_run_and_names_what_it_wrote(tmp_path: Path) -> None:
    folder, page = write_run(tmp_path / "run", mixed(), cases=7), io.StringIO()
    assert run_report(folder, None, None, ("junit", "markdown", "junit"), Console(width=200, file=page)) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["junit.xml", "records.jsonl", "report.md"]
    text = page.getvalue()
    assert "1 of 7 planned cases were not started." in text
    assert f"wrote {folder / 'junit.xml'}" in text
    assert "heads of 128 only" in text


WRONG = """
from assay.reference.attention import attention

def wrong(**given):
    widened = {name: value.double() if name in "qkv" else value for name, value in given.items()}
    out, lse = attention(**widened)
    out[0, 1] += 1.0
    return out.to(given["q"].dtype), lse.float()
"""


def test_a_real_failure_is_reported_with_the_command_that_judges_it_again(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG)
    kernel, console = f"{tmp_path / 'mine.py'}:wrong", Console(file=io.StringIO())
    options = CheckOptions(
        ops=("attention",), kernel=kernel, family="diffuse", dtypes=("float32",), device="cpu", out=tmp_path / "run"
    )
    assert run_check(options, console) == 1
    assert run_report(tmp_path / "run", None, None, ("markdown", "junit"), console) == 0
    (record,) = read_run(tmp_path / "run").failures
    again = f"assay check attention --case {record.case['id']} --tier smoke --seed 0 --kernel '{kernel}' --device cpu"
    assert record.command == f"{again} --dtype float32"
    text = (tmp_path / "run" / "report.md").read_text()
    assert record.command in text
    assert re.search(
        r"^- G4 envelope at \S+ its limit: request 0, token 0, head 1, dim \d+, position", text, re.MULTILINE
    )
    failure = ElementTree.parse(tmp_path / "run" / "junit.xml").find(".//failure")
    assert failure is not None
    assert (failure.text or "").endswith(record.command)


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", mixed())
    console = Console(file=io.StringIO())
    with pytest.raises(UsageError, match="--format must be one of html, markdown, junit, got 'pdf'"):
        run_report(folder, None, None, ("pdf",), console)
    with pytest.raises(UsageError, match=r"a run must be a folder with records\.jsonl"):
        run_report(tmp_path, None, None, (), console)
    with pytest.raises(UsageError, match=r"a run must be a folder with records\.jsonl"):
        run_report(folder, tmp_path / "nowhere", None, (), console)


WITHOUT = """
import io, sys
from pathlib import Path
sys.modules[{library!r}] = None
from rich.console import Console
from assay.harness.report.command import run_report
run = lambda *formats: run_report(Path({folder!r}), None, None, formats, Console(file=io.StringIO()))
try:
    run()
except ValueError as error:
    print(error)
print([path.name for path in Path({folder!r}).iterdir()], run("markdown", "junit"))
"""


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_its_libraries_the_page_names_the_extra_and_nothing_is_written(library: str, tmp_path: Path) -> None:
    code = WITHOUT.format(library=library, folder=str(write_run(tmp_path / "run", mixed())))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    said, left = done.stdout.splitlines()
    assert said.startswith(
        f"the HTML report must have {library}, got none: pip install 'kernel-assay[report]', or choose"
    )
    # what needs no library is written all the same when it is asked for
    assert left == "['records.jsonl'] 0"
