"""Faults of ``mla_prefill`` in what is kept of a pass and how passes are merged."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ..record import Verdict
from . import planted
from ._chunked import NEVER, Pass, State, finish, merge, mla_prefill_twin, passes, softmax, store
from ._softmax import LOG2_E, base_2_lse

OP = "mla_prefill"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
LESS_PRECISE = (Verdict.NUMERIC, Verdict.PRECISION_DOWNGRADE)


def in_step(history: int, current: int, chunk: int, longest: int) -> list[Pass]:
    """Passes as a batched kernel makes them: as many as the longest history needs, the current tokens last.

    A request that has run out of history gets passes without keys, and one without history begins with several.
    """
    starts = [min(at, history) for at in range(0, longest + chunk, chunk)]
    chunks = [Pass(keys=slice(*bounds)) for bounds in itertools.pairwise(starts)]
    return [*chunks, *passes(history, current, chunk, longest)[:1]]


@planted(OP, NUMERIC, rows=("F2",))
def chunks_averaged(**arguments: Any) -> State:
    """Each chunk has its own softmax, and the results are averaged, whatever weight they hold."""

    def halves(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return (out_a.float() + out_b.float()) / 2, torch.logaddexp(lse_a, lse_b)

    return mla_prefill_twin(arguments, merge=halves)


@planted(OP, NUMERIC, rows=("F2",))
def chunks_added(**arguments: Any) -> State:
    """Each chunk has its own softmax, and the results are added."""

    def added(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return out_a.float() + out_b.float(), torch.logaddexp(lse_a, lse_b)

    return mla_prefill_twin(arguments, merge=added)


@planted(OP, NUMERIC, source="result of the last chunk stored over the others")
def last_chunk_replaces_all(**arguments: Any) -> State:
    """A later chunk overwrites what was there."""
    return mla_prefill_twin(arguments, merge=lambda out_a, lse_a, out_b, lse_b: (out_b.float(), lse_b))


@planted(OP, NUMERIC, source="operands of the merge exchanged on one side")
def merge_weights_swapped(**arguments: Any) -> State:
    """Each side gets the weight of the other."""

    def swapped(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return merge(out_a, lse_b, out_b, lse_a)

    return mla_prefill_twin(arguments, merge=swapped)


@planted(OP, NUMERIC, source="head stride of the log-sum-exp taken as 0")
def merge_weights_of_head_0(**arguments: Any) -> State:
    """All heads are merged with the weights of the first; the log-sum-exp is right."""

    def first_head(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        out, _ = merge(out_a, lse_a[:, :1].expand_as(lse_a), out_b, lse_b[:, :1].expand_as(lse_b))
        return out, torch.logaddexp(lse_a, lse_b)

    return mla_prefill_twin(arguments, merge=first_head)


@planted(OP, NUMERIC, source="log-sum-exp not updated by the merge")
def lse_of_first_pass_kept(**arguments: Any) -> State:
    """The output is merged, the log-sum-exp stays that of the current tokens: later weights are wrong."""
    return mla_prefill_twin(arguments, merge=lambda out_a, lse_a, *b: (merge(out_a, lse_a, *b)[0], lse_a))


@planted(OP, NUMERIC, source="maximum taken for the log of the sum")
def lse_becomes_the_larger(**arguments: Any) -> State:
    """The merged log-sum-exp is the larger of the two."""

    def larger(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return merge(out_a, lse_a, out_b, lse_b)[0], torch.maximum(lse_a, lse_b)

    return mla_prefill_twin(arguments, merge=larger)


@planted(OP, NUMERIC, rows=("FC-025", "F1"))
def base_2_lse_merged(**arguments: Any) -> State:
    """Partial results carry a log-sum-exp in base 2, the merge takes it for a natural one, and converts at the end."""

    def converted(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
        return finish(out, lse / LOG2_E, dtype)

    return mla_prefill_twin(arguments, softmax=base_2_lse, finish=converted)


@planted(OP, NUMERIC, rows=("F1",))
def base_2_lse_returned(**arguments: Any) -> State:
    """Merged right, returned in base 2."""
    return mla_prefill_twin(arguments, finish=lambda out, lse, dtype: finish(out, lse * LOG2_E, dtype))


@planted(OP, NUMERIC, rows=("FC-031",))
def partial_lse_stored_with_heads_first(**arguments: Any) -> State:
    """The log-sum-exp of a chunk is stored as ``[H, n]`` in a buffer that the merge reads as ``[n, H]``."""

    def reread(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return merge(out_a, lse_a, out_b, lse_b.T.contiguous().view(lse_b.shape))

    return mla_prefill_twin(arguments, merge=reread)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-038",))
def partial_lse_written_past_its_rows(**arguments: Any) -> State:
    """The buffer of partial log-sum-exps has rows wider than its heads; the writer takes them to be as wide."""

    def misplaced(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
        buffer = lse.new_zeros(lse.shape[0], lse.shape[1] + 1)
        buffer.view(-1)[: lse.numel()] = lse.flatten()
        return store(out, buffer[:, : lse.shape[1]], dtype)

    return mla_prefill_twin(arguments, store=misplaced)


@planted(OP, NONFINITE, NUMERIC, Verdict.NONDETERMINISTIC, rows=("FC-040",))
def partial_lse_never_written(**arguments: Any) -> State:
    """Chunks store no log-sum-exp; the merge reads what lies in the buffer."""

    def unread(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        return merge(out_a, lse_a, out_b, torch.empty_like(lse_b))

    return mla_prefill_twin(arguments, merge=unread)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-035",))
def partial_output_read_with_other_strides(**arguments: Any) -> State:
    """Partial outputs are views of wider rows; the merge reads them with the strides of the total."""

    def misread(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        wide = torch.nn.functional.pad(out_b, (0, 8))
        return merge(out_a, lse_a, wide.as_strided(out_b.shape, out_a.contiguous().stride()), lse_b)

    return mla_prefill_twin(arguments, merge=misread)


@planted(OP, NONFINITE, rows=("FC-027", "F7"))
def two_empty_parts_give_nan(**arguments: Any) -> State:
    """The merge subtracts the larger log-sum-exp with no guard for ``-inf``."""

    def unguarded(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        highest = torch.maximum(lse_a, lse_b)
        weight_a, weight_b = torch.exp(lse_a - highest)[..., None], torch.exp(lse_b - highest)[..., None]
        total = weight_a + weight_b
        return (weight_a * out_a.float() + weight_b * out_b.float()) / total, highest + torch.log(total[..., 0])

    return mla_prefill_twin(arguments, passes=in_step, merge=unguarded)


@planted(OP, NUMERIC, NONFINITE, rows=("FC-052", "F8"))
def empty_part_claims_infinite_lse(**arguments: Any) -> State:
    """A pass without keys reports ``+inf``, and the merge takes it at face value."""

    def library(scores: Tensor, v: Tensor) -> State:
        out, lse = softmax(scores, v)
        return out, torch.where(lse == NEVER, float("inf"), lse)

    return mla_prefill_twin(arguments, passes=in_step, softmax=library)


@planted(OP, NONFINITE, rows=("F9",))
def empty_part_holds_garbage(**arguments: Any) -> State:
    """A pass without keys leaves its output unwritten, and the merge weights it by 0 instead of leaving it out."""

    def unwritten(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
        return store(torch.where(lse[..., None] == NEVER, torch.nan, out), lse, dtype)

    def weighted(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        out, lse = merge(out_a, lse_a, out_b, lse_b)
        return out + 0.0 * (out_a.float() + out_b.float()), lse

    return mla_prefill_twin(arguments, passes=in_step, store=unwritten, merge=weighted)


@planted(OP, NUMERIC, rows=("FC-053",))
def empty_part_keeps_last_chunk(**arguments: Any) -> State:
    """A pass without keys stores nothing, and the merge finds the chunk before in the reused buffer."""
    kept: list[State] = []

    def reused(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
        empty = bool((lse == NEVER).all())
        fits = bool(kept) and kept[-1][0].shape == out.shape
        if not (empty and fits):
            kept.append(store(out, lse, dtype))
        return kept[-1]

    return mla_prefill_twin(arguments, passes=in_step, store=reused)


@planted(OP, *LESS_PRECISE, rows=("FC-003", "F10"))
def merged_output_in_input_dtype(**arguments: Any) -> State:
    """The running output is rounded after every merge."""

    def rounded(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        out, lse = merge(out_a, lse_a, out_b, lse_b)
        return out.to(out_b.dtype), lse

    return mla_prefill_twin(arguments, merge=rounded)


@planted(OP, NUMERIC, source="log-sum-exp kept in a half-precision buffer")
def partial_lse_in_input_dtype(**arguments: Any) -> State:
    """The log-sum-exp of each pass is rounded before the merge."""

    def rounded(out: Tensor, lse: Tensor, dtype: torch.dtype) -> State:
        return store(out, lse.to(dtype).float(), dtype)

    return mla_prefill_twin(arguments, store=rounded)


@planted(OP, NUMERIC, source="log-sum-exp handed out through a half-precision buffer")
def returned_lse_in_input_dtype(**arguments: Any) -> State:
    """Merged in float32, rounded when it is returned."""
    return mla_prefill_twin(arguments, finish=lambda out, lse, dtype: finish(out, lse.to(dtype).float(), dtype))


@planted(OP, NUMERIC, source="merge weights in half precision")
def merge_weights_in_input_dtype(**arguments: Any) -> State:
    """Both weights are rounded after they were normalised, so that they need not add up to 1."""

    def rounded(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> State:
        lse = torch.logaddexp(lse_a, lse_b)
        sides = ((out_a, lse_a), (out_b, lse_b))
        mixed = [torch.exp(part - lse).to(out_b.dtype).float()[..., None] * out.float() for out, part in sides]
        return mixed[0] + mixed[1], lse

    return mla_prefill_twin(arguments, merge=rounded)
