"""Captured calls: written and read back, judged like any case, and refused by name where they are damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from typer.testing import CliRunner

from assay import harness
from assay.harness import operations
from assay.harness.captures import CaptureError, captured_cases, read_captures, write_capture
from assay.harness.cli import app
from assay.reference.mla_prefill import mla_prefill

RUNNER = CliRunner()
HEADS, RANK, D_NOPE, D_ROPE, D_V, TOKENS, QUERIES = 3, 24, 8, 4, 6, 21, 9

KERNELS = """
import torch

from assay.reference.attention import attention
from assay.reference.mla_prefill import mla_prefill


def exact(q, kv_c, k_pe, kv_b_proj, *, softmax_scale, cu_seqlens, slot_table, request_rows, context_lens):
    tensors = [tensor.double() for tensor in (q, kv_c, k_pe, kv_b_proj)]
    out, lse = mla_prefill(
        *tensors, softmax_scale=softmax_scale, cu_seqlens=cu_seqlens.long(), slot_table=slot_table.long(),
        request_rows=request_rows.long(), context_lens=context_lens.long(),
    )
    return out.to(q.dtype), lse.float()


def latest_key_dropped(q, **rest):
    out, lse = exact(q, **rest)
    short = {**rest, "context_lens": rest["context_lens"] - 1, "cu_seqlens": rest["cu_seqlens"] - torch.tensor([0, 1])}
    seen, lse_seen = exact(q[1:], **short)
    return torch.cat([out[:1], seen]), torch.cat([lse[:1], lse_seen])
