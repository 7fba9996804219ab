"""``assay cost``: what the stand-in device answers, that counts repeat, and that each thing too many is named."""

import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from assay.harness import operations
from assay.harness.cli import app
from assay.harness.counts import _host_worker, host_cost
from assay.harness.counts._host_counts import StepCounts, WorkCounter, count_steps, python_calls
from assay.harness.counts._host_steps import host_steps
from assay.harness.counts._host_worker import PROVIDERS
from assay.harness.counts.baseline import accept, compare
from assay.harness.counts.host_cost import COMMITTED, CostOptions, HostCosts, instruction_growth, run_cost
from assay.harness.counts.standin_device import DEVICE, OnDevice, standin_device, to_standin
from assay.harness.kernels import find_kernels
from assay.harness.plan import UsageError

PLANTED = f"{Path(__file__).with_name('planted_costs.py')}"


def counted(step: Callable[[], Any]) -> StepCounts:
    return count_steps([step])[0]


@pytest.fixture
def x() -> Tensor:
    """``[4, 8]``, on the stand-in."""
    answer: Tensor = to_standin(torch.arange(32, dtype=torch.float32).view(4, 8))
    return answer


def test_the_stand_in_answers_as_a_device(x: Tensor) -> None:
    with standin_device(WorkCounter(), (10, 0)):
        assert (x.device, x.is_cuda, torch.ones(2).is_cuda) == (DEVICE, True, False)
        assert torch.cuda.is_available()
        assert torch.cuda.get_device_capability() == (10, 0)
        made = torch.empty(3, device="cuda"), x.new_zeros(3), x @ x.T, torch.ones(2).to(DEVICE), x.split(2)[0]
        assert all(isinstance(one, OnDevice) and one.is_cuda for one in made)
        back = x.cpu(), x.to("cpu"), torch.empty(3), torch.zeros(2, device="cpu")
        assert not any(one.is_cuda for one in back)
        assert torch.equal(back[0], torch.arange(32, dtype=torch.float32).view(4, 8))
    assert not x.is_cuda
    assert torch.cuda.is_available() is (torch.version.cuda is not None and torch.cuda.device_count() > 0)


def test_launches_are_named_and_views_are_free(x: Tensor) -> None:
    counts = counted(lambda: torch.softmax(x[1:].T.reshape(-1, 3) * 2.0, dim=-1).add_(1.0))
    assert counts.launches == {"aten.mul": 1, "aten._softmax": 1, "aten.add_": 1}
    # in place takes no memory
    assert (counts.allocations, counts.waits.total(), counts.host_operations) == (2, 0, 0)


def test_memory_without_a_kernel_is_an_allocation_alone(x: Tensor) -> None:
    counts = counted(lambda: (torch.empty(3, device="cuda"), x.new_empty(2), torch.empty_like(x)))
    assert counts.launches == {}
    assert counts.allocations == 3


def test_work_of_the_host_is_counted_apart(x: Tensor) -> None:
    host = torch.arange(4.0)
    counts = counted(lambda: (host + 1.0).sum())
    assert (counts.host_operations, counts.launches, counts.allocations) == (2, {}, 0)


def test_a_copy_to_the_device_is_a_launch_and_its_memory(x: Tensor) -> None:
    host = torch.zeros(4, 8)
    counts = counted(lambda: host.to(DEVICE, torch.float64))
    assert (counts.launches, counts.allocations) == ({"copy to the device": 1}, 1)
    counts = counted(lambda: x.copy_(host))
    assert (counts.launches, counts.allocations) == ({"copy to the device": 1}, 0)
    counts = counted(lambda: torch.tensor([1, 2], device="cuda"))
    assert counts.launches == {"copy to the device": 1}


