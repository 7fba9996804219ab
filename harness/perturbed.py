"""The perturbed oracle: how far an honest recurrence may drift, found by perturbing the recurrence itself.

The output of softmax attention is an average of values, which bounds its error. A recurrence has no such bound: what
one token rounds, all later tokens carry on. So the float64 recurrence is run again and again with noise at every place
where the contract lets a kernel round, and the spread of those runs is what an honest kernel may show.

A recurrence is a function of one argument, ``rounded(site, value)``, which it calls wherever a kernel may round, and
which returns what the kernel would go on with. Operands of a product get a site of their own: their sum may cancel, and
noise on the sum would then be too small. It returns its results by name: ``out`` with a row for each token, states,
checkpoints::

    def recurrence(rounded):
        for t in range(tokens):
            state = rounded("decay", g[t].exp())[:, :, None] * state
            ...
        return {"out": out, "final state": state}
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ._perturbed_noise import Both, Noise
from .contract import SUBNORMAL, UNIT_ROUNDOFF, Precision
from .gates import MEDIAN_RMS_LIMIT, ROW_RMS_LIMIT, chi_limit
from .record import GateResult, Location

Rounded: TypeAlias = Callable[[str, Tensor], Tensor]
Recurrence: TypeAlias = Callable[[Rounded], Mapping[str, Tensor]]
Runs: TypeAlias = Callable[[Rounded, int], Mapping[str, Tensor]]

FEWEST_RUNS = 16
ENVELOPE_SIGMAS = 6.0
SLOPE_SIGMAS = 6.0
# in roundoffs of a half-precision store, half of what one leaves that cuts: 1 / E[m] of mantissas m in [1, 2), as
# dense where they are small as 1 / m
BIAS_LIMIT = 0.5 * math.log(2)
BIAS_SIGMAS = 6.0
# in units of the predicted error: by how much the error may gain on the prediction from the first window to the last
SLOPE_LIMIT = 0.5
WINDOWS = 8
FEWEST_TOKENS_FOR_SLOPE = 8 * WINDOWS
FEWEST_ROWS_FOR_MEDIAN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One result of the recurrence and how honest kernels scatter around it, float64.

    Attributes:
        exact: Without noise, ``[..., D]``.
        noisy: The errors of the perturbed runs, ``[runs, ..., D]``.
        sigma: Their root mean square over the runs and the last axis, ``[..., 1]``; of the worst kind of runs.
        kinds: Of runs, as many of each, one after the other.
    """

    exact: Tensor
    noisy: Tensor
    sigma: Tensor
    kinds: int = 1

    def own(self) -> Tensor:
        """``[..., D]``, the root mean square of each element alone."""
        squares: Tensor = self.noisy.unflatten(0, (self.kinds, -1)).square().mean(1)
        return squares.amax(0).sqrt()

    def variance(self, u_out: float) -> Tensor:
        """``[...]``, of a row: the noise, and a uniform error of storing each element."""
        stored = u_out**2 / 3 * self.exact.square().sum(-1)
        return (self.exact.shape[-1] * self.sigma.square()[..., 0] + stored).clamp(min=1e-300)

    def freedom(self) -> Tensor:
        """Degrees of freedom of a row's squared error, pooled over rows; few where the noise of one scalar rules."""
        energy = self.noisy.square().sum(-1).unflatten(0, (self.kinds, -1)).flatten(2)
        scatter = []
        for kind in energy:
            moved = kind[:, kind.mean(0) > 0]
            if moved.numel():
                scatter.append((moved / moved.mean(0)).var(0).mean())
        if not scatter:
            return torch.tensor(1.0, dtype=torch.float64)
        return (2 / torch.stack(scatter).amax().clamp(min=1e-300)).clamp(min=1.0, max=float(self.exact.shape[-1]))


def perturbed_oracle(
    recurrence: Recurrence, sites: Mapping[str, Precision], *, runs: int = FEWEST_RUNS, seed: int = 0
) -> dict[str, Spread]:
    """Run a recurrence exactly, then with relative noise ``U[-u, u]`` at each of its sites.

    Args:
        recurrence: In float64.
        sites: The format to which a kernel may round at each site, as ``Contract.formats`` reads it off a contract:
            ``state`` for what is carried on, ``p`` for operands, ``inputs`` for what comes from outside.
        runs: Of the perturbed recurrence, at least 16.
        seed: Of the noise.

    Returns:
        The spread of each result.

    Raises:
        ValueError: If there are too few runs, or the sites are not those that the recurrence calls.
        TypeError: If a result is not float64.
    """
    if runs < FEWEST_RUNS:
        raise ValueError(f"runs must be at least {FEWEST_RUNS}, got {runs}")
    exact = _exact(recurrence, sites)
    errors: dict[str, list[Tensor]] = {name: [] for name in exact}
    for run in range(runs):
        result = recurrence(Noise(sites, seed=seed * runs + run))
        for name, value in exact.items():
            errors[name].append(result[name] - value)
    return {name: _spread(exact[name], torch.stack(errors[name])) for name in exact}