"""


def random_call(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors of one prefill of ``QUERIES`` tokens behind a history."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (QUERIES, HEADS, D_NOPE + D_ROPE),
        "kv_c": (TOKENS, RANK),
        "k_pe": (TOKENS, D_ROPE),
        "kv_b_proj": (HEADS, D_NOPE + D_V, RANK),
    }
    return {name: torch.randn(*shape, generator=generator).to(dtype) / 2 for name, shape in shapes.items()}


def random_attention(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"q": (5, 4, 6), "k": (11, 2, 6), "v": (11, 2, 3)}
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in shapes.items()}


NUMBERS = {"softmax_scale": 0.3, "history_chunk_size": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "captured"
    write_capture(path, "a-layer0", "mla_prefill", random_call(), NUMBERS, {"layer": 0})
    write_capture(path, "b-layer7", "attention", random_attention(), {"softmax_scale": 0.5}, {"layer": 7})
    return path


def check(*arguments: str) -> Any:
    return RUNNER.invoke(app, ["check", *arguments, "--device", "cpu"], catch_exceptions=False, env={"COLUMNS": "200"})


def test_captures_are_read_as_they_were_written(folder: Path) -> None:
    latent, expanded = read_captures(folder)
    assert (latent.op, latent.dtype, latent.numbers) == ("mla_prefill", "bfloat16", NUMBERS)
    assert latent.sizes == {"n": QUERIES, "H": HEADS, "Dq": 12, "T": TOKENS, "R": RANK, "Dr": D_ROPE, "Db": 14}
    assert latent.largest == max(float(tensor.abs().max()) for tensor in random_call().values())
    assert (expanded.op, expanded.dtype, expanded.sizes["Hkv"]) == ("attention", "float32", 2)
    assert json.loads((folder / "b-layer7.json").read_text())["origin"] == {"layer": 7}


def test_equal_calls_are_written_to_equal_bytes(folder: Path, tmp_path: Path) -> None:
    write_capture(tmp_path / "again", "a-layer0", "mla_prefill", random_call(), NUMBERS, {"layer": 0})
    for name in ("a-layer0.json", "a-layer0.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_inputs_hold_the_captured_values_in_slots_of_their_own(folder: Path) -> None:
    operation = operations.load("mla_prefill")
    (case,) = captured_cases(operation, folder, (), seed=1)
    arguments = operation.inputs(case, torch.device("cpu")).arguments
    call = random_call()
    slots = arguments["slot_table"][int(arguments["request_rows"][0]), :TOKENS].long()
    assert torch.equal(arguments["q"], call["q"])
    assert torch.equal(arguments["kv_b_proj"], call["kv_b_proj"])
    for name in ("kv_c", "k_pe"):
        assert torch.equal(arguments[name][slots], call[name])
        others = torch.ones(len(arguments[name]), dtype=torch.bool).index_fill(0, slots, False)
        assert others.any()
        assert arguments[name][others].isnan().all()
    assert slots.tolist() != list(range(TOKENS))
    assert case.sizes["query_lens"] == [QUERIES]
    assert case.sizes["history_chunk_size"] == 4


def test_queries_that_were_not_captured_cannot_be_asked(folder: Path) -> None:
    operation = operations.load("mla_prefill")
    (case,) = captured_cases(operation, folder, (), seed=1)
    case.sizes["query_lens"] = [QUERIES + 1]
    with pytest.raises(ValueError, match="the queries of a request must be of position 12 and later, got 11"):
        operation.inputs(case, torch.device("cpu"))
    # a shorter request is a part of the captured one
    case.sizes.update(query_lens=[2], context_lens=[15])
    q = operation.inputs(case, torch.device("cpu")).arguments["q"]
    assert torch.equal(q, random_call()["q"][1:3])


@pytest.mark.parametrize("op", ["mla_prefill", "attention", "token_scores"])
def test_kernels_of_the_house_pass_on_captured_calls(folder: Path, op: str) -> None:
    result = check(op, "--captured", str(folder), "--kernel", "torch")
    assert result.exit_code == 0, result.output
    assert f"{2 if op == 'token_scores' else 1} cases" in result.output


def test_several_operations_take_their_own_captures(folder: Path) -> None:
    result = check("mla_prefill", "attention", "--captured", str(folder), "--list-cases")
    assert result.exit_code == 0
    assert "2 cases" in result.output
    every = check("--captured", str(folder), "--list-cases", "--dtype", "float32", "--dtype", "float16")
    assert "8 cases" in every.output


def test_a_kernel_of_yours_is_judged_and_its_failure_kept(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(KERNELS, encoding="utf-8")
    good = check("mla_prefill", "--captured", str(folder), "--kernel", f"{file}:exact")
    assert good.exit_code == 0, good.output
    out = tmp_path / "out"
    bad = check("mla_prefill", "--captured", str(folder), "--kernel", f"{file}:latest_key_dropped", "--out", str(out))
    assert bad.exit_code == 1, bad.output
    assert f"--captured {folder}" in bad.output
    capsule = next((out / "capsules").glob("*.json"))
    replayed = RUNNER.invoke(app, ["replay", str(capsule), "--device", "cpu"])
    assert replayed.exit_code == 1, replayed.output
    assert "as recorded" in replayed.output


def test_captured_calls_are_judged_from_a_test_of_ones_own(folder: Path) -> None:
    names = ("cu_seqlens", "slot_table", "request_rows", "context_lens")

    def exact(q: Tensor, kv_c: Tensor, k_pe: Tensor, kv_b_proj: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        integers = {name: rest[name].long() for name in names}
        tensors = (tensor.double() for tensor in (q, kv_c, k_pe, kv_b_proj))
        out, lse = mla_prefill(*tensors, softmax_scale=rest["softmax_scale"], **integers)
        return out.to(q.dtype), lse.float()

    def halved(q: Tensor, **rest: Any) -> tuple[Tensor, Tensor]:
        out, lse = exact(q, **rest)
        return out / 2, lse

    summary = harness.check(exact, "mla_prefill", device="cpu", captured=folder)
    assert [record.case["family"] for record in summary.records] == ["captured"]
    with pytest.raises(harness.KernelRejected, match=rf"captured='{folder}'"):
        harness.check(halved, "mla_prefill", device="cpu", captured=str(folder), dtypes=["float32"])
    with pytest.raises(ValueError, match="captures must be in a folder"):
        harness.check(exact, "mla_prefill", device="cpu", captured=folder / "none")


def test_other_dtypes_are_rounded_to_where_they_hold_the_values(folder: Path) -> None:
    operation = operations.load("attention")
    assert [case.dtype for case in captured_cases(operation, folder, ("float16", "bfloat16"), 0)] == [
        "float16",
        "bfloat16",
    ]
    huge = random_attention() | {"v": torch.full((11, 2, 3), 1e6)}
    write_capture(folder, "c-huge", "attention", huge, {"softmax_scale": 0.5}, {})
    result = check("attention", "--captured", str(folder), "--dtype", "float16")
    assert result.exit_code == 2
    assert "float16 must hold 1e+06 of" in result.stderr
    assert "c-huge.safetensors" in result.stderr


def test_a_folder_without_a_call_of_the_operation_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("b-layer7.json", "b-layer7.safetensors"):
        (folder / name).unlink()
    result = check("attention", "token_selection", "--captured", str(folder))
    assert result.exit_code == 2
    assert "--captured must hold calls that attention, token_selection can be judged on, got none in" in " ".join(
        result.stderr.split()
    )
    assert check("attention", "--captured", str(tmp_path / "nowhere")).exit_code == 2
    assert check("mla_prefill", "--captured", str(folder), "--heads", "2").exit_code == 2


def altered(**entries: Any) -> Callable[[Path], None]:
    def alter(folder: Path) -> None:
        path = folder / "a-layer0.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries), encoding="utf-8")

    return alter


def flipped(folder: Path) -> None:
    path = folder / "a-layer0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def stored(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Other tensors, with a digest that fits them."""

    def alter(folder: Path) -> None:
        import hashlib

        path = folder / "a-layer0.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.write_bytes(save(tensors))
        altered(sha256=hashlib.sha256(path.read_bytes()).hexdigest())(folder)

    return alter