WAITS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "item": (lambda x: x[0, 0].item(), "aten._local_scalar_dense"),
    "int": (lambda x: int(x[0, 0]), "aten._local_scalar_dense"),
    "if": (lambda x: 1 if x[0, 0] else 2, "aten._local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), "copy to the host by tolist"),
    "cpu": (lambda x: x.cpu(), "copy to the host by cpu"),
    "to": (lambda x: x.to("cpu"), "copy to the host by to"),
    "numpy": (lambda x: x.numpy(), "copy to the host by numpy"),
    "copy_": (lambda x: torch.empty(4, 8).copy_(x), "copy to the host by copy_"),
    "nonzero": (lambda x: x.nonzero(), "aten.nonzero"),
    "unique": (lambda x: x.unique(), "aten._unique2"),
    "equal": (lambda x: torch.equal(x, x), "aten.equal"),
    "mask": (lambda x: x[x.bool()], "a boolean index"),
    "synchronize": (lambda x: torch.cuda.synchronize(), "torch.cuda.synchronize"),
}


@pytest.mark.parametrize("way", WAITS)
def test_each_way_to_wait_is_named(way: str, x: Tensor) -> None:
    step, name = WAITS[way]
    assert counted(lambda: step(x)).waits == {name: 1}


def test_an_index_of_numbers_does_not_wait(x: Tensor) -> None:
    index = to_standin(torch.tensor([0, 2]))
    counts = counted(lambda: x[index])
    assert (counts.waits, counts.launches) == ({}, {"aten.index": 1})


def test_the_operation_that_only_cuda_has_is_counted_and_left_out() -> None:
    q = to_standin(torch.zeros(1, 5, 2, 16)).transpose(1, 2)
    v = to_standin(torch.zeros(1, 5, 2, 8)).transpose(1, 2)
    answers: list[Tensor] = []

    def step() -> None:
        attend = torch.ops.aten._scaled_dot_product_cudnn_attention
        answers[:] = attend(q, q, v, None, True, 0.0, False, False, scale=1.0)

    assert counted(step).launches == {"aten._scaled_dot_product_cudnn_attention": 1}
    out, lse = answers
    # in memory as the queries are, token by token
    assert (out.shape, out.stride()) == ((1, 2, 5, 8), (80, 8, 16, 1))
    assert (lse.shape, lse.dtype) == ((1, 2, 5, 1), torch.float32)


def test_calls_are_those_of_own_code() -> None:
    def inner() -> int:
        return len("abc")

    def outer() -> list[int]:
        return sorted(inner() for _ in "xyz")

    # outer and its sorted, the generator once a value and at its end, three times inner and its len
    assert python_calls(outer) == 2 + 4 + 3 * 2
    # what json does inside is not ours
    assert python_calls(lambda: json.dumps({"a": [1, 2, {"b": None}]})) == 2


