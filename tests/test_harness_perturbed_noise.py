"""The two kinds of noise of the perturbed oracle, and runs that go side by side."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from assay.harness._perturbed_noise import Grids
from assay.harness.contract import UNIT_ROUNDOFF, Precision
from assay.harness.perturbed import Rounded, perturbed_oracle, perturbed_together


@pytest.mark.parametrize("precision", ["bf16", "fp16", "tf32", "fp32"])
def test_a_grid_rounds_to_the_format_wherever_the_grid_lies(precision: Precision) -> None:
    u, value = UNIT_ROUNDOFF[precision], torch.linspace(-3, 3, 3001, dtype=torch.float64).expand(16, -1)
    grids = Grids({"x": precision}, runs=16, seed=2)
    got = grids("x", value)
    error = ((got - value) / value.abs().clamp(min=1e-300)).abs()
    assert 0.9 * u < float(error.max()) <= u
    # of a uniform error that is relative to the power of two below, on average over the binade
    assert float(error.square().mean().sqrt()) == pytest.approx(u / math.sqrt(6), rel=0.1)
    # the sign of a value changes nothing, equal values err alike, and runs do not
    assert torch.equal(got, -grids("x", -value))
    assert len({float(row[700]) for row in got}) == 16


def test_a_format_as_fine_as_float64_rounds_nothing() -> None:
    value = torch.randn(16, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert Grids({"x": "fp64"}, runs=16, seed=0)("x", value) is value


def test_runs_together_spread_like_runs_one_by_one_where_errors_are_independent() -> None:
    x = torch.rand(8, 1, 4096, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1

    def alone(rounded: Rounded) -> dict[str, Tensor]:
        return {"out": rounded("x", x)}

    def together(rounded: Rounded, runs: int) -> dict[str, Tensor]:
        return {"out": rounded("x", x.expand(runs, *x.shape))}

    once, both = perturbed_oracle(alone, {"x": "bf16"})["out"], perturbed_together(together, {"x": "bf16"})["out"]
    assert both.noisy.shape == (32, 8, 1, 4096)
    assert both.kinds == 2
    assert torch.equal(both.exact, once.exact)
    torch.testing.assert_close(both.sigma, once.sigma, rtol=0.03, atol=0)


def test_the_worse_kind_of_runs_counts() -> None:
    """Of equal values: in sums errors that are alike add up, in differences independent ones do."""
    x = torch.ones(4, 1, 64, dtype=torch.float64)

    def summed(sign: float) -> Callable[[Rounded, int], dict[str, Tensor]]:
        def run(rounded: Rounded, runs: int) -> dict[str, Tensor]:
            total = torch.zeros(runs, *x.shape, dtype=torch.float64)
            for step in range(64):
                total = total + sign**step * rounded("x", x.expand(runs, *x.shape))
            return {"out": total}

        return run

    alike = perturbed_together(summed(1.0), {"x": "bf16"}, runs=64)["out"].sigma
    apart = perturbed_together(summed(-1.0), {"x": "bf16"}, runs=64)["out"].sigma
    # 64 times an error of 1 on a grid of its own, whose mean square is a sixth; 8 times an independent one
    assert float(alike[0]) == pytest.approx(64 * 2.0**-8 / math.sqrt(6), rel=0.2)
    assert float(apart[0]) == pytest.approx(8 * 2.0**-8 / math.sqrt(3), rel=0.05)
    with pytest.raises(ValueError, match="runs must be at least 16, got 3"):
        perturbed_together(summed(1.0), {"x": "bf16"}, runs=3)
