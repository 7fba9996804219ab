"""The page of a report: complete, self-contained, and shown by a browser without a complaint."""

import io
import json
import math
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import GATES, SLOT, cases, failing, mixed, passing, refused, rows, write_run
from rich.console import Console

pytest.importorskip("jinja2", reason="the page needs jinja2, of the extra `report`")
pytest.importorskip("matplotlib", reason="the page needs matplotlib, of the extra `report`")

from assay.harness.options import CheckOptions
from assay.harness.record import GateResult, Location, RowErrors, Verdict
from assay.harness.report.command import run_report
from assay.harness.report.compare_runs import compare_runs
from assay.harness.report.html import html_report
from assay.harness.report.run_folder import read_run
from assay.harness.session import run_check

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
KILL_ROWS = [
    {
        "fault": "survivor",
        "expects": ["NUMERIC"],
        "families": {"peaked": ["PASS"]},
        "killed": False,
        "right_reason": False,
    },
    {
        "fault": "wrong_one",
        "expects": ["NUMERIC"],
        "families": {"diffuse": ["CRASH"]},
        "killed": True,
        "right_reason": False,
    },
    {
        "fault": "a_found_one",
        "expects": ["NUMERIC"],
        "families": {"diffuse": ["NUMERIC", "PASS"], "peaked": ["NUMERIC"]},
        "killed": True,
        "right_reason": True,
        "gates": {"diffuse": ["G4"], "peaked": ["G5"]},
    },
]
KILL_MATRIX = {
    "op": "attention",
    "rows": KILL_ROWS,
    "variants": [{"name": "split_kv", "accepted": True}, {"name": "exp2", "accepted": False}],
}


class Page(HTMLParser):
    """What a page holds: ids, references, tags and words."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.tags: Counter[str] = Counter()
        self.words = ""
        self.feed(text)
        self.words = " ".join(self.words.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src", "xlink:href", "srcset", "action", "data", "poster"):
                self.references.append(value or "")
            elif "url(" in (value or ""):
                self.references += re.findall(r"url\(([^)]*)\)", value or "")

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


@pytest.fixture(scope="module")
def full_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with every section that there is."""
    tmp_path = tmp_path_factory.mktemp("page")
    folder = write_run(tmp_path / "run", mixed(), cases=7, plan="p")
    (folder / "kill_matrix.json").write_text(json.dumps(KILL_MATRIX))
    earlier = write_run(
        tmp_path / "earlier",
        [passing(case, name) for name in ("attend", "mla_prefill[torch]") for case in cases()],
        plan="p",
    )
    run = read_run(folder)
    return html_report(run, compare_runs(run, read_run(earlier)))


def test_the_page_has_every_section_and_needs_nothing_else(full_page: str) -> None:
    text = full_page
    page = Page(text)
    sections = {"verdicts", "set-aside", "against", "margins", "cases", "failures", "kill"}
    assert sections <= set(page.ids)
    inside = [reference for reference in page.references if reference.startswith("#")]
    assert {reference.removeprefix("#") for reference in inside} <= set(page.ids)
    assert all(reference.startswith("data:") for reference in page.references if reference not in inside)
    assert [name for name, count in Counter(page.ids).items() if count > 1] == []
    assert page.tags["script"] == 0
    assert "@import" not in text


def test_the_page_says_what_the_run_was(full_page: str) -> None:
    words = Page(full_page).words
    for said in (
        "3 of 12 judgements failed",
        "mla_prefill on CPU, Triton interpreted",
        "seed 3",
        "plan p",
        "torch 2.13.0",
        "triton none",
        "1 of 7 planned cases were not started.",
        "attend UNSUPPORTED 1 heads of 128 only",
        "attend WAIVED 1 known: issue 7",
        "7 passed",
        "2 not judged",
    ):
        assert said in words


def test_the_verdicts_are_counted_by_family_and_dtype_and_lead_to_their_failures(full_page: str) -> None:
    text = full_page
    words = Page(text).words
    table = words[words.index("kernel family float32 bfloat16") :]
    assert table.startswith(
        "kernel family float32 bfloat16 mla_prefill[torch] diffuse ✓ 1 ✓ 1 peaked ✓ 1 ✓ 1 exact-one-hot ✓ 1 ✓ 1 "
        "attend diffuse ✗ 1 NUMERIC ✗ 1 CRASH peaked ✓ 1 ✗ 1 HARNESS_ERROR "
        "exact-one-hot – 1 UNSUPPORTED – 1 WAIVED"  # noqa: RUF001
    )
    assert '<a class="chip bad" href="#failure-2">✗ 1 CRASH</a>' in text


def test_a_failure_has_its_place_and_its_command(full_page: str) -> None:
    words = Page(full_page).words
    case = cases()[0].id
    start = words.index(f"NUMERIC attend on {case}")
    failure = words[start : words.index("sizes of the case", start)]
    assert failure == (
        f"NUMERIC attend on {case} gate error ÷ limit request token head dim position slot got must be "
        "G3 exact ∞ 1 12 1 3 40 77 0.5 0.25 G4 envelope 12.5× 1 12 1 3 40 77 0.5 0.25 "  # noqa: RUF001
        f"assay check mla_prefill --case {case} --kernel 'mine.py:attend' "
    )


def test_a_value_that_must_be_finite_is_no_number_that_it_must_be(tmp_path: Path) -> None:
    where = Location(token=3, got=math.nan)
    gates = [GateResult(gate="G1 out", ratio=math.inf, where=where)]
    page = Page(html_report(read_run(write_run(tmp_path, [failing(cases()[0], gates=gates)]))))
    assert "G1 out ∞ 3 nan finite" in page.words
    assert str(where) == "token 3, got nan, must be finite"


