"""The fused kernels for the models, interpreted: bfloat16 is rounded as on a GPU, products are exact."""

from typing import Any

import pytest
import torch
from kda_bounds import TOKENS, call, relative_errors
from kda_inputs import kda_inputs

from assay.optimized import _kda_chunks

# entries above the diagonal may overflow, and are left out by selection
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

MODEL: dict[str, Any] = {"heads": (1, 1), "dims": (128, 128), "dtype": torch.bfloat16}

# output and state, root mean square relative to the oracle's: what was measured of this design on a GPU, the bar.
# The last is beyond what products in bfloat16 can do: one key with alternating sign cancels all that a chunk writes.
ERRORS = {
    "normal": (3.5e-3, 1.3e-3),
    "slow": (4.3e-3, 3.3e-3),
    "u01": (3.7e-3, 5.0e-3),
    "runs": (4.1e-3, 2.8e-3),
    "fast": (3.8e-3, 2.7e-3),
    "alternating": (1.8e-2, 3.2e-2),
}


@pytest.mark.parametrize("family", ERRORS)
def test_errors_stay_below_the_bar(family: str) -> None:
    lengths = [70, 0, 129, 1] if family == "normal" else [128]
    given = kda_inputs(lengths, family=family, **MODEL) | {"checkpoints": torch.tensor([[0, 64]])}
    out, final, kept = call(given, "flash")
    errors = relative_errors(given, (out, final, kept))
    assert errors[0] <= ERRORS[family][0]
    assert errors[1] <= ERRORS[family][1]
    assert errors[2] <= max(ERRORS[family])
    if family == "normal":
        assert torch.equal(final[1], given["initial_state"][1])


def test_segments_in_bfloat16_states_and_no_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_kda_chunks, "FEWEST_CHUNKS", 1)
    given = kda_inputs([250, 3], family="slow", state_dtype=torch.bfloat16, seed=2, **MODEL)
    given |= {"A_log": None, "dt_bias": None}
    whole = call(given, "flash")
    cuts = []
    lay_out = _kda_chunks.lay_out

    def seen(*args: Any, **options: Any) -> _kda_chunks.Chunks:
        cuts.append(lay_out(*args, **options | {"processors": 16}))
        return cuts[-1]

    monkeypatch.setattr("assay.optimized._kda_plan.lay_out", seen)
    parted = call(given, "flash")
    assert cuts[0].num_segments >= 4
    for answer in (whole, parted):
        errors = relative_errors(given, answer)
        assert errors[0] <= ERRORS["slow"][0]
        assert errors[1] <= ERRORS["slow"][1]


def test_the_past_and_the_next_sequence_do_not_meet() -> None:
    given = kda_inputs([40, 30], seed=3, **MODEL)
    out, final, _ = call(given, "flash")
    for name in ("k", "g"):
        changed = given[name].clone()
        changed[33:40] += 1.0
        assert torch.equal(call(given | {name: changed}, "flash")[0][:33], out[:33])
    for name in TOKENS:
        given[name][40:] = torch.nan
    poisoned, states, _ = call(given, "flash")
    assert torch.equal(poisoned[:40], out[:40])
    assert torch.equal(states[0], final[0])
    assert poisoned[40:].isnan().all()


def test_grouped_heads_and_views_are_read_in_place() -> None:
    given = kda_inputs([20], seed=4, **MODEL | {"heads": (1, 2)}, tail=1)
    expected = call(given, "flash")
    rows = torch.full((21, 128 * 6 + 2 * 8 + 2), torch.nan, dtype=torch.bfloat16)
    widths = [given[name][0].numel() for name in TOKENS]
    for name, part in zip(TOKENS, rows[:, 8 : 8 + sum(widths)].split(widths, dim=1), strict=True):
        part.copy_(given[name].flatten(1))
        given[name] = part.unflatten(1, given[name].shape[1:])
    got = call(given, "flash", shape={"state_layout": "VK"}, initial_state=given["initial_state"].mT.contiguous())
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].mT, expected[1])
    assert relative_errors(given, expected)[0] <= ERRORS["normal"][0]


def test_rows_past_two_to_the_31st_element() -> None:
    """Tokens 2^27 elements apart, in memory that is reserved and hardly touched: 5 GiB by address, 20 pages by use."""
    given = kda_inputs([20], seed=9, **MODEL)
    expected = call(given, "flash")
    rows, start, views = torch.empty(20, 2**27, dtype=torch.bfloat16), 0, dict[str, Any]()
    for name in (*TOKENS, "out"):
        like = given["v"] if name == "out" else given[name]
        width = like[0].numel()
        views[name] = rows[:, start : start + width].unflatten(1, like.shape[1:])
        views[name].copy_(like)
        start += -(-width // 8) * 8
    got = call(given | views, "flash", out=views.pop("out"))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
