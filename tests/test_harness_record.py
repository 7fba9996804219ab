"""Records are lines that any JSON reader accepts, and a gate without a number is no pass."""

import io
import json
import math
from pathlib import Path

import pytest
from builders import attention_case

from assay.harness.case import Case
from assay.harness.record import GateResult, Location, Record, RecordWriter, Verdict, open_records


def record_of(*gates: GateResult, verdict: Verdict = Verdict.PASS) -> Record:
    case = attention_case().to_json()
    return Record(op="attention", kernel="mine", case=case, device="cpu", verdict=verdict, gates=list(gates))


@pytest.mark.parametrize(
    ("ratio", "passed"), [(0.0, True), (1.0, True), (1.0000001, False), (math.inf, False), (math.nan, False)]
)
def test_a_gate_passes_up_to_its_limit_only(ratio: float, passed: bool) -> None:
    assert GateResult(gate="G4", ratio=ratio).passed is passed


def test_the_worst_gate_is_the_first_failed_one_else_the_nearest() -> None:
    near, far = GateResult(gate="near", ratio=0.9), GateResult(gate="far", ratio=0.1)
    failed, later = GateResult(gate="failed", ratio=1.5), GateResult(gate="later", ratio=math.inf)
    assert record_of(far, near).worst is near
    assert record_of(near, failed, later).worst is failed
    undefined = GateResult(gate="nan", ratio=math.nan)
    assert record_of(near, undefined).worst is undefined
    assert record_of().worst is None


def test_a_location_names_what_it_knows() -> None:
    where = Location(request=1, token=12, position=40, head=2, dim=3, slot=77, got=0.5, expected=0.25)
    expected = "request 1, token 12, head 2, dim 3, position 40 -> slot 77, got 0.5, must be 0.25"
    assert str(where) == expected
    assert str(Location(token=0, head=0, position=4)) == "token 0, head 0, position 4"
    assert str(Location()) == ""


def test_numbers_that_json_lacks_become_strings() -> None:
    where = Location(token=0, got=math.nan, expected=-math.inf)
    gates = (GateResult(gate="G1 out", ratio=math.inf, where=where), GateResult(gate="G4", ratio=0.25))
    line = record_of(*gates, verdict=Verdict.NONFINITE).to_json()
    assert "\n" not in line
    assert not {"NaN", "Infinity"} & set(line.replace(",", " ").replace(":", " ").split())
    content = json.loads(line)
    assert content["verdict"] == "NONFINITE"
    assert content["gates"][0]["ratio"] == "inf"
    assert (content["gates"][0]["where"]["got"], content["gates"][0]["where"]["expected"]) == ("nan", "-inf")
    assert content["gates"][1]["ratio"] == 0.25
    assert content["case"]["id"] == attention_case().id


def test_the_case_of_a_record_can_be_judged_again() -> None:
    case = attention_case(softmax_scale=0.12345678901234567)
    record = Record(op="attention", kernel="mine", case=case.to_json(), device="cpu", verdict=Verdict.PASS)
    assert Case.from_json(json.loads(record.to_json())["case"]) == case


class CountingStream(io.StringIO):
    """A stream that remembers how much was flushed."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_each_line_is_flushed_at_once() -> None:
    stream = CountingStream()
    writer = RecordWriter(stream)
    for line in ('{"a": 1}', '{"b": 2}'):
        writer.write(line)
        assert stream.flushed.endswith(line + "\n")
    assert stream.flushed.count("\n") == 2


def test_a_folder_gets_a_header_then_records(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with open_records(folder, {"seed": 3}) as writer:
        writer.write(record_of().to_json())
    lines = (folder / "records.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"run": {"seed": 3}}
    assert json.loads(lines[1])["verdict"] == "PASS"
    # another run in the same folder starts anew
    with open_records(folder, {"seed": 4}):
        pass
    assert (folder / "records.jsonl").read_text() == '{"run": {"seed": 4}}\n'


def test_a_run_cut_short_leaves_whole_lines(tmp_path: Path) -> None:
    def interrupted() -> None:
        with open_records(tmp_path, {"seed": 0}) as writer:
            writer.write(record_of().to_json())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) & {"run", "verdict"} for line in lines] == [{"run"}, {"verdict"}]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_records(None, {"seed": 0}) as writer:
        writer.write("{}")
    assert list(tmp_path.iterdir()) == []