def test_what_a_kernel_says_is_text_and_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>"
    records = [failing(cases()[0], evil, text=evil, command=evil), refused(cases()[1], evil, text=evil)]
    page = Page(html_report(read_run(write_run(tmp_path, records, kernel=evil))))
    assert page.tags["script"] == 0
    assert page.words.count(evil) >= 5


def test_the_kill_matrix_shows_what_got_away_first(full_page: str) -> None:
    words = Page(full_page).words
    matrix = words[words.index("attention: 1 of 3 faults") :]
    assert matrix.startswith(
        "attention: 1 of 3 faults killed for the right reason, 1 of 2 correct variants accepted "
        "fault status diffuse peaked expected survivor survived 0/1 NUMERIC wrong_one wrong reason 0/1 CRASH NUMERIC "
        "a_found_one killed 1/2 G4 1/1 G5 NUMERIC ✗ rejected exp2 ✓ split_kv"
    )


def test_the_comparison_stands_on_the_page(full_page: str) -> None:
    words = Page(full_page).words
    assert "12 judgements in common: 3 regressed, 1 no longer judged, 1 changed." in words
    assert f"regressed attend {cases()[0].id} PASS NUMERIC" in words
    assert "cases 6 7" in words


def test_pictures_are_drawn_for_kernels_and_for_the_worst_cases_only(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [passing(case, f"k{at}") for at in range(10) for case in cases(2)]))
    page = Page(html_report(run))
    # margins, distribution and positions of 8 kernels, and 6 cases
    assert page.tags["svg"] == 8 * 3 + 6
    assert "Pictures of the 8 kernels nearest to their limits; 2 more are in the tables only." in page.words


def test_a_run_without_rows_or_gates_has_a_page(tmp_path: Path) -> None:
    crash = failing(cases()[0], gates=[], rows=RowErrors(), verdict=Verdict.CRASH, text="gone")
    for at, records in enumerate(([], [crash], [refused(cases()[0])])):
        page = Page(html_report(read_run(write_run(tmp_path / str(at), records))))
        assert page.tags["svg"] == 0
        assert "verdicts" in page.ids


def test_undefined_and_boundless_errors_are_drawn_as_failures(tmp_path: Path) -> None:
    broken = replace(rows(), envelope=[math.nan, math.inf, *rows().envelope[2:]])
    gates = [GateResult(gate="G4 envelope", ratio=math.nan, where=SLOT), GateResult(gate="G6 lse", ratio=math.inf)]
    text = html_report(read_run(write_run(tmp_path, [failing(cases()[0], gates=gates, rows=broken)])))
    assert "undefined" in text
    assert Page(text).tags["svg"] == 4


def test_two_pages_of_a_run_are_equal(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, [failing(cases()[0])]))
    assert html_report(run) == html_report(run)


def test_a_large_run_stays_small_and_quick(tmp_path: Path) -> None:
    planned = cases(250)
    many = []
    for at in range(2000):
        case, kernel = planned[at % 250], f"k{at // 250}"
        if at % 4:
            many.append(passing(case, kernel, rows=rows(128, seed=at), ratio=10 ** (-3 * (at % 97) / 97)))
        else:
            gates = [GateResult(gate=gate, ratio=10 ** (at % 400 / 100), where=SLOT) for gate in GATES]
            many.append(failing(case, kernel, gates=gates))
    folder = write_run(tmp_path, many)
    # of the processor: the wall clock would measure the machine's other work as well
    start = time.process_time()
    run_report(folder, None, None, (), Console(file=io.StringIO()))
    assert time.process_time() - start < 20.0
    assert (folder / "report.html").stat().st_size < 5_000_000
    assert "400 more are in records.jsonl and in the JUnit file." in (folder / "report.html").read_text()


def shown(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page as Chromium builds it, and what it writes to its console."""
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={profile}", "--virtual-time-budget=2000", "--enable-logging=stderr", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium to open the page with")


@needs_chromium
def test_a_browser_shows_the_page_of_a_real_run_without_errors(tmp_path: Path) -> None:
    options = CheckOptions(
        ops=("mla_prefill",), kernel="torch", dtypes=("float32",), device="cpu", out=tmp_path / "run"
    )
    assert run_check(options, Console(file=io.StringIO())) == 0
    (tmp_path / "run" / "kill_matrix.json").write_text(json.dumps(KILL_MATRIX))
    run_report(tmp_path / "run", None, None, ("html",), Console(file=io.StringIO()))
    content, complaints = shown(tmp_path / "run" / "report.html", tmp_path / "profile")
    assert complaints == []
    page = Page(content)
    assert {"verdicts", "margins", "cases", "kill"} <= set(page.ids)
    assert page.tags["svg"] == 3 + 6
    assert "judgements passed, none failed" in page.words
    assert "mla_prefill[torch]" in page.words
    # each case has its map of errors, with a bar of its colours
    assert sum(reference.startswith("data:image/png") for reference in page.references) == 6 * 2


@needs_chromium
def test_a_browser_shows_failures_without_errors(full_page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(full_page)
    content, complaints = shown(tmp_path / "page.html", tmp_path / "profile")
    assert complaints == []
    assert "3 of 12 judgements failed" in Page(content).words


@needs_chromium
@pytest.mark.parametrize(
    "planted", ['<img src="https://example.invalid/a.png">', "<script>throw new Error('planted')</script>"]
)
def test_a_page_that_is_broken_or_loads_something_is_noticed(planted: str, full_page: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(full_page.replace("</body>", f"{planted}</body>"))
    _, complaints = shown(tmp_path / "page.html", tmp_path / "profile")
    assert complaints
