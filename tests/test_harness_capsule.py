"""A capsule keeps a failure whole: the case, the inputs bit by bit, the promise, the verdict and its place."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from builders import CPU, Answer, attention_case, honest_attention, honest_mla, judged, mla_case, operation_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from assay.harness import capsule as module
from assay.harness.capsule import (
    Capsule,
    Origin,
    inputs_digest,
    read_capsule,
    recorded_operation,
    versions,
    write_capsule,
)
from assay.harness.case import Case
from assay.harness.contract import Contract
from assay.harness.kernels import wrap_function
from assay.harness.operation import Inputs, Operation
from assay.harness.poison import same_bits
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case

ORIGIN = Origin(kernel="mine.py:wrong", seed=7, tier="full")
CASES = {
    "packed": attention_case(dtype="bfloat16"),
    "strided": attention_case(dtype="float16", layout="strided"),
    "an empty request": attention_case(query_lens=[0, 5], key_lens=[4, 0]),
    "split": mla_case(),
    "bundled": mla_case(dtype="bfloat16", layout="bundled"),
    "without rope": mla_case(d_rope=0),
    "bundled without rope": mla_case(d_rope=0, layout="bundled"),
}


def wrong(**given: Any) -> Answer:
    honest = honest_attention if "k" in given else honest_mla
    out, lse = honest(**given)
    out[..., 0, 0] += 1
    return out, lse


def written(
    folder: Path, case: Case, *, origin: Origin = ORIGIN, contract: Contract | None = None, record: Record | None = None
) -> Path:
    return write_capsule(folder, record or judged(wrong, case), operation_of(case), CPU, origin, contract)


def changed(path: Path, **changes: Any) -> None:
    """Replace some entries of a capsule."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Redrawn:
    """An operation that draws other values than it did when the capsule was written, as another torch might."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        inputs = self._operation.inputs(case, device)
        inputs.arguments["q"][0] += 1
        inputs.ledger.copies = {name: buffer.clone() for name, buffer in inputs.ledger.buffers.items()}
        return inputs


def redrawn(case: Case) -> Operation:
    return cast(Operation, Redrawn(operation_of(case)))


@pytest.mark.parametrize("which", CASES)
def test_the_inputs_come_back_bit_by_bit_with_their_layout_and_guards(which: str, tmp_path: Path) -> None:
    case = CASES[which]
    operation = operation_of(case)
    recorded, remark = recorded_operation(read_capsule(written(tmp_path, case)), redrawn(case), CPU)
    assert remark == "inputs differ on this machine: using the stored tensors"
    before, after = operation.inputs(case, CPU), recorded.inputs(case, CPU)
    assert list(after.arguments) == list(before.arguments)
    for name, value in before.arguments.items():
        restored = after.arguments[name]
        if not isinstance(value, Tensor):
            assert restored == value
            continue
        assert same_bits(restored, value)
        assert (restored.stride(), restored.storage_offset()) == (value.stride(), value.storage_offset())
    assert sorted(after.ledger.buffers) == sorted(before.ledger.buffers)
    for name, buffer in before.ledger.buffers.items():
        assert same_bits(after.ledger.buffers[name], buffer)
        assert same_bits(after.ledger.copies[name], buffer)
    # each call hands out memory of its own
    after.arguments["q"].fill_(0.0)
    assert after.ledger.written() == ["q"]
    assert recorded.inputs(case, CPU).ledger.written() == []
    assert not recorded.inputs(case, CPU).arguments["q"].eq(0).all()


def test_a_capsule_says_what_failed_where_and_how(tmp_path: Path) -> None:
    case = mla_case("peaked")
    record = judged(wrong, case)
    contract = Contract(p="fp32", out="fp32", mutates=("q",))
    path = written(tmp_path / "new" / "capsules", case, contract=contract)
    assert path == tmp_path / "new" / "capsules" / f"{case.id}-wrong.json"
    assert sorted(file.suffix for file in path.parent.iterdir()) == [".json", ".safetensors"]
    digest = inputs_digest(operation_of(case).inputs(case, CPU).arguments)
    content = json.loads(path.read_text())
    assert content["inputs"]["bytes"] == sum(
        tensor.nbytes for tensor in load_file(path.with_suffix(".safetensors")).values()
    )
    assert read_capsule(path) == Capsule(
        case=case,
        kernel="mine.py:wrong",
        seed=7,
        tier="full",
        device="cpu",
        versions=versions(),
        contract=contract,
        verdict=Verdict.NUMERIC,
        text=record.text,
        worst=record.worst,
        digest=digest,
        arguments=content["inputs"]["arguments"],
        tensors=path.with_suffix(".safetensors"),
    )


def test_the_versions_name_what_is_installed() -> None:
    found = versions()
    assert list(found) == ["python", "torch", "triton", "kernel-assay"]
    assert found["torch"] == torch.__version__


def test_a_kernel_of_the_house_is_named_by_itself_even_after_a_pattern(tmp_path: Path) -> None:
    case = mla_case()
    record = judged(wrong, case)
    house = Record(
        op=record.op,
        kernel="mla_prefill[torch]",
        case=record.case,
        device=record.device,
        verdict=record.verdict,
        gates=record.gates,
    )
    for spec in (None, "mla_prefill[*]", "torch"):
        path = written(tmp_path, case, record=house, origin=Origin(kernel=spec, seed=0, tier="smoke"))
        assert path.name == f"{case.id}-mla_prefill[torch].json"
        assert read_capsule(path).kernel == "mla_prefill[torch]"


def test_a_name_that_is_no_file_name_is_escaped(tmp_path: Path) -> None:
    def attend(**given: Any) -> Answer:
        return wrong(**given)

    attend.__name__ = "my/kernel v1.2"
    case = attention_case()
    path = written(tmp_path, case, record=judged(attend, case))
    assert path.name == f"{case.id}-my%2Fkernel%20v1.2.json"
    assert read_capsule(path).tensors == tmp_path / f"{case.id}-my%2Fkernel%20v1.2.safetensors"


def test_numbers_that_json_lacks_survive(tmp_path: Path) -> None:
    def attend(**given: Any) -> Answer:
        out, lse = honest_attention(**given)
        out[1, 1, 3] = math.nan
        return out, lse

    case = attention_case()
    record = judged(attend, case)
    capsule = read_capsule(written(tmp_path, case, record=record))
    assert capsule.worst is not None
    assert capsule.worst.where is not None
    assert record.worst is not None
    assert (capsule.verdict, capsule.worst.gate, capsule.worst.ratio) == ("NONFINITE", "G1 out", math.inf)
    assert math.isnan(capsule.worst.where.got or 0)
    assert str(capsule.worst.where) == str(record.worst.where)


def test_a_crash_has_no_gate_and_maybe_no_contract(tmp_path: Path) -> None:
    def attend(**given: Any) -> Answer:
        raise RuntimeError("no such tile")

    case = attention_case()
    capsule = read_capsule(written(tmp_path, case, record=judged(attend, case)))
    assert (capsule.verdict, capsule.worst, capsule.contract) == ("CRASH", None, None)
    assert capsule.text.startswith("RuntimeError: no such tile (")


def test_the_same_inputs_pass_without_a_remark(tmp_path: Path) -> None:
    case = mla_case("exact-one-hot", layout="bundled")
    capsule = read_capsule(written(tmp_path, case))
    recorded, remark = recorded_operation(capsule, operation_of(case), CPU)
    assert remark == ""
    plain, again = (
        run_case(operation, wrap_function(wrong, operation_of(case)), case, CPU)
        for operation in (operation_of(case), recorded)
    )
    assert (again.verdict, again.text, again.gates, again.rows) == (plain.verdict, plain.text, plain.gates, plain.rows)


def test_the_stored_inputs_are_judged_even_where_others_are_drawn(tmp_path: Path) -> None:
    case = attention_case(seed=3)
    capsule = read_capsule(written(tmp_path, case))
    recorded, _ = recorded_operation(capsule, redrawn(case), CPU)
    kernel = wrap_function(wrong, operation_of(case))
    plain, again = (run_case(operation, kernel, case, CPU) for operation in (operation_of(case), recorded))
    other = run_case(redrawn(case), kernel, case, CPU)
    assert again.gates == plain.gates
    assert other.gates != plain.gates


def test_recorded_inputs_are_those_of_one_case(tmp_path: Path) -> None:
    case = attention_case()
    recorded, _ = recorded_operation(read_capsule(written(tmp_path, case)), operation_of(case), CPU)
    with pytest.raises(ValueError, match=f"the case must be {case.id}, whose inputs are recorded, got attention-"):
        recorded.inputs(attention_case(seed=1), CPU)
    assert recorded.name == "attention"


def test_large_inputs_are_recognised_by_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STORED_BYTES", 20000)
    case = attention_case(query_lens=[40], key_lens=[90])
    path = written(tmp_path, case)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert json.loads(path.read_text())["inputs"]["stored"] is False
    capsule = read_capsule(path)
    assert (capsule.tensors, capsule.arguments) == (None, {})
    operation = operation_of(case)
    assert recorded_operation(capsule, operation, CPU) == (operation, "")
    with pytest.raises(ValueError, match="inputs differ on this machine, and the capsule stores none: the digest must"):
        recorded_operation(capsule, redrawn(case), CPU)


def test_tensors_of_another_digest_are_refused(tmp_path: Path) -> None:
    case = mla_case()
    path = written(tmp_path, case)
    tensors = load_file(path.with_suffix(".safetensors"))
    tensors["q"][300] += 1
    save_file(tensors, path.with_suffix(".safetensors"))
    with pytest.raises(ValueError, match="must hold tensors of the digest"):
        recorded_operation(read_capsule(path), operation_of(case), CPU)
    path.with_suffix(".safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ValueError, match=r"must be a safetensors file, got .*-wrong\.safetensors"):
        recorded_operation(read_capsule(path), operation_of(case), CPU)


def test_what_is_no_capsule_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = written(tmp_path, attention_case())
    whole = path.read_text()

    def refused(match: str) -> None:
        with pytest.raises(ValueError, match=match):
            read_capsule(path)
        path.write_text(whole)

    changed(path, case=json.loads(whole)["case"] | {"generator_version": 0})
    refused("generator_version must be 2, got 0")
    changed(path, case=json.loads(whole)["case"] | {"seed": 5})
    refused("id must be attention-diffuse-float32-")
    changed(path, capsule_version=2)
    refused("capsule_version must be 1, got 2 in ")
    path.write_text(whole.replace('"run":', '"walk":'))
    refused("a capsule must have the entry 'run', .* has not")
    changed(path, contract={"p": "fp32", "out": "fp32", "mutates": [], "colour": "red"})
    refused("must hold what this version writes, got .*colour")
    path.write_text("[1]")
    refused("capsule_version must be 1, got None")
    path.write_text("{")
    refused("a capsule must be a readable JSON file, got ")
    shutil.move(path.with_suffix(".safetensors"), tmp_path / "elsewhere")
    refused("the tensors of a capsule must lie beside it, .*safetensors is missing")
    path.unlink()
    with pytest.raises(ValueError, match="a capsule must be a readable JSON file, got "):
        read_capsule(path)


def test_an_input_outside_the_ledger_cannot_be_kept(tmp_path: Path) -> None:
    class Loose(Redrawn):
        def inputs(self, case: Case, device: torch.device) -> Inputs:
            inputs = self._operation.inputs(case, device)
            inputs.arguments["k"] = inputs.arguments["k"].clone()
            return inputs

    case = attention_case()
    with pytest.raises(ValueError, match="k must lie in a buffer of the ledger, got memory of its own"):
        write_capsule(tmp_path, judged(wrong, case), cast(Operation, Loose(operation_of(case))), CPU, ORIGIN)


def test_the_digest_is_of_every_tensor_and_of_nothing_else() -> None:
    given: dict[str, Any] = {"a": torch.arange(6).view(2, 3), "b": torch.tensor([math.nan, 1.0]), "scale": 0.5}
    digest = inputs_digest(given)
    # order, strides and plain numbers do not count
    strided = torch.zeros(2, 5, dtype=torch.int64)[:, :3].copy_(given["a"])
    assert inputs_digest({"scale": 0.7, "b": given["b"], "a": strided}) == digest
    assert len(digest) == 64
    for change in (
        {"a": given["a"].view(3, 2)},
        {"a": given["a"] + 1},
        {"a": given["a"].int()},
        {"b": torch.tensor([math.nan, -1.0])},
        {"b": -given["b"]},
        {"c": torch.empty(0)},
    ):
        assert inputs_digest(given | change) != digest
