"""A model that answers by digests: fast, deterministic, and sensitive to who else is in its batch."""

import array
import io
import signal
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from assay.eval import runner
from assay.eval.models.interface import Failure, Generated, GenerateRequest, OutOfMemoryError, Scored, ScoreRequest
from assay.eval.models.ngram import Characters
from assay.eval.run_folder import RunFolder

SUITE = """
name = "tiny"
description = "made up"
tasks = ["synthetic_qasper", "synthetic_trec", "needle"]

[generated]
samples = 7
length = 30

[needle]
lengths = [30, 60]
depths = [50]
samples = 2

[asking]
batch_size = 3
probes = 4
{asking}

[[gates]]
name = "answers"
metric = "nll"
margin = 0.1
"""


class DigestModel:
    """Its answer depends on the prompt and on the batch, as that of a real model does in its last bits.

    Attributes:
        calls: Sizes of all batches that were generated.
        prompts: All prompts that were generated from, as text.
        kept: Whether what a call had allocated before it did not fit was still held when the next one came.
    """

    def __init__(
        self,
        name: str = "digest",
        *,
        fits: int = 10**9,
        stop_at: int = 0,
        marker: str = "",
        context_length: int = 100_000,
        broken: str = "",
        late: str = "",
    ) -> None:
        """Make it.

        Args:
            name: Part of its description.
            fits: Tokens that fit into its memory at once, padded, with what follows them.
            stop_at: Number of the batch in which it stops for good, after creating the file ``marker``; 0 for never.
            marker: That file.
            context_length: Tokens.
            broken: It raises on prompts that hold this text.
            late: It reports a timeout on prompts that hold this text.
        """
        self.name, self.fits, self.stop_at, self.marker = name, int(fits), int(stop_at), marker
        self.broken, self.late = broken, late
        self.context_length = int(context_length)
        self.tokenizer = Characters()
        self.calls: list[int] = []
        self.prompts: list[str] = []
        self.kept = False
        self._held: weakref.ref[Any] = weakref.ref(self)

    def describe(self) -> dict[str, Any]:
        """Its name."""
        return {"name": self.name}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """Digits and letters of the digest."""
        texts = [self.tokenizer.decode(request.prompt_ids) for request in requests]
        self.kept |= self._held() not in (None, self)
        tokens = len(requests) * max(len(request.prompt_ids) + request.max_new_tokens for request in requests)
        if tokens > self.fits:
            workspace = array.array("b", bytes(8))
            self._held = weakref.ref(workspace)
            raise OutOfMemoryError(f"{tokens} tokens")
        if self.broken and any(self.broken in text for text in texts):
            raise ArithmeticError("it broke")
        self.calls.append(len(requests))
        self.prompts += texts
        if len(self.calls) == self.stop_at:
            Path(self.marker).touch()
            signal.pause()
        whole = zlib.crc32("".join(texts).encode())
        return [self._answer(text, whole) for text in texts]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """Log-probabilities between -1 and 0."""
        whole = sum(sum(request.prompt_ids) for request in requests) % 997
        return [self._score(request, whole) for request in requests]

    def _answer(self, text: str, whole: int) -> Generated | Failure:
        if self.late and self.late in text:
            return Failure(status="timeout", reason="too late")
        answer = f"{zlib.crc32(text.encode()) % 7} {whole % 5} the value is {whole % 3}"
        ids = tuple(map(ord, answer))
        return Generated(text=answer, ids=ids, finish_reason="stop", gaps=(0.5,) * len(ids), kernel_calls={"digest": 2})

    def _score(self, request: ScoreRequest, whole: int) -> Scored:
        values = [-((one * 31 + whole) % 1000) / 1000 for one in (*request.prompt_ids[1:], *request.target_ids)]
        at = len(request.prompt_ids) - 1
        return Scored(prompt=tuple(values[:at]), target=tuple(values[at:]), kernel_calls={"digest": 1})


def load(**options: Any) -> DigestModel:
    """For the command line."""
    return DigestModel(**options)


def ask_suite(suite: Path, out: Path, model: DigestModel, **options: Any) -> tuple[int, str]:
    """Run a suite with this very model; exit code and output."""
    file = io.StringIO()
    values: dict[str, Any] = {"suite": str(suite), "model": "ours", "out": out}
    with mock.patch.object(runner, "load_model", return_value=model):
        code = runner.run_suite(runner.RunOptions(**(values | options)), Console(width=120, file=file))
    return code, file.getvalue()


def samples(path: Path) -> list[dict[str, Any]]:
    """All attempts of a run."""
    folder = RunFolder(path)
    return [record for task in folder.tasks() for record in folder.attempts(task)]


def scores(path: Path) -> dict[str, bytes]:
    """The contents of all files of scores."""
    return {file.name: file.read_bytes() for file in sorted((path / "scores").iterdir())}
