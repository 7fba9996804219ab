"""Reports of a comparison: every form says the same, escapes what models write, and needs nothing else."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from eval_runs import answer, failure, flipped, item, suite_of, write_arm
from rich.console import Console

from assay.eval.compare import compare
from assay.eval.comparison import Comparison
from assay.eval.report import print_comparison, write_reports
from assay.eval.report_json import json_report
from assay.eval.report_junit import junit_report
from assay.eval.report_markdown import markdown_report

NASTY = "a|b <script>alert(1)</script> \x1b[31m\x00 大学"


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """A regression with failures, flips, kernels, strata, probes, speed and a repetition."""
    suite = suite_of(("gsm8k_cot", "qasper_e"), score=1.0, nll=0.05, agreement=1.0)
    items = [item("gsm8k_cot", at) for at in range(60)]
    items += [item("qasper_e", at, stratum="0-4k" if at < 30 else "8k+") for at in range(60)]
    runs = []
    for name, wrong in (("old", 0), ("new", 25), ("again", 1)):
        records = []
        for task in suite.tasks:
            for at in range(60):
                score = 0.0 if at < wrong and task == "gsm8k_cot" else 1.0
                fields = {"kernel_calls": {f"{name} kernel": 30}, "latency_s": 1.0 + at, "first_token_s": 0.5}
                fields["gold_nll"] = 1.0 + 0.3 * (name == "new") + 0.001 * at
                fields["probes"] = [[100, -1.0], [5000, -2.0 - 0.25 * (name == "new") - 0.001 * (name == "again")]]
                records.append(answer(task, at, score, **fields))
        if name == "new":
            records[59] = failure("gsm8k_cot", 59, "timeout")
            records[0]["output_text"] = NASTY
        notes = [NASTY] if name == "new" else []
        factors = {"kernel": "new" if name == "new" else "old"}
        runs.append(write_arm(tmp_path / name, records, items=items, suite=suite, factors=factors, notes=notes))
    return compare(runs[:2], runs[2])


def printed(comparison: Comparison) -> str:
    console = Console(width=100, record=True, force_terminal=False, file=io.StringIO())
    print_comparison(console, comparison)
    return console.export_text()


def test_the_terminal_ends_with_the_verdict(comparison: Comparison) -> None:
    lines = printed(comparison).rstrip().splitlines()
    assert lines[-1] == "REGRESSED"
    text = "\n".join(lines)
    assert "new against old (kernel: old → new)" in text
    assert "REGRESSED  nll" in text
    assert "1 samples failed in one run alone" in text
    assert "again repeats old, on 119 samples that all three answered:" in text
    assert "new kernel" in text
    assert "Lost for certain, Holm over 2 tasks: gsm8k_cot -42" in text


def test_every_report_has_the_same_numbers(comparison: Comparison, tmp_path: Path) -> None:
    result = comparison.pairs[0].gates[1]
    assert result.estimate is not None
    gain = f"{result.estimate.delta:+.4f}"
    written = {path.name: path.read_text(encoding="utf-8") for path in write_reports(comparison, tmp_path / "out")}
    assert set(written) == {"report.html", "report.md", "report.json", "junit.xml", "flips.jsonl"}
    assert gain in printed(comparison)
    for name in ("report.html", "report.md", "junit.xml"):
        assert gain in written[name]
    assert json.loads(written["report.json"])["pairs"][0]["gates"][1]["estimate"]["delta"] == result.estimate.delta


def test_probes_are_shown_with_the_means_of_both_runs(comparison: Comparison) -> None:
    # 119 samples were answered by both runs
    assert "| 0-255 | 119 | -1.0000 | -1.0000 | 0.00e+00 | 0.00e+00 | 0.00e+00 |" in markdown_report(comparison)
    assert "| 4096-16383 | 119 | -2.0000 | -2.2500 | 2.50e-01 | 2.50e-01 | 1.00e-03 |" in markdown_report(comparison)
    (line,) = (one for one in printed(comparison).splitlines() if "4096-16383" in one)
    assert line.split() == ["4096-16383", "119", "-2.0000", "-2.2500", "2.50e-01", "2.50e-01", "1.00e-03"]


def test_markdown_is_a_table_that_answers_cannot_break(comparison: Comparison) -> None:
    text = markdown_report(comparison)
    assert text.startswith("## assay eval: REGRESSED\n")
    assert "<script>" not in text
    for block in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.strip().splitlines()}
        assert len(widths) == 1
    assert len(text) < 65_536


def test_junit_fails_what_did_not_say_yes(comparison: Comparison, tmp_path: Path) -> None:
    root = ElementTree.fromstring(junit_report(comparison))
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert set(cases) == {"score", "nll", "agreement", "every sample answered by both runs"}
    assert all(case.find("failure") is not None for case in cases.values())
    assert (root.get("tests"), root.get("failures")) == ("4", "4")
    unsure = compare([flipped(tmp_path / "a", 20, ()), flipped(tmp_path / "b", 20, ())])
    found = ElementTree.fromstring(junit_report(unsure)).find(".//failure")
    assert found is not None
    assert found.get("type") == "inconclusive"
    alike = compare([flipped(tmp_path / "c", 400, ()), flipped(tmp_path / "d", 400, ())])
    assert ElementTree.fromstring(junit_report(alike)).get("failures") == "0"


def test_json_has_plain_values_only(comparison: Comparison) -> None:
    content = json_report(comparison)
    assert json.loads(json.dumps(content, allow_nan=False)) == content
    assert (content["exit_code"], content["headline"]) == (1, "REGRESSED")
    # scores of 0, and one that was not answered; the others agree
    assert content["pairs"][0]["flips"] == 25
    assert content["pairs"][0]["failures"]["table"] == {"gsm8k_cot/ok/timeout": 1}


def test_changed_samples_are_kept_with_both_answers(comparison: Comparison, tmp_path: Path) -> None:
    write_reports(comparison, tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "flips.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 25
    assert all(row["first"] > row["second"] for row in rows)
    assert NASTY in {row["second_text"] for row in rows}


def test_the_page_needs_nothing_from_elsewhere_and_escapes_answers(comparison: Comparison) -> None:
    pytest.importorskip("matplotlib", reason="the extra `report` is not installed")
    from assay.eval.report_html import html_report

    page = html_report(comparison)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']*""", page.replace("xlink:", "")) == []
    assert "http-equiv" in page
    assert page.count("<svg") == 4
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    for section in (
        "REGRESSED",
        "Kernel calls",
        "Parts of tasks",
        "Not answered by both",
        "Samples whose score changed",
    ):
        assert section in page