def clean(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def launching(x: Tensor) -> Tensor:
    return clean(x).neg_()


def allocating(x: Tensor) -> Tensor:
    torch.empty(7, device="cuda")
    return clean(x)


def waiting(x: Tensor) -> Tensor:
    clean(x).max().item()
    return clean(x)


def calling(x: Tensor) -> Tensor:
    return (lambda: clean(x))()


PLANTS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "launch": (launching, ["launches was 1, is 2", "launches of aten.neg_ was missing, is 1"]),
    "allocation": (allocating, ["allocations was 1, is 2"]),
    "wait": (
        waiting,
        ["synchronisations was 0, is 1", "synchronisations by aten._local_scalar_dense was missing, is 1"],
    ),
    "call": (calling, []),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_one_thing_too_many_is_named(plant: str, x: Tensor, tmp_path: Path) -> None:
    step, lines = PLANTS[plant]
    path = tmp_path / "base.json"
    accept(path, {"v": {"clean forward": counted(lambda: clean(x)).fields()}}, left_out=lambda subject: False)

    def said(function: Callable[[Tensor], Tensor]) -> list[str]:
        found = {"v": {"clean forward": counted(lambda: function(x)).fields()}}
        return [*map(str, compare(path, found, left_out=lambda subject: False).changes)]

    assert said(clean) == []
    found = said(step)
    assert [line for line in found if "python calls" in line], found
    assert {f"clean forward: {line}" for line in lines} <= set(found)
    if plant in ("allocation", "call"):
        assert len(found) == len(lines) + 1


def cost_of(console: Console, **options: Any) -> int:
    return run_cost(CostOptions(ops=("attention",), **options), console)


def test_a_kernel_of_ones_own_is_gated_in_processes_of_its_own(tmp_path: Path) -> None:
    console, path = Console(record=True, width=200), tmp_path / "mine.json"
    assert cost_of(console, kernel=f"{PLANTED}:clean", baseline=path, accept=True) == 0
    (table,) = json.loads(path.read_text()).values()
    steps = [f"planted {name}: {phase}" for name in host_steps("attention") for phase in ("plan", "forward")]
    assert sorted(table) == sorted(steps)
    assert table["planted 4 requests: forward"]["launches of aten.zeros"] == 1
    assert cost_of(console, kernel=f"{PLANTED}:launches_more", baseline=path, out=tmp_path) == 1
    changed = [line for line in console.export_text().splitlines() if "CHANGED planted 4 requests" in line]
    calls = table["planted 4 requests: forward"]["python calls"]
    # the launch, what it is, and the calls that lead to it: another process counts all else the same, to the digit
    assert changed[0] == "CHANGED planted 4 requests: forward: launches was 1, is 2"
    assert changed[1].startswith(f"CHANGED planted 4 requests: forward: python calls was {calls}, is ")
    assert changed[2] == "CHANGED planted 4 requests: forward: launches of triton.extra_kernel was missing, is 1"
    assert len(changed) == 3
    assert len(json.loads((tmp_path / "cost.json").read_text())["changes"]) == 3 * len(host_steps("attention"))


def test_the_committed_file_holds_every_step_of_the_house() -> None:
    tables = json.loads(COMMITTED.read_text())
    kernels = [(op, kernel) for op in operations.NAMES for kernel in find_kernels(operations.load(op), None)]
    steps = [
        f"{kernel.name} {name}: {phase}"
        for op, kernel in kernels
        if kernel.name.partition("[")[2].rstrip("]") in PROVIDERS
        for name in host_steps(op)
        for phase in ("plan", "forward")
    ]
    assert tables
    for table in tables.values():
        assert sorted(table) == sorted(steps)


def test_no_forward_of_the_house_waits_for_the_device() -> None:
    # a selection has no plan: its lengths and budgets are read each time, as its documentation says;
    # the clean twin of a step goes from slot to slot on the host
    may_wait = ("token_selection[torch]", "kda_step[torch]")
    for table in json.loads(COMMITTED.read_text()).values():
        waiting = {subject for subject, fields in table.items() if fields["synchronisations"]}
        assert [one for one in waiting if one.endswith(": forward") and not one.startswith(may_wait)] == []
        # the waits of plans are seen
        assert {"mla_prefill[triton] 3 requests, 6 chunks: plan", "kda[triton] 3 sequences: plan"} <= waiting


def test_every_operation_of_the_house_has_steps() -> None:
    assert [op for op in operations.NAMES if not host_steps(op)] == []


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Counts that need no process: two operations with a step each, and instructions; to be changed by a test."""
    steps = {f"{op}[torch] s: plan": {column: 3 for column in host_cost._COLUMNS} for op in operations.NAMES}
    state: dict[str, Any] = {"steps": steps, "instructions": 1000, "obstacle": None, "environment": "here"}

    def host_costs(ops: Any, kernel: Any) -> HostCosts:
        mine = {subject: fields for subject, fields in state["steps"].items() if subject.partition("[")[0] in ops}
        return HostCosts(versions="torch 9", steps=mine)

    monkeypatch.setattr(host_cost, "host_costs", host_costs)
    monkeypatch.setattr(host_cost, "COMMITTED", tmp_path / "cost.json")
    monkeypatch.setattr(host_cost, "COMMITTED_INSTRUCTIONS", tmp_path / "instructions.json")
    monkeypatch.setattr(host_cost, "why_not", lambda: state["obstacle"])
    monkeypatch.setattr(host_cost, "environment", lambda: state["environment"])
    monkeypatch.setattr(
        host_cost, "instructions_of", lambda command: {"attention[torch] s: plan": state["instructions"]}
    )
    return state


def said(**options: Any) -> tuple[int, str]:
    console = Console(record=True, width=200)
    return run_cost(CostOptions(**options), console), console.export_text()


def test_counts_without_a_table_are_no_baseline_and_a_refusal_is_a_change(fake: dict[str, Any]) -> None:
    code, text = said()
    assert code == 3
    assert "no baseline for torch 9: --accept makes one" in text
    assert said(accept=True)[0] == 0
    assert said()[0] == 0
    fake["steps"]["attention[torch] s: plan"] = {"refused": "no [device]"}
    code, text = said()
    assert code == 1
    assert "no [device]" in text
    assert "CHANGED attention[torch] s: plan: refused was missing, is no [device]" in text
    # the other operation has not changed, and accepting it alone leaves the change
    assert said(ops=("mla_prefill",), accept=True)[0] == 0
    assert said(ops=("mla_prefill",))[0] == 0
    assert said()[0] == 1


def test_instructions_may_grow_by_two_percent_where_they_can_be_compared(fake: dict[str, Any]) -> None:
    said(accept=True)
    fake["instructions"] = 1020
    assert said()[0] == 0
    fake["instructions"] = 1021
    code, text = said()
    assert code == 1
    assert "FAULT attention[torch] s: plan: instructions were 1000, are 1021 (+2.1%)" in text
    # elsewhere they say nothing
    fake["environment"] = "there"
    code, text = said()
    assert code == 0
    assert "instructions: not counted, none are committed for there" in text
    fake["obstacle"] = "valgrind is not installed"
    code, text = said(accept=True)
    assert code == 0
    assert "instructions: not counted, valgrind is not installed" in text


def test_a_step_without_committed_instructions_is_not_judged() -> None:
    assert instruction_growth({}, {"new": {"instructions": 5}}) == []
    assert instruction_growth({"new": {"instructions": 6}}, {"new": {"instructions": 5}}) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["cost", "nothing"], "an operation must be one of attention, mla_prefill"),
        (["cost", "--kernel", "a:b"], "--kernel needs exactly one operation, got none"),
        (["cost", "attention", "--kernel", "a:b", "--accept"], "--accept of a kernel that is named needs --baseline"),
    ],
)
def test_usage(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert text in " ".join(done.stderr.split())


def test_a_kernel_that_is_not_there_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"ops": ["attention"], "kernel": "missing.py:f"}'))
    _host_worker.main()
    answer = subprocess.CompletedProcess([], 0, stdout=capsys.readouterr().out, stderr="")
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: answer)
    with pytest.raises(UsageError, match=r"--kernel must name an existing file, got missing\.py"):
        host_cost.host_costs(("attention",), "missing.py:f")


def test_a_counting_process_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback: no luck")
    monkeypatch.setattr("subprocess.run", lambda *arguments, **options: answer)
    with pytest.raises(RuntimeError, match="the counting process must end with 0, got 1: Traceback: no luck"):
        host_cost.host_costs(("attention",))


@pytest.mark.gpu
@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_stand_in_takes_the_way_of_a_gpu(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dispatched and launched on the device itself is what is counted on the stand-in."""
    triton = pytest.importorskip("triton", reason="triton has no wheel outside Linux")
    name = "3 requests, 6 chunks"
    operation, case = operations.load("mla_prefill"), host_steps("mla_prefill")[name]
    (kernel,) = find_kernels(operation, provider)
    forward = kernel.bind(operation.inputs(case, torch.device("cuda")).arguments)
    forward()
    counter, launch = WorkCounter(), triton.runtime.JITFunction.run
    # everything that a forward does is on the device
    monkeypatch.setattr(counter, "device", SimpleNamespace(on_device=True, moving=False), raising=False)

    def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
        counter.launch(kernel, arguments, options)
        return launch(kernel, *arguments, **options)

    monkeypatch.setattr(triton.runtime.JITFunction, "run", run)
    with counter:
        forward()
    fields = host_cost.host_costs(("mla_prefill",)).steps[f"{kernel.name} {name}: forward"]
    prefix = "launches of "
    expected = {field.removeprefix(prefix): n for field, n in fields.items() if field.startswith(prefix)}
    assert counter.count.launches == expected
    assert counter.count.waits == {}
