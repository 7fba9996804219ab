"""A run compared beside its own repetition: that it is one, and that both differences are of the same samples."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eval_runs import Record, answer, failure, flipped, suite_of, write_arm

from assay.eval.arms import NotComparableError
from assay.eval.compare import compare
from assay.eval.comparison import Noise


def noise(tmp_path: Path, repeated: list[Record], **fields: Any) -> Noise:
    """Of 40 questions, of which the second run answers the last ten wrong."""
    runs = {
        "old": [answer("gsm8k_cot", at) for at in range(40)],
        "new": [answer("gsm8k_cot", at, float(at < 30)) for at in range(40)],
        "again": repeated,
    }
    old, new, again = (write_arm(tmp_path / name, records, **fields) for name, records in runs.items())
    found = compare([old, new], again).pairs[0].noise
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": {"name": "made up", "form": "new"}}, 'again must repeat old: model.form: nothing against "new"'),
        ({"factors": {"kernel": "new"}}, 'again must repeat old: factors.kernel: "old" against "new"'),
        ({"settings": {"kernels": ["prefill/new"]}}, 'again must repeat old: kernels: [] against ["prefill/new"]'),
    ],
)
def test_another_model_or_kernel_is_no_repetition(tmp_path: Path, fields: Record, reason: str) -> None:
    old, new = (flipped(tmp_path / name, 40, (), factors={"kernel": name}) for name in ("old", "new"))
    again = flipped(tmp_path / "again", 40, (), **({"factors": {"kernel": "old"}} | fields))
    with pytest.raises(NotComparableError) as refused:
        compare([old, new], again)
    assert refused.value.reasons == [reason]


def test_both_differences_are_of_what_all_three_answered(tmp_path: Path) -> None:
    # the repetition answers the last 20 alone, of which the second run has ten wrong
    repeated = [failure("gsm8k_cot", at) for at in range(20)] + [answer("gsm8k_cot", at) for at in range(20, 40)]
    found = noise(tmp_path, repeated)
    assert found.n == 20
    assert found.changed == (0.0, 0.5)
    assert found.identical == (1.0, 0.5)
    whole = noise(tmp_path / "whole", [answer("gsm8k_cot", at) for at in range(40)])
    assert (whole.n, whole.changed) == (40, (0.0, 0.25))


def test_a_task_that_the_repetition_failed_is_left_out(tmp_path: Path) -> None:
    suite = suite_of(("gsm8k_cot", "qasper"))
    tasks = ("gsm8k_cot", "qasper")
    records = [answer(task, at) for task in tasks for at in range(10)]
    repeated = [answer("gsm8k_cot", at) for at in range(10)] + [failure("qasper", at) for at in range(10)]
    runs = {"old": records, "new": records, "again": repeated}
    old, new, again = (write_arm(tmp_path / name, one, suite=suite) for name, one in runs.items())
    comparison = compare([old, new], again)
    assert comparison.pairs[0].noise is not None
    assert (comparison.pairs[0].noise.n, comparison.pairs[0].noise.changed) == (10, (0.0, 0.0))
    # its failures are seen beside those of the runs
    assert comparison.arms["again"]["counts"] == {"ok": 10, "error": 10}


def test_nothing_is_said_where_the_repetition_answered_nothing(tmp_path: Path) -> None:
    found = noise(tmp_path, [failure("gsm8k_cot", at) for at in range(40)])
    assert found == replace(found, n=0, changed=None, identical=None, nll=None, probes=[])