def test_a_matrix_and_its_factors_fit_every_report(tmp_path: Path) -> None:
    suite, arms = suite_of(nll=0.05), []
    for at, (kernel, kind) in enumerate([("old", "a"), ("old", "b"), ("new", "a"), ("new", "b")]):
        records = [answer("gsm8k_cot", one, gold_nll=1.0 + 0.01 * at + 0.001 * one) for one in range(40)]
        factors = {"kernel": kernel, "scores": kind}
        arms.append(write_arm(tmp_path / f"{kernel}-{kind}", records, suite=suite, factors=factors))
    comparison = compare(arms)
    assert len(comparison.pairs) == 6
    for text in (printed(comparison), markdown_report(comparison)):
        assert "averaged over the others" in text
        assert text.count("against") >= 6
    assert len(ElementTree.fromstring(junit_report(comparison)).findall("testsuite")) == 6


def test_without_its_libraries_the_page_is_left_out(
    comparison: Comparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "assay.eval.report_html", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    names = {path.name for path in write_reports(comparison, tmp_path / "out")}
    assert names == {"report.md", "report.json", "junit.xml", "flips.jsonl"}


@pytest.mark.parametrize(
    ("n", "words"), [(20, "with 299 pairs that change as little"), (400, "no difference seen: up to 0.746 % of pairs")]
)
def test_what_is_missing_is_said(tmp_path: Path, n: int, words: str) -> None:
    comparison = compare([flipped(tmp_path / "old", n, ()), flipped(tmp_path / "new", n, ())])
    assert words in markdown_report(comparison)
