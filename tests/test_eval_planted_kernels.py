"""Wrong kernels inside a model come out of the runner and the comparison as regressed, right ones do not."""

import json
import random
import string
from pathlib import Path
from typing import Any

import planted_prefills
import pytest
import torch
from typer.testing import CliRunner

from assay.eval import cli
from assay.eval.arms import read_arm
from assay.eval.compare import compare
from assay.reference.mla_prefill import mla_prefill

pytest.importorskip("datasets", reason="the extra `eval` is not installed")

RUNNER = CliRunner()
HERE = Path(__file__).parent
SAMPLES = 32
SUITE = """
name = "planted"
description = "Gold answers that stand in their prompts, by their log-probabilities."
tasks = ["lcc"]

[data]
partial = true

[prompt]
chat = "never"

[asking]
batch_size = 16
generate = false
probes = 16

[[gates]]
name = "log-probability of gold answers"
metric = "nll"
margin = 0.03
scale = 0.3
"""


def written_records(seed: int) -> list[dict[str, Any]]:
    """Words of no language; the answer is some of them in their order."""
    rng, records = random.Random(seed), []
    for at in range(SAMPLES):
        words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6))) for _ in range(40)]
        first = rng.randint(2, 28)
        record = {"input": "", "context": " ".join(words), "answers": [" ".join(words[first : first + 8])]}
        records.append(record | {"length": 40, "dataset": "lcc", "language": "python", "_id": f"made-{at}"})
    return records


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the suite and the run of the house."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "planted.toml").write_text(SUITE, encoding="utf-8")
    lines = [json.dumps(record | {"all_classes": None}) + "\n" for record in written_records(seed=0)]
    (folder / "lcc.jsonl").write_text("".join(lines), encoding="utf-8")
    run(folder, "house")
    return folder


def run(folder: Path, name: str, *arguments: str, kernel: str = "") -> Path:
    """``assay eval run`` of the copying model, its attention served by a planted kernel or the house."""
    out = folder / name
    served = ["-o", f"kernel={HERE / 'planted_prefills.py'}:{kernel}"] if kernel else []
    required = ["--require-kernel", f"prefill/{kernel or 'mla_prefill'}"]
    model = ["--model", f"{HERE / 'eval_pointer_model.py'}:load", *served, *required]
    suite = [str(folder / "planted.toml"), "--data", str(folder), "--out", str(out)]
    result = RUNNER.invoke(cli.app, ["run", *suite, *model, *arguments])
    assert result.exit_code == 0, result.output
    return out


def verdict(first: Path, second: Path) -> tuple[int, str, float]:
    """Exit code of ``assay eval compare``, and verdict and difference of its gate, in nats for the worse."""
    result = RUNNER.invoke(cli.app, ["compare", str(first), str(second)])
    (gate,) = compare([read_arm(first), read_arm(second)]).pairs[0].gates
    assert gate.estimate is not None
    return result.exit_code, gate.verdict, gate.estimate.delta


def test_asking_in_other_batches_and_a_right_kernel_are_equivalent(runs: Path) -> None:
    again = run(runs, "again", "--batch-size", "5", "--seed", "7")
    right = run(runs, "right", kernel="right")
    for other in (again, right):
        code, found, delta = verdict(runs / "house", other)
        assert (code, found) == (0, "equivalent")
        assert abs(delta) < 1e-4


@pytest.mark.parametrize("kernel", ["mask_shifted", "lse_base_two", "stale_block"])
def test_a_wrong_kernel_is_regressed(runs: Path, kernel: str) -> None:
    assert SAMPLES <= 64
    code, found, delta = verdict(runs / "house", run(runs, kernel, kernel=kernel))
    assert (code, found) == (1, "regressed"), delta


def test_the_right_kernel_computes_what_the_operation_is() -> None:
    """And the wrong ones do not: what the suite finds is what was planted."""
    generator = torch.Generator().manual_seed(0)
    contexts, queries = [50, 7, 90], [10, 7, 33]
    slots = torch.randperm(200, generator=generator)[: sum(contexts)]
    table = torch.full((3, max(contexts)), -1)
    for row, part in zip(table, slots.split(contexts), strict=True):
        row[: len(part)] = part
    shapes = {"q": (sum(queries), 3, 12), "kv_c": (200, 24), "k_pe": (200, 4), "kv_b_proj": (3, 14, 24)}
    tensors = {name: torch.randn(*shape, generator=generator) / 2 for name, shape in shapes.items()}
    numbers: dict[str, Any] = {
        "softmax_scale": 0.7,
        "cu_seqlens": torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()]),
        "slot_table": table,
        "request_rows": torch.arange(3),
        "context_lens": torch.tensor(contexts),
    }
    expected, _ = mla_prefill(*(tensor.double() for tensor in tensors.values()), **numbers)
    for name, wrong in (("right", False), ("mask_shifted", True), ("lse_base_two", True), ("stale_block", True)):
        out, _ = getattr(planted_prefills, name)(**tensors, **numbers, history_chunk_size=16)
        difference = float((out - expected).abs().max())
        assert (difference > 1e-2) if wrong else (difference < 1e-5), name
