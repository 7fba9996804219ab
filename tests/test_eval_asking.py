"""What is asked at once, and which kernels must have served it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_models import SUITE, DigestModel, ask_suite, samples

from assay.eval.exit_code import ExitCode
from assay.eval.models.interface import Generated


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SUITE.format(asking=""))
    return path


@pytest.mark.parametrize(
    ("ids", "calls", "error"),
    [
        ((1,), {"prefill/a": 1}, None),
        ((1,), {"prefill/a": 1, "decode/b": 1}, "decode must be served by decode/a alone, got decode/b 1 times"),
        ((1, 2), {"prefill/a": 1}, "decode must be served by decode/a alone, got no call"),
        ((1, 2), {"prefill/a": 1, "decode/a": 1}, None),
        ((1,), {"decode/a": 1}, "prefill must be served by prefill/a alone, got no call"),
    ],
)
def test_an_answer_of_one_token_needs_no_decoding(
    suite: Path, tmp_path: Path, ids: tuple[int, ...], calls: dict[str, int], error: str | None
) -> None:
    class Counting(DigestModel):
        def _answer(self, text: str, whole: int) -> Any:
            return Generated(text="1", ids=ids, finish_reason="stop", kernel_calls=calls)

        def _score(self, request: Any, whole: int) -> Any:
            return replace(super()._score(request, whole), kernel_calls={})

    code, _ = ask_suite(suite, tmp_path / "run", Counting(), kernels=("prefill/a", "decode/a"))
    assert {record["error"] for record in samples(tmp_path / "run")} == {error}
    assert code == (ExitCode.PASSED if error is None else ExitCode.FAILURES)


def test_half_a_letter_in_an_answer_is_written_as_one_that_is_missing(suite: Path, tmp_path: Path) -> None:
    class Halving(DigestModel):
        def _answer(self, text: str, whole: int) -> Any:
            return Generated(text="1 \ud83d\ude00 \ud83d", ids=(1, 2), finish_reason="stop")

    code, _ = ask_suite(suite, tmp_path / "run", Halving())
    assert code == ExitCode.PASSED
    assert {record["output_text"] for record in samples(tmp_path / "run")} == {"1 \U0001f600 \ufffd"}