def perturbed_together(
    recurrence: Runs, sites: Mapping[str, Precision], *, runs: int = FEWEST_RUNS, seed: int = 0
) -> dict[str, Spread]:
    """The same for a recurrence that carries all runs at once, which takes about the time of one.

    There are two kinds of runs: with noise at every place, and with rounding itself, on another grid in each run.
    Errors of equal tokens are alike in a kernel that scales them alike, and independent in one that does not; an honest
    kernel may do as badly as the worse of both.

    Args:
        recurrence: Takes their number besides, and has them on the first axis of all that it rounds and returns.
        sites: As in ``perturbed_oracle``, like the arguments below.
        runs: Of each kind, at least 16.
        seed: Of the noise.

    Raises:
        ValueError: As ``perturbed_oracle``.
        TypeError: As ``perturbed_oracle``.
    """
    if runs < FEWEST_RUNS:
        raise ValueError(f"runs must be at least {FEWEST_RUNS}, got {runs}")
    exact = {name: value[0] for name, value in _exact(lambda rounded: recurrence(rounded, 1), sites).items()}
    noisy = recurrence(Both(sites, runs=runs, seed=seed), 2 * runs)
    return {name: _spread(value, noisy[name] - value, kinds=2) for name, value in exact.items()}


def _exact(recurrence: Recurrence, sites: Mapping[str, Precision]) -> dict[str, Tensor]:
    """The results without noise, if they are float64 and the sites are those of the recurrence."""
    visited: set[str] = set()

    def untouched(site: str, value: Tensor) -> Tensor:
        visited.add(site)
        return value

    exact = dict(recurrence(untouched))
    for name, value in exact.items():
        if value.dtype != torch.float64:
            raise TypeError(f"{name} must be float64, got {value.dtype}")
    # without tokens nothing is rounded
    if visited and visited != set(sites):
        called, given = ", ".join(sorted(visited)), ", ".join(sorted(sites))
        raise ValueError(f"sites must be those that the recurrence calls, {called or 'none'}, got {given or 'none'}")
    return exact


def _spread(exact: Tensor, noisy: Tensor, *, kinds: int = 1) -> Spread:
    """Sixteen runs alone would give each element a spread with heavy tails, so the last axis is pooled."""
    sigma = noisy.unflatten(0, (kinds, -1)).square().mean(1).mean(-1, keepdim=True).amax(0).sqrt()
    return Spread(exact=exact, noisy=noisy, sigma=sigma, kinds=kinds)


