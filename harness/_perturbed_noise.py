"""What rounding does to a value of a recurrence, as noise or itself. Part of ``perturbed.py``."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .contract import UNIT_ROUNDOFF, Precision


class Noise:
    """Relative noise of the size of a rounding error, independent at every call."""

    def __init__(self, sites: Mapping[str, Precision], *, seed: int) -> None:
        """Nothing is drawn before the device of the values is known."""
        self._sites, self._seed = sites, seed
        self._generator: torch.Generator | None = None

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value as a kernel may go on with it."""
        u = UNIT_ROUNDOFF[self._sites[site]]
        if self._generator is None:
            self._generator = torch.Generator(value.device).manual_seed(self._seed)
        noise = torch.rand(value.shape, generator=self._generator, dtype=torch.float64, device=value.device)
        return value * (1 + u * (2 * noise - 1))


class Grids:
    """Rounding itself, on another grid in each run: equal values err alike, as they do in a kernel, whatever the run.

    A value is scaled by a factor in [1, 2), the same for a run and a site, rounded to the format, and scaled back.
    """

    def __init__(self, sites: Mapping[str, Precision], *, runs: int, seed: int) -> None:
        """Draw the grids of all sites."""
        generator = torch.Generator().manual_seed(seed)
        self._sites = sites
        self._factors = {
            site: torch.exp2(torch.rand(runs, generator=generator, dtype=torch.float64)) for site in sorted(sites)
        }

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value of every run, ``[runs, ...]``, rounded."""
        u = UNIT_ROUNDOFF[self._sites[site]]
        if u <= UNIT_ROUNDOFF["fp64"]:
            return value
        # moved once: there are tens of calls a token
        moved = self._factors[site] = self._factors[site].to(value.device)
        factor = moved.view(-1, *[1] * (value.dim() - 1))
        # Dekker and Veltkamp: what is left of a number that something 1 / u times as large has been added to
        scaled = value * factor
        large = scaled * (1.0 + UNIT_ROUNDOFF["fp64"] ** -1 * u)
        return (large - (large - scaled)) / factor


class Both:
    """Noise in the first half of the runs, grids in the second."""

    def __init__(self, sites: Mapping[str, Precision], *, runs: int, seed: int) -> None:
        """As many runs of each."""
        self._noise, self._grids, self._runs = Noise(sites, seed=seed), Grids(sites, runs=runs, seed=seed), runs

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value of every run, ``[2 runs, ...]``."""
        return torch.cat([self._noise(site, value[: self._runs]), self._grids(site, value[self._runs :])])
