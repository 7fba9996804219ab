"""``assay bench`` as a whole on the fake clock: records, pages, exit codes; and without a device."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_clock import SHAPE, FakeClock, around, honest, participant, setting
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("scipy", reason="intervals need scipy, of the extra `bench`")
pytest.importorskip("jinja2", reason="the page needs jinja2, of the extra `bench`")
pytest.importorskip("matplotlib", reason="the page needs matplotlib, of the extra `bench`")

from assay.harness import cli
from assay.harness.bench import command
from assay.harness.bench.command import BenchOptions, bench, chosen_shapes
from assay.harness.bench.gate import read_baseline
from assay.harness.bench.lineup import line_up, peers_of
from assay.harness.bench.results import SCHEMA
from assay.harness.bench.shapes import Shape
from assay.harness.discovery import load_operation
from assay.harness.plan import UsageError


class Bench:
    """Runs ``bench`` with kernels of a test in the place of the house's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch, self.clock, self.console = monkeypatch, FakeClock(), Console(width=200, record=True)

    def __call__(self, *kernels: Any, shapes: list[Shape] | None = None, peers: Any = (), **options: Any) -> int:
        lineup = [participant(kernel) for kernel in kernels] + [participant(kernel, "peer") for kernel in peers]
        self._monkeypatch.setattr(command, "line_up", lambda operation, **given: lineup)
        given = BenchOptions(**options)
        baseline = read_baseline(Path(given.against)) if given.against and Path(given.against).is_file() else None
        return bench(given, shapes or [SHAPE], baseline, setting(self.clock), self.console)

    def honest(self, name: str, ms: float, **more: Any) -> Any:
        return honest(name, self.clock, ms, **more)

    @property
    def text(self) -> str:
        return self.console.export_text(clear=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_a_run_leaves_a_record_and_a_page(run: Bench, tmp_path: Path) -> None:
    ours, peer = run.honest("attention[ours]", 1.2), run.honest("attention[peer]", 1.0)
    assert run(ours, peers=[peer], out=tmp_path, seed=3) == 0
    record = json.loads((tmp_path / "bench.json").read_text())
    assert record["schema"] == SCHEMA
    assert record["seed"] == 3
    assert record["command"] == "assay bench --seed 3"
    assert record["ceilings"]["gemm_tflops"] == 1000.0
    assert [peer["name"] for peer in record["peers"]["attention"]] == [
        p.name for p in peers_of(["attention"])["attention"]
    ]
    assert record["versions"]["torch"] is not None
    (shape,) = record["shapes"]
    assert [kernel["kernel"] for kernel in shape["kernels"]] == ["attention[ours]", "attention[peer]"]
    assert len(shape["kernels"][0]["samples_ms"]) == 20
    assert shape["kernels"][0]["ms"]["median"] == pytest.approx(1.2)
    assert len(shape["anchor_ms"]) == 20
    page = (tmp_path / "bench.html").read_text()
    for text in ("attention[ours]", "1.200", "<svg", "Roofline", "a test", "http-equiv"):
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", "")


def test_the_terminal_shows_times_ratios_and_what_is_absent(run: Bench) -> None:
    run(run.honest("attention[ours]", 1.2), peers=[run.honest("attention[peer]", 1.0)])
    line = next(line for line in run.text.splitlines() if "attention[peer]" in line)
    for text in ("1.000", "1.000 - 1.000", "1.200 [1.200, 1.200]"):
        assert text in line
    assert "bf16 GEMM 1000 TFLOP/s, copy 1000.00 TB/s" in run.text
    assert "peers here: torch SDPA (cuDNN) (torch " in run.text
    assert "absent: " in run.text
    assert "FlashMLA (serves: sparse_mla)" in run.text
    assert "10 of 10 rounds kept, 2 sets of buffers, a kernel bound twice differs by a factor of 1.000" in run.text


def test_a_wrong_kernel_fails_the_run_and_has_no_times(run: Bench, tmp_path: Path) -> None:
    wrong = around("wrong", lambda call: lambda: (call()[0] + 1, call()[1]))
    assert run(run.honest("ours", 1.0), wrong, out=tmp_path) == 1
    assert "NUMERIC  wrong on tiny: G4 envelope" in run.text
    kernels = json.loads((tmp_path / "bench.json").read_text())["shapes"][0]["kernels"]
    assert [kernel["ms"] is None for kernel in kernels] == [False, True]
    assert "NUMERIC: G4 envelope" in (tmp_path / "bench.html").read_text()


def test_a_kernel_that_serves_nothing_leaves_nothing_timed(run: Bench) -> None:
    refusing = replace(run.honest("ours", 1.0), unsupported=lambda case, device: "heads of 128 only")
    assert run(refusing) == 3
    assert "UNSUPPORTED  ours on tiny: heads of 128 only" in run.text


def test_accepted_ratios_hold_the_next_run(run: Bench, tmp_path: Path) -> None:
    file = str(tmp_path / "cpu.json")
    peer = run.honest("peer", 1.0)
    assert run(run.honest("ours", 1.2), peers=[peer], against=file, accept=True) == 0
    assert f"accepted 2 ratios in {file}" in run.text
    assert run(run.honest("ours", 1.21), peers=[peer], against=file) == 0
    assert run(run.honest("ours", 1.32), peers=[peer], against=file) == 1
    assert "regressed: tiny: ours over peer is 1.320 [1.320, 1.320], +10.0% against the committed 1.200" in run.text


def test_without_ratios_of_this_gpu_there_is_no_baseline(run: Bench) -> None:
    assert run(run.honest("ours", 1.2), against="committed") == 3
    assert "no baseline: nobody has accepted ratios for cpu" in run.text


def test_ratios_of_another_gpu_are_other_settings(run: Bench, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    run(run.honest("ours", 1.2), against=str(file), accept=True)
    file.write_text(file.read_text().replace('"cpu"', '"NVIDIA H200"'))
    assert run(run.honest("ours", 1.2), against=str(file)) == 4


def test_a_run_in_which_something_is_wrong_is_not_accepted(run: Bench, tmp_path: Path) -> None:
    wrong = around("wrong", lambda call: lambda: (call()[0] + 1, call()[1]))
    file = tmp_path / "gpu.json"
    assert run(run.honest("ours", 1.0), wrong, against=str(file), accept=True) == 1
    assert not file.exists()
    assert "nothing accepted: our kernels must pass, got NUMERIC" in run.text
    # a peer's fault is not ours: it is reported, and in no ratio
    assert run(run.honest("ours", 1.0), peers=[wrong], against=str(file), accept=True) == 1
    assert [one.other for one in read_baseline(file).ratios] == ["bound"]


def test_shapes_for_which_no_time_is_left_are_named(run: Bench, tmp_path: Path) -> None:
    shapes = [SHAPE, replace(SHAPE, name="second")]
    assert run(run.honest("ours", 1.0), shapes=shapes, max_seconds=0.0, out=tmp_path) == 6
    assert "no time left for tiny, second" in run.text
    assert json.loads((tmp_path / "bench.json").read_text())["not_started"] == ["tiny", "second"]


def test_a_page_without_counted_work_has_no_roofline(run: Bench, tmp_path: Path) -> None:
    wrong = around("wrong", lambda call: lambda: (call()[0] + 1, call()[1]))
    run(wrong, out=tmp_path)
    assert "<svg" not in (tmp_path / "bench.html").read_text()


def test_the_page_escapes_what_it_is_told(run: Bench, tmp_path: Path) -> None:
    run(run.honest("<b>ours</b>", 1.0), out=tmp_path)
    page = (tmp_path / "bench.html").read_text()
    assert "<b>ours</b>" not in page
    assert "&lt;b&gt;ours&lt;/b&gt;" in page


def test_ours_come_first_and_peers_only_when_asked() -> None:
    operation = load_operation("attention")
    alone = line_up(operation)
    assert [(one.kernel.name, one.role) for one in alone] == [("attention[triton]", "ours")]
    both = {one.kernel.name: one.role for one in line_up(operation, peers=True)}
    assert both["attention[triton]"] == "ours"
    assert both["attention[sdpa]"] == both["attention[flex]"] == both["attention[flash]"] == "peer"
    assert "attention[torch]" not in both
    named = line_up(operation, named=["torch", "sdpa"], peers=True)
    assert [(one.kernel.name, one.role) for one in named[:2]] == [
        ("attention[torch]", "ours"),
        ("attention[sdpa]", "ours"),
    ]
    assert len({one.kernel.name for one in named}) == len(named)


def test_shapes_are_chosen_by_operation_and_name() -> None:
    assert {shape.op for shape in chosen_shapes(BenchOptions(ops=("mla_prefill",)))} == {"mla_prefill"}
    assert [shape.name for shape in chosen_shapes(BenchOptions(shape=("deepseek-v3-4k",)))] == ["deepseek-v3-4k"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"ops": ("conv",)}, "an operation must be one of attention, mla_prefill"),
        ({"shape": ("small",)}, "--shape must be one of deepseek-v3-tp8-8k"),
        ({"shape": ("deepseek-v3-4k",), "ops": ("mla_prefill",)}, "there must be a shape of mla_prefill, got none"),
        ({"kernels": ("torch",)}, "--kernel needs the shapes of exactly one operation, got attention, mla_prefill"),
    ],
)
def test_what_cannot_be_served_is_a_wrong_command_line(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        chosen_shapes(BenchOptions(**options))


def assay(*arguments: object) -> Any:
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize(("counted", "against", "code"), [(0, False, 0), (1, False, 1), (3, False, 3), (0, True, 3)])
def test_without_a_device_host_work_is_counted_instead(
    monkeypatch: pytest.MonkeyPatch, counted: int, against: bool, code: int
) -> None:
    host_cost = pytest.importorskip("assay.harness.counts.host_cost", reason="counts of host work are made elsewhere")
    asked: list[Any] = []
    monkeypatch.setattr(cli, "console", Console(width=300))

    def run_cost(options: Any, console: Console) -> int:
        asked.append(options.ops)
        return counted

    monkeypatch.setattr(host_cost, "run_cost", run_cost)
    done = assay("bench", "attention", "--device", "cpu", *(["--against", "committed"] if against else []))
    assert "device time needs a CUDA device, found none: nothing was timed" in done.output
    assert asked == [("attention",)]
    assert done.exit_code == code


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "nothing"],
        ["bench", "--device", "tpu"],
        ["bench", "--device", "cpu", "--against", "no/such/file.json"],
        ["bench", "--device", "cpu", "--shapes", "no/such/file.toml"],
        ["bench", "--device", "cpu", "--sweep", "no/such/file.toml"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_exits_with_two(arguments: list[str]) -> None:
    assert assay(*arguments).exit_code == 2


def test_a_missing_library_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "scipy" else object())
    with pytest.raises(UsageError, match=r"must have scipy, got no scipy: pip install 'kernel-assay\[bench\]'"):
        command._check_libraries(BenchOptions())