def perturbed_gates(
    answer: Mapping[str, Tensor],
    oracle: Mapping[str, Spread],
    *,
    stored: Mapping[str, Precision],
    sequences: Sequence[slice],
) -> list[GateResult]:
    """Hold a kernel's results against the perturbed oracle.

    Args:
        answer: The kernel's results, by name, in the shapes of the oracle's.
        oracle: Of ``perturbed_oracle``.
        stored: The format in which the kernel hands out each result, again read off its contract.
        sequences: Tokens of each sequence in ``out``, whose first axis is the token; its second one is the head.

    Returns:
        For each result G1, G4 for its elements, G5 for its rows, G6 for the bias of its store; for ``out`` the median
        of its rows and the slope of its error besides.
    """
    gates: list[GateResult | None] = []
    for name, spread in oracle.items():
        got = answer.get(name)
        if got is None or got.shape != spread.exact.shape:
            shape = "nothing" if got is None else str(tuple(got.shape))
            text = f"{name} must have shape {tuple(spread.exact.shape)}, got {shape}"
            gates.append(GateResult(gate=f"G0 {name}", ratio=math.inf, text=text))
            continue
        judged = _Judged(name=name, spread=spread, got=got.double(), precision=stored[name])
        gates += [judged.finite(), judged.envelope(), judged.row_rms(), judged.bias()]
        if name == "out":
            gates += [judged.median_rms(sequences), judged.slope(sequences)]
    return [gate for gate in gates if gate is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """One result of a kernel beside its spread."""

    name: str
    spread: Spread
    got: Tensor
    precision: Precision

    @property
    def error(self) -> Tensor:
        return self.got - self.spread.exact

    @property
    def u_out(self) -> float:
        return UNIT_ROUNDOFF[self.precision]

    @property
    def squares(self) -> Tensor:
        """Squared error of each row in units of the prediction, ``[...]``; without errors 0 even where none is due."""
        return self.error.square().sum(-1) / self.spread.variance(self.u_out)

    def finite(self) -> GateResult:
        bad = ~torch.isfinite(self.got)
        text = f"{int(bad.sum())} of {bad.numel()} elements of {self.name} are not finite" if bool(bad.any()) else ""
        return self._worst("G1", torch.where(bad, math.inf, 0.0), text)

    def envelope(self) -> GateResult:
        """Six standard deviations and the rounding of the result itself; the deviation at least one roundoff.

        The deviation is the pooled one, or the element's own if that is larger: elements of a state row differ in size.
        """
        rounding = self.u_out * self.spread.exact.abs()
        own = self.spread.own()
        sigma = torch.stack([self.spread.sigma.expand_as(own), own, rounding]).amax(0)
        limit = ENVELOPE_SIGMAS * sigma + rounding + SUBNORMAL[self.precision]
        return self._worst("G4 envelope", self.error.abs() / limit)

    def row_rms(self) -> GateResult:
        limit = chi_limit(self.spread.freedom()).clamp(min=ROW_RMS_LIMIT)
        return self._worst("G5 row rms", self.squares.sqrt() / limit, rows=True)

    def median_rms(self, sequences: Sequence[slice]) -> GateResult | None:
        """The rows of one sequence and head share their state, so only those groups are independent."""
        heads = math.prod(self.spread.exact.shape[1:-1])
        groups = heads * sum(part.stop > part.start for part in sequences)
        if self.squares.numel() < FEWEST_ROWS_FOR_MEDIAN:
            return None
        median = float(self.squares.sqrt().median())
        limit = float(chi_limit(self.spread.freedom() * groups).clamp(min=MEDIAN_RMS_LIMIT))
        ratio = math.inf if math.isnan(median) else median / limit
        text = f"median {median:.3f} of {self.squares.numel()} rows of {self.name}, limit {limit:.3f}"
        return GateResult(gate=f"G5 median rms {self.name}", ratio=ratio, text=text)

    def bias(self) -> GateResult | None:
        """How far errors of a half-precision result lean to zero or away from it, against those of perturbed runs."""
        if self.u_out < UNIT_ROUNDOFF["fp16"]:
            return None
        exact = self.spread.exact
        # what nothing perturbs is handed on, not stored anew; subnormal numbers have another roundoff
        counted = (self.spread.own() > 0) & (exact.abs() > SUBNORMAL[self.precision] / self.u_out)
        unit = self.u_out * float((exact.abs() * counted).sum())
        if unit == 0:
            return None
        outward = exact.sign() * counted
        honest = (self.spread.noisy * outward).flatten(1).sum(1).unflatten(0, (self.spread.kinds, -1)) / unit
        rounding = self.u_out * float((exact * counted).square().sum().div(3).sqrt()) / unit
        limit = BIAS_LIMIT + BIAS_SIGMAS * math.hypot(float(honest.square().mean(1).amax().sqrt()), rounding)
        found = float((self.error * outward).sum()) / unit
        ratio = abs(found) / limit if math.isfinite(found) else math.inf
        way = "away from" if found > 0 else "to"
        lean = f"{abs(found):.3f} roundoffs of {self.precision}, limit {limit:.3f}"
        text = f"errors of {self.name} lean {way} zero by {lean}"
        return GateResult(gate=f"G6 bias {self.name}", ratio=ratio, text=text)

    def slope(self, sequences: Sequence[slice]) -> GateResult | None:
        """How much the error gains on the prediction along the longest sequence, against the gain of perturbed runs."""
        longest = max(sequences, key=lambda part: part.stop - part.start, default=slice(0, 0))
        if longest.stop - longest.start < FEWEST_TOKENS_FOR_SLOPE:
            return None
        gain = float(_gain(self.squares[longest]))
        variance = self.spread.variance(0.0)
        honest = torch.stack([_gain((noisy.square().sum(-1) / variance)[longest]) for noisy in self.spread.noisy])
        limit = SLOPE_LIMIT + SLOPE_SIGMAS * float(honest.std())
        ratio = max(0.0, gain / limit) if math.isfinite(gain) else math.inf
        text = f"the error of {self.name} gains {gain:.3f} on the prediction along the sequence, limit {limit:.3f}"
        where = Location(token=longest.stop - 1)
        return GateResult(gate=f"G5 slope {self.name}", ratio=ratio, where=where, text=text)

    def _worst(self, gate: str, ratio: Tensor, text: str = "", *, rows: bool = False) -> GateResult:
        """The largest ratio with its place; a gate of whole rows points at the row's worst element."""
        name = f"{gate} {self.name}"
        flat = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).flatten()
        if not len(flat):
            return GateResult(gate=name, ratio=0.0)
        at = int(flat.argmax())
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape)]
        if rows:
            index.append(int(self.error[tuple(index)].abs().argmax()))
        where = Location(
            token=index[0] if self.name == "out" else None,
            request=None if self.name in ("out", "checkpoints") else index[0],
            position=index[0] if self.name == "checkpoints" else None,
            head=index[1] if len(index) > 2 else None,
            channel=index[2] if len(index) > 3 else None,
            dim=index[-1],
            got=float(self.got[tuple(index)]),
            expected=float(self.spread.exact[tuple(index)]),
        )
        found = GateResult(gate=name, ratio=float(flat[at]), where=where)
        return replace(found, text=text or f"{name}: {found.ratio:.3g} x its limit at {index}")


def _gain(squares: Tensor) -> Tensor:
    """Least-squares gain of the windowed root mean square of ``[tokens, ...]`` from the first window to the last."""
    windows = torch.stack([part.mean() for part in squares.tensor_split(WINDOWS)]).sqrt()
    place = torch.linspace(-0.5, 0.5, WINDOWS, dtype=windows.dtype, device=windows.device)
    return (windows * place).sum() / place.square().sum()
