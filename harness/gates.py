"""The gates: how far an honest kernel may be from the oracle, derived from its contract by error analysis.

G1 non-finite values, G3 exact families, G4 hard envelope of every element, G5 root mean square of a row, G6 scale of a
row and of pooled rows, and the log-sum-exp. The formulas and their derivation are in docs/method.md.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._gates_bounds import SINGLE, Roundoffs, Variances, chi_limit, hard_envelope, lse_limit, max_logits_limit
from .answers import SMALL_ANSWER
from .companions import Companions, companions
from .contract import Contract
from .families import EXACT_FAMILIES
from .operation import AttentionOutline, Rows
from .record import GateResult, Location, RowErrors
from .strata import ScaleRows, pooled_scale

ROW_RMS_LIMIT = 1.6
MEDIAN_RMS_LIMIT = 1.1
FEWEST_KEYS_FOR_RMS = 4
FEWEST_ROWS_FOR_MEDIAN = 8
ROWS_KEPT = 1024
# relative noise of float64 sums, and of a sink in float32: both round away in half precision
NOISE, SINK_NOISE = 2.0**-40, 2.0**-20
SCALE_ROW_SIGMAS = 7.0

Block = TypeVar("Block", Rows, Companions)

__all__ = [
    "MEDIAN_RMS_LIMIT",
    "ROW_RMS_LIMIT",
    "Roundoffs",
    "Tally",
    "Variances",
    "chi_limit",
    "exact_elements",
    "hard_envelope",
    "judge",
    "judge_answers",
    "lse_limit",
    "max_logits_limit",
    "nonfinite_gates",
    "oracle_answers",
]


def nonfinite_gates(
    out: Tensor, lse: Tensor, outline: AttentionOutline, max_logits: Tensor | None = None
) -> list[GateResult]:
    """G1 over all elements: finite, but ``(0, -inf)`` in rows that see no key and NaN in rows that see one.

    Columns of values that are NaN or infinite at a visible key are so in the output; the log-sum-exp is finite there.
    The highest logit is ``-inf`` without a key, and anything if one is NaN: maxima of hardware drop it, others keep it.
    """
    empty = outline.empty_rows.to(out.device)
    undefined = torch.zeros_like(empty) if outline.nan_rows is None else outline.nan_rows.to(out.device)
    bad_out = torch.where(undefined[:, None, None], ~out.isnan(), ~torch.isfinite(out))
    bad_out = bad_out | (empty[:, None, None] & (out != 0))
    for column in outline.undefined_columns:
        place = column.rows.to(out.device), column.heads, column.dim
        bad_out[place] = ~out[place].isnan() if math.isnan(column.value) else out[place] != column.value
    bad_lse = torch.where(empty[:, None], lse != float("-inf"), ~torch.isfinite(lse))
    bad_lse = torch.where(undefined[:, None], ~lse.isnan(), bad_lse)
    results, judged = [], [("out", bad_out, out), ("lse", bad_lse, lse)]
    if max_logits is not None:
        bad = torch.where(empty[:, None], max_logits != float("-inf"), ~torch.isfinite(max_logits))
        judged.append(("max_logits", bad & ~undefined[:, None], max_logits))
    for name, bad, values in judged:
        where = None
        if bool(bad.any()):
            index = [int(i) for i in bad.nonzero()[0]]
            is_empty = bool(empty[index[0]]) and not bool(undefined[index[0]])
            where = Location(
                request=int(outline.requests[index[0]]),
                token=index[0],
                head=index[1],
                dim=index[2] if name == "out" else None,
                got=float(values[tuple(index)]),
                expected=(0.0 if name == "out" else -math.inf) if is_empty else _undefined(outline, index),
            )
        text = f"{int(bad.sum())} of {bad.numel()} elements of {name}"
        results.append(GateResult(gate=f"G1 {name}", ratio=math.inf if where else 0.0, where=where, text=text))
    return results


def _undefined(outline: AttentionOutline, index: list[int]) -> float | None:
    """The infinity or NaN that an element must be; None if it must be finite, which is no one number."""
    for column in outline.undefined_columns:
        if index[2:] == [column.dim] and column.rows[index[0]] and column.heads.start <= index[1] < column.heads.stop:
            return column.value
    return math.nan if outline.nan_rows is not None and bool(outline.nan_rows[index[0]]) else None


def exact_elements(c: Companions, rows: Rows, u: Roundoffs, out_dtype: torch.dtype, family: str) -> Tensor:
    """G3, ``[n, h, Dv]``: elements of an exact family that every honest kernel gives bit for bit.

    One-hot rows, unless their key is listed another number of times than ``2^k``. Uniform rows where the row, and each
    stretch that is stored before a merge, has ``2^k`` visible keys (so that normalised weights are exact, too), and its
    mean is representable and not 0, so that float32 noise rounds away, and no sum is larger than its accumulator
    counts. Where it is not known which stretches are stored in half precision, rows of one or two keys alone. A sink
    must leave nothing of the weight, or a power of two. Outputs in float32 are compared after rounding to bfloat16, for
    the same reason.
    """
    shared = _shared_evenly(c.share)
    if family == "exact-one-hot":
        # where the key is listed several times each copy has a part, which a kernel may round
        part = torch.exp(c.max_logits - c.lse)
        return ((c.visible > 0) & shared & _shared_evenly(part))[..., None].expand_as(c.out)
    # an accumulator of half precision counts no further than 1 / u
    counted = c.value_max * c.visible <= 1 / u.pv_acc
    noise = torch.where(c.share == 1, NOISE, SINK_NOISE)[..., None]
    whole = _representable(c.out, out_dtype, noise) & (c.out != 0) & (counted & shared)[..., None]
    if u.anywhere:
        known = c.visible <= (2.0 if u.split > SINGLE else math.inf)
        return whole & (known & _power_of_two(c.visible.long()))[..., None]
    stored = _representable(c.split_means, out_dtype, NOISE).all(dim=2)
    return whole & stored & _power_of_two_stretches(rows)[:, None, None]


def _representable(values: Tensor, dtype: torch.dtype, noise: float | Tensor) -> Tensor:
    """Whether a dtype holds the values, up to a relative noise."""
    return (values - values.to(dtype).double()).abs() <= noise * values.abs()


def _shared_evenly(share: Tensor) -> Tensor:
    """Whether a share of the weight is nothing or a power of two, which multiplies without rounding."""
    near = torch.exp2(share.clamp(min=1e-300).log2().round())
    return (share == 0) | ((share - near).abs() <= SINK_NOISE * near)


def _power_of_two_stretches(rows: Rows) -> Tensor:
    """``[n]``: whether each stretch between merges shows ``2^k`` keys or none, and so does the whole row."""
    starts, ends = [0, *rows.split_ends[:-1]], rows.split_ends or (int(rows.last_key.max()) + 1,)
    seen = [_seen_between(rows, start, end) for start, end in zip(starts, ends, strict=True)]
    whole = _power_of_two(torch.stack(seen).sum(dim=0))
    return torch.stack([(count == 0) | _power_of_two(count) for count in seen]).all(dim=0) & whole


def _seen_between(rows: Rows, start: int, end: int) -> Tensor:
    """``[n]``: how many of the keys ``start .. end - 1`` each query sees."""
    if rows.selected is None:
        return (rows.last_key + 1).clamp(min=start, max=end) - start
    part = rows.selected[:, start:end]
    behind = torch.arange(start, start + part.shape[1], device=part.device) > rows.last_key[:, None]
    return part.masked_fill(behind, False).sum(dim=1)


def _power_of_two(count: Tensor) -> Tensor:
    return (count > 0) & ((count & (count - 1)) == 0)


class Tally:
    """Worst ratio of each gate over the blocks of rows, and what the pooled statistics need."""

    def __init__(self, contract: Contract, family: str) -> None:
        """Judge under ``contract``; ``family`` decides whether elements are exact."""
        self._contract, self._family = contract, family
        self._worst: dict[str, GateResult] = {}
        self._rms: list[Tensor] = []
        self._freedom: list[Tensor] = []
        # rows of one request and head share their keys and values, so only groups are independent
        self._groups = 0
        self._scale: list[ScaleRows] = []
        self._row_errors: list[dict[str, Tensor]] = []
        self.rows_judged = 0

    def add(self, rows: Rows, c: Companions, out: Tensor, lse: Tensor, max_logits: Tensor | None = None) -> None:
        """Judge one block; ``out`` is ``[T, H, Dv]``, the others ``[T, H]``: the kernel's whole answer."""
        u = Roundoffs.of(self._contract, rows)
        got = out[rows.tokens][:, rows.heads].to(c.out.device).double()
        got_lse = lse[rows.tokens][:, rows.heads].to(c.out.device).double()
        error = got - c.out
        self.rows_judged += c.lse.numel()

        if self._family in EXACT_FAMILIES:
            dtype = out.dtype if out.dtype in (torch.float16, torch.bfloat16) else torch.bfloat16
            exact = exact_elements(c, rows, u, dtype, self._family)
            wrong = exact & (got.to(dtype) != c.out.to(dtype))
            self._keep("G3 exact", torch.where(wrong, math.inf, 0.0), rows, got, c.out)
        over_envelope = error.abs() / hard_envelope(c, u)
        self._keep("G4 envelope", over_envelope, rows, got, c.out)

        seen = c.visible > 0
        lse_error = torch.where(seen, (got_lse - c.lse).abs(), 0.0)
        self._keep("G6 lse", lse_error / lse_limit(c, u), rows, got_lse, c.lse)
        if max_logits is not None:
            highest = max_logits[rows.tokens][:, rows.heads].to(c.out.device).double()
            error_of_highest = torch.where(seen, (highest - c.max_logits).abs(), 0.0)
            self._keep("G6 max logits", error_of_highest / max_logits_limit(c, u), rows, highest, c.max_logits)

        variances, scale = Variances.of(c, u), ScaleRows.of(c, u, rows, got)
        rms, freedom = (error.square().sum(-1) / variances.total).sqrt(), variances.freedom(c, u)
        self._remember(rows, envelope=over_envelope.amax(-1), rms=rms, alpha=scale.alpha.view_as(rms))
        if self._family in EXACT_FAMILIES:
            # equal rows in every head and request: no statistic applies, and none is needed
            return
        # where a sink leaves nothing there is nothing to round
        diffuse = seen & (c.n_eff >= FEWEST_KEYS_FOR_RMS) & (c.share > 0)
        self._rms.append(rms[diffuse].cpu())
        self._freedom.append(freedom[diffuse].cpu())
        self._groups += int(diffuse.any(dim=0).sum())
        ratio = torch.where(diffuse, rms / chi_limit(freedom).clamp(min=ROW_RMS_LIMIT), 0.0)
        self._keep("G5 row rms", ratio, rows, got, c.out, error=error)

        self._scale.append(scale)
        self._keep("G6 row scale", scale.ratio(SCALE_ROW_SIGMAS).view_as(rms), rows, got, c.out, error=error)

    def results(self) -> list[GateResult]:
        """All gates, the pooled ones included."""
        results = list(self._worst.values())
        rms = torch.cat(self._rms) if self._rms else torch.empty(0)
        if len(rms) >= FEWEST_ROWS_FOR_MEDIAN:
            median, freedom = rms.median(), torch.cat(self._freedom).median() * self._groups
            limit = float(chi_limit(freedom).clamp(min=MEDIAN_RMS_LIMIT))
            text = f"median {float(median):.3f} of {len(rms)} rows, limit {limit:.3f}"
            results.append(GateResult(gate="G5 median rms", ratio=float(median) / limit, text=text))
        results += pooled_scale(self._scale, self._contract)
        return results

    @property
    def median_rms(self) -> float | None:
        """Median over the rows of G5 in units of what the contract predicts; None where there are too few rows."""
        rms = torch.cat(self._rms) if self._rms else torch.empty(0)
        return float(rms.median()) if len(rms) >= FEWEST_ROWS_FOR_MEDIAN else None

    def row_errors(self) -> RowErrors:
        """The worst rows by G4, at most ``ROWS_KEPT``, for reports."""
        if not self._row_errors:
            return RowErrors()
        columns = {name: torch.cat([part[name] for part in self._row_errors]) for name in self._row_errors[0]}
        order = columns["envelope"].nan_to_num(nan=math.inf).argsort(descending=True)[:ROWS_KEPT].cpu()
        return RowErrors(**{name: _short(column.cpu()[order].tolist()) for name, column in columns.items()})

    def _remember(self, rows: Rows, **errors: Tensor) -> None:
        """Keep the errors of a block, ``[n, h]`` each, beside the place of each row."""
        shape = errors["rms"].shape
        places = {"token": rows.tokens[:, None], "head": rows.heads[None, :], "position": rows.positions[:, None]}
        kept = {name: place.to(errors["rms"].device).expand(shape) for name, place in places.items()}
        kept |= errors
        self._row_errors.append({name: column.flatten().cpu() for name, column in kept.items()})

    def _keep(
        self, gate: str, ratio: Tensor, rows: Rows, got: Tensor, expected: Tensor, error: Tensor | None = None
    ) -> None:
        """Remember the largest ratio with its place; a gate of whole rows points at the row's worst element."""
        flat = torch.nan_to_num(ratio, nan=math.inf, posinf=math.inf).flatten()
        if not len(flat):
            return
        at = int(flat.argmax())
        worst = float(flat[at])
        if gate in self._worst and self._worst[gate].ratio >= worst:
            return
        index = [int(i) for i in torch.unravel_index(torch.tensor(at), ratio.shape)]
        if error is not None:
            index.append(int(error[index[0], index[1]].abs().argmax()))
        position = int(rows.positions[index[0]])
        where = Location(
            request=rows.request,
            token=int(rows.tokens[index[0]]),
            position=position,
            head=int(rows.heads[index[1]]),
            dim=index[2] if len(index) > 2 else None,
            slot=None if rows.slots is None else int(rows.slots[position]),
            got=float(got[tuple(index)]),
            expected=float(expected[tuple(index)]),
        )
        self._worst[gate] = GateResult(gate=gate, ratio=worst, where=where)


