"""A waiver covers one known fault, with a reason, for a time; it hides no other fault, and does not outlive its own."""

import re
from datetime import date
from pathlib import Path

import pytest
from builders import attention_case

from assay.harness.record import Record, Verdict
from assay.harness.waivers import WAIVABLE, Waiver, apply, findings, load_waivers

TODAY = date(2026, 6, 15)
GOOD = """
[[waiver]]
kernel = "attention[flash*]"
case = "attention-peaked-*"
verdict = "NUMERIC"
reason = "drops the last key of a tile"
link = "https://example.org/issues/7"
expires = 2026-06-15
"""


def record(verdict: Verdict = Verdict.NUMERIC, kernel: str = "attention[flashinfer]", family: str = "peaked") -> Record:
    case = attention_case(family).to_json()
    return Record(op="attention", kernel=kernel, case=case, device="cpu", verdict=verdict, text="G4: 3 x its limit")


def waiver(**changes: object) -> Waiver:
    known = {
        "kernel": "attention[flash*]",
        "case": "peaked",
        "verdict": Verdict.NUMERIC,
        "reason": "drops the last key of a tile",
        "link": "https://example.org/issues/7",
        "expires": TODAY,
    }
    return Waiver(**{**known, **changes})  # type: ignore[arg-type]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "waivers.toml"
    path.write_text(text)
    return path


def test_a_file_is_read_as_it_is_written(tmp_path: Path) -> None:
    assert load_waivers(write(tmp_path, GOOD)) == [waiver(case="attention-peaked-*")]
    assert load_waivers(write(tmp_path, "")) == []
    assert len(load_waivers(write(tmp_path, GOOD + GOOD))) == 2


@pytest.mark.parametrize("name", ["kernel", "case", "verdict", "reason", "link", "expires"])
def test_every_field_is_required_and_named_when_it_is_missing(name: str, tmp_path: Path) -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{name} ")]
    with pytest.raises(ValueError, match=rf"waiver 1 of .*waivers.toml must have .*: it lacks {name}$"):
        load_waivers(write(tmp_path, "\n".join(lines)))


WRONG = {
    "empty": (("reason = .*", 'reason = ""'), "it lacks reason"),
    "blank": (("reason = .*", 'reason = "  "'), "reason of waiver 1 of .* must be a text, got '  '"),
    "unknown": (("reason = ", "reason = 'x'\nwhy = "), "it has the unknown why"),
    "no link": (("link = .*", 'link = "see the tracker"'), "link of .* must be an address, got 'see the tracker'"),
    "no date": (("expires = .*", 'expires = "soon"'), "expires of .* must be a date such as 2027-01-31, got 'soon'"),
    "a time": (("expires = .*", "expires = 2026-06-15T10:00:00"), "expires of .* must be a date"),
    "pass": (("NUMERIC", "PASS"), "verdict of .* must be one of STRUCTURE, .*, got 'PASS'"),
    "skip": (("NUMERIC", "UNSUPPORTED"), "verdict of .* must be one of .*, got 'UNSUPPORTED'"),
    "any": (("NUMERIC", "*"), r"verdict of .* must be one of .*, got '\*'"),
    "number": (("kernel = .*", "kernel = 3"), "kernel of .* must be a text, got 3"),
    "table": ((r"\[\[waiver\]\]", "[waiver]"), r"must hold tables \[\[waiver\]\] only, got waiver of another kind"),
    "other": ((r"\[\[waiver\]\]", "[[waivers]]"), r"must hold tables \[\[waiver\]\] only, got waivers"),
    "toml": (("kernel = ", "kernel "), "waivers must be valid TOML"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_no_waiver_is_refused(which: str, tmp_path: Path) -> None:
    (pattern, replacement), text = WRONG[which]
    with pytest.raises(ValueError, match=text):
        load_waivers(write(tmp_path, re.sub(pattern, replacement, GOOD)))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"waivers must be a TOML file, got .*nowhere\.toml"):
        load_waivers(tmp_path / "nowhere.toml")


def test_a_waived_failure_says_what_it_was_and_why_it_is_waived() -> None:
    waived = apply(record(), [waiver()], TODAY)
    assert waived.verdict is Verdict.WAIVED
    assert waived.text == (
        "NUMERIC: G4: 3 x its limit; waived until 2026-06-15: drops the last key of a tile (https://example.org/issues/7)"
    )
    assert waived.case == record().case


@pytest.mark.parametrize("case", ["peaked", "pea*", "attention-peaked-*", attention_case("peaked").id, "*"])
def test_a_case_is_named_by_id_or_family(case: str) -> None:
    assert apply(record(), [waiver(case=case)], TODAY).verdict is Verdict.WAIVED


@pytest.mark.parametrize(
    "other",
    [
        {"case": "diffuse"},
        {"case": "peaked-*"},
        {"kernel": "attention[triton]"},
        {"kernel": "attention"},
        {"kernel": "attention[f]"},
        {"verdict": Verdict.NONFINITE},
        {"expires": date(2026, 6, 14)},
    ],
)
def test_a_waiver_of_something_else_changes_nothing(other: dict[str, object]) -> None:
    failed = record()
    assert apply(failed, [waiver(**other)], TODAY) is failed


def test_a_waiver_never_touches_another_verdict() -> None:
    for verdict in Verdict:
        untouched = record(verdict)
        for waived in WAIVABLE:
            changed = apply(untouched, [waiver(verdict=waived, case="*", kernel="*")], TODAY)
            assert (changed is untouched) == (waived is not verdict)
    assert {Verdict.PASS, Verdict.UNSUPPORTED, Verdict.HARNESS_ERROR, Verdict.INVALID_CASE}.isdisjoint(WAIVABLE)


def test_the_first_waiver_that_fits_is_named() -> None:
    waived = apply(record(), [waiver(case="diffuse", reason="no"), waiver(reason="yes"), waiver(reason="late")], TODAY)
    assert "until 2026-06-15: yes (" in waived.text


def test_a_needed_waiver_is_no_finding() -> None:
    records = [record(), record(Verdict.PASS)]
    assert findings(records, [waiver()], TODAY, complete=True) == []


def test_a_waiver_that_is_over_fails_the_run_even_where_nothing_of_it_ran() -> None:
    old = waiver(expires=date(2026, 6, 14))
    expected = [
        "EXPIRED waiver of NUMERIC for kernel 'attention[flash*]', case 'peaked' (https://example.org/issues/7): "
        "it ended on 2026-06-14"
    ]
    for records in ([], [record()], [record(Verdict.PASS)]):
        assert findings(records, [old, waiver()], TODAY, complete=False) == expected


def test_a_waiver_that_nothing_needs_fails_a_complete_run() -> None:
    records = [record(Verdict.PASS), record(Verdict.NONFINITE), record(Verdict.UNSUPPORTED), record(family="diffuse")]
    (finding,) = findings(records, [waiver()], TODAY, complete=True)
    assert finding.startswith("UNNEEDED waiver of NUMERIC for kernel 'attention[flash*]', case 'peaked'")
    assert finding.endswith("none of the 2 cases judged ended so")
    assert findings(records, [waiver()], TODAY, complete=False) == []


@pytest.mark.parametrize("verdict", [Verdict.UNSUPPORTED, Verdict.INVALID_CASE, Verdict.HARNESS_ERROR])
def test_a_waiver_of_cases_that_were_not_judged_is_left_alone(verdict: Verdict) -> None:
    records = [record(verdict), record(Verdict.PASS, kernel="other"), record(Verdict.PASS, family="diffuse")]
    assert findings(records, [waiver()], TODAY, complete=True) == []