def garbage(folder: Path) -> None:
    import hashlib

    (folder / "a-layer0.safetensors").write_bytes(b"garbage!" * 4)
    altered(sha256=hashlib.sha256(b"garbage!" * 4).hexdigest())(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "flipped bit": (flipped, "a-layer0.safetensors", "must have the sha256"),
    "no tensors": (lambda folder: (folder / "a-layer0.safetensors").unlink(), "a-layer0.safetensors", "readable"),
    "no description": (lambda folder: (folder / "a-layer0.json").unlink(), "a-layer0.safetensors", "description"),
    "cut description": (lambda folder: (folder / "a-layer0.json").write_text("{"), "a-layer0.json", "readable JSON"),
    "other version": (altered(capture_version=2), "a-layer0.json", "capture_version must be 1, got 2"),
    "other operation": (altered(op="attention"), "a-layer0.json", "attention must have the tensors q, k, v"),
    "unknown operation": (altered(op=["conv"]), "a-layer0.json", "op must be one of attention, mla_prefill"),
    "a file elsewhere": (altered(tensors="../x.safetensors"), "a-layer0.json", "tensors must be a-layer0.safetensors"),
    "no number": (altered(numbers={"softmax_scale": 1.0}), "a-layer0.json", "must have the numbers"),
    "no table": (altered(numbers=3), "a-layer0.json", "numbers must be a table"),
    "half a chunk": (altered(numbers=NUMBERS | {"history_chunk_size": 1.5}), "a-layer0.json", "positive whole number"),
    "negative scale": (altered(numbers=NUMBERS | {"softmax_scale": -1.0}), "a-layer0.json", "positive number"),
    "garbage": (garbage, "a-layer0.safetensors", "must be a safetensors file"),
    "not finite": (stored(lambda tensors: tensors["k_pe"].fill_(torch.nan)), "a-layer0.json", "k_pe must be finite"),
    "other tokens": (
        stored(lambda tensors: tensors.update(k_pe=tensors["k_pe"][1:].clone())),
        "a-layer0.json",
        "k_pe must have the shape [T 21, Dr], got [20, 4]",
    ),
    "other dtype": (stored(lambda tensors: tensors.update(q=tensors["q"].float())), "a-layer0.json", "as q is"),
    "no values": (
        stored(lambda tensors: tensors.update(kv_b_proj=tensors["kv_b_proj"][:, :8].clone())),
        "a-layer0.json",
        "kv_b_proj must have more rows",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_capture_is_named(folder: Path, damage: str) -> None:
    alter, file, message = DAMAGES[damage]
    alter(folder)
    result = check("mla_prefill", "--captured", str(folder))
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert file in said
    assert message in said


def test_a_file_that_changes_after_the_plan_is_noticed(folder: Path) -> None:
    operation = operations.load("mla_prefill")
    (case,) = captured_cases(operation, folder, (), seed=1)
    from assay.harness.captures import capture_tensors

    capture_tensors.cache_clear()
    flipped(folder)
    with pytest.raises(CaptureError, match="it is damaged, or of another capture"):
        operation.inputs(case, torch.device("cpu"))


def test_what_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    call = random_call() | {"q": random_call()["q"] * torch.inf}
    with pytest.raises(CaptureError, match="q must be finite"):
        write_capture(tmp_path / "c", "x", "mla_prefill", call, NUMBERS, {})
    assert not (tmp_path / "c").exists()


def test_the_oracle_of_a_captured_call_is_that_of_its_tokens(folder: Path) -> None:
    operation = operations.load("mla_prefill")
    (case,) = captured_cases(operation, folder, (), seed=2)
    arguments = operation.inputs(case, torch.device("cpu")).arguments
    call = {name: tensor.double() for name, tensor in random_call().items()}
    expected, _ = mla_prefill(
        *call.values(),
        softmax_scale=0.3,
        cu_seqlens=torch.tensor([0, QUERIES]),
        slot_table=torch.arange(TOKENS)[None],
        request_rows=torch.tensor([0]),
        context_lens=torch.tensor([TOKENS]),
    )
    names = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
    got, _ = mla_prefill(
        *(arguments[name].double() for name in ("q", "kv_c", "k_pe", "kv_b_proj")),
        softmax_scale=arguments["softmax_scale"],
        **{name: arguments[name].long() for name in names},
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