def _short(values: list[Any]) -> list[Any]:
    """As many digits as a picture shows; integers as they are."""
    return [value if isinstance(value, int) else float(f"{value:.4g}") for value in values]


def judge(
    out: Tensor,
    lse: Tensor,
    blocks: Iterable[Rows],
    *,
    contract: Contract,
    family: str,
    max_logits: Tensor | None = None,
) -> Tally:
    """Hold a kernel's answer against the oracle's rows.

    Args:
        out: ``[T, H, Dv]``.
        lse: ``[T, H]``, natural log.
        blocks: The rows, in float64.
        contract: What the kernel promised.
        family: Of the case.
        max_logits: ``[T, H]``, where the operation asks for them.
    """
    answers = oracle_answers(blocks, absorbed=contract.absorbed)
    return judge_answers(out, lse, answers, contract=contract, family=family, max_logits=max_logits)


def judge_answers(
    out: Tensor,
    lse: Tensor,
    answers: Iterable[tuple[Rows, Companions]],
    *,
    contract: Contract,
    family: str,
    max_logits: Tensor | None = None,
) -> Tally:
    """The same against rows whose companions are known already; they are those of an absorbing kernel if it is one."""
    tally = Tally(contract, family)
    for rows, c in answers:
        tally.add(rows, c, out, lse, max_logits)
    return tally


def oracle_answers(blocks: Iterable[Rows], *, absorbed: bool = False) -> Iterator[tuple[Rows, Companions]]:
    """The companions of each block; its large tensors are dropped, for no gate reads them again.

    A small answer moves to the CPU: the gates take many steps, each of which a device would take longer to begin.

    Args:
        blocks: The rows.
        absorbed: Whether for kernels that absorb the projection of keys and values.
    """
    for rows in blocks:
        small = replace(rows, q=rows.q[:0], k=rows.k[:0], v=rows.v[:0], k_terms=None, v_terms=None, latent=None)
        answer = companions(rows, absorbed=absorbed)
        yield (small, answer) if answer.out.numel() > SMALL_ANSWER else (_on_cpu(small), _on_cpu(answer))


def _on_cpu(tensors: Block) -> Block:
    values = {field.name: getattr(tensors, field.name) for field in fields(tensors)}
    moved: dict[str, Any] = {name: value.cpu() for name, value in values.items() if isinstance(value, Tensor)}
    return replace(tensors, **moved)
