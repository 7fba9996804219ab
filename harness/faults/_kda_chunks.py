"""Faults of ``kda`` within chunks: inverses, anchors of exponents, tails, the precision of what is carried on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..plugin import kernel
from ..record import Verdict
from . import planted
from ._kda_twin import Answer, bfloat16, chunk_step, kda_twin
from ._kda_variants import brain, single, weighted_step

OP = "kda"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
METAMORPHIC, NONDETERMINISTIC = Verdict.METAMORPHIC, Verdict.NONDETERMINISTIC


def _inverting(arguments: dict[str, Any], invert: Callable[[Tensor], Tensor], chunk: int = 16) -> Answer:
    return kda_twin(arguments, chunk=chunk, step=lambda *tokens: chunk_step(*tokens, invert=invert))


def _identity(gram: Tensor) -> Tensor:
    return torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device).expand_as(gram)


@planted(OP, NUMERIC, NONFINITE, source="FlashKDA: Neumann doubling in float16")
@kernel(contract=brain)
def doubling_in_float16(**arguments: Any) -> Answer:
    """The inverse by powers of the triangle, whose entries cancel, in float16."""

    def invert(gram: Tensor) -> Tensor:
        power = gram.half()
        found = _identity(gram).half() - power
        for _ in range(3):
            power = (power.float() @ power.float()).half()
            found = (found.float() + (found.float() @ power.float()).half().float()).half()
        return found.float()

    return _inverting(arguments, invert)


@planted(OP, NUMERIC, NONFINITE, source="Neumann doubling with bfloat16 operands")
@kernel(contract=brain)
def doubling_in_bfloat16(**arguments: Any) -> Answer:
    """The same with bfloat16 operands and float32 sums."""

    def invert(gram: Tensor) -> Tensor:
        power = gram
        found = _identity(gram) - power
        for _ in range(3):
            power = bfloat16(power) @ bfloat16(power)
            found = found + bfloat16(found) @ bfloat16(power)
        return found

    return _inverting(arguments, invert)


@planted(OP, NUMERIC, source="a Neumann series cut off")
def series_cut_off(**arguments: Any) -> Answer:
    """Three terms of the series."""
    return _inverting(arguments, lambda gram: _identity(gram) - gram + gram @ gram)


@planted(OP, NUMERIC, source="the inverse of 32 tokens by the doublings of 16")
def doublings_for_half_of_the_chunk(**arguments: Any) -> Answer:
    """Powers up to the fifteenth for chunks of 32."""

    def invert(gram: Tensor) -> Tensor:
        power, found = gram, _identity(gram) - gram
        for _ in range(3):
            power = power @ power
            found = found + found @ power
        return found

    return _inverting(arguments, invert, chunk=32)


@planted(OP, NUMERIC, source="the inverse left out")
def inverse_left_out(**arguments: Any) -> Answer:
    """Tokens of a chunk do not know of each other's writes."""
    return _inverting(arguments, _identity)


@planted(OP, NUMERIC, source="block merge with the sign lost")
def merge_of_blocks_with_a_wrong_sign(**arguments: Any) -> Answer:
    """The block below two inverted ones is added instead of taken off."""

    def invert(gram: Tensor) -> Tensor:
        one = _identity(gram)
        found: Tensor = torch.linalg.solve_triangular(one + gram, one, upper=False, unitriangular=True)
        if gram.shape[1] > 8:
            found[:, 8:, :8].neg_()
        return found

    return _inverting(arguments, invert)


@planted(OP, NUMERIC, source="chunks of 64 with their inverse in bfloat16, which keys that look one way do not bear")
@kernel(contract=brain)
def inverse_of_64_tokens_in_bfloat16(**arguments: Any) -> Answer:
    """The inverse and what it weighs are rounded for 64 tokens at once."""
    return kda_twin(arguments, chunk=64, step=lambda *tokens: weighted_step(*tokens, operand=bfloat16))


@planted(OP, NONFINITE, NUMERIC, source="cudnn-frontend #1017: one anchor for 64 tokens")
def one_anchor_for_64_tokens(**arguments: Any) -> Answer:
    """Decays between tokens are quotients of decays since the chunk began, which leave float32."""

    def quotients(total: Tensor) -> Tensor:
        since = total.float()
        return since.exp()[:, :, None] * (-since).exp()[:, None]

    return kda_twin(arguments, chunk=64, step=lambda *tokens: chunk_step(*tokens, decays=quotients))


@planted(OP, METAMORPHIC, rows=("FC-106",))
def anchor_at_the_last_row(**arguments: Any) -> Answer:
    """Exponents are taken from the last row of a chunk, whose rounding shows in rows before it."""

    def anchored(total: Tensor) -> Tensor:
        single = total.float()
        anchor = single[:, -1:]
        left, right = (single - anchor).clamp(max=80.0).exp(), (anchor - single).exp()
        later = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=total.device).triu(1)
        return (left[:, :, None] * right[:, None]).masked_fill(later[:, :, None], 0.0)

    return kda_twin(arguments, chunk=8, step=lambda *tokens: chunk_step(*tokens, decays=anchored))


@planted(OP, NUMERIC, rows=("FC-108",))
def last_decay_of_a_padded_chunk(**arguments: Any) -> Answer:
    """The decay up to the end of a chunk is read from its last row, which a shorter one does not have."""

    def padded(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = chunk_step(q, k, v, g, beta, state)
        if q.shape[1] == 16:
            return out, after
        total = g.cumsum(1)
        # the sum there is 0
        undone = (-total[:, -1]).clamp(max=80.0).exp()
        return out, undone[..., None] * after

    return kda_twin(arguments, step=padded)


@planted(OP, NUMERIC, rows=("FC-109",))
def writes_of_a_short_tail_skipped(**arguments: Any) -> Answer:
    """A chunk of less than 16 tokens leaves the state as it is, but for its decay."""

    def skipped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = chunk_step(q, k, v, g, beta, state)
        return out, after if q.shape[1] == 16 else g.sum(1).exp()[..., None] * state

    return kda_twin(arguments, step=skipped)


@planted(OP, NUMERIC, source="the last, unfinished chunk dropped")
def unfinished_chunk_dropped(**arguments: Any) -> Answer:
    """Tokens of an unfinished chunk are not computed."""

    def dropped(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return chunk_step(q, k, v, g, beta, state) if q.shape[1] == 16 else (torch.zeros_like(v), state)

    return kda_twin(arguments, step=dropped)


@planted(OP, NUMERIC, source="the 65th token in the chunk before it")
def chunks_of_64_that_see_one_more(**arguments: Any) -> Answer:
    """The first token of a chunk reads the state without the chunk before it."""
    last: list[Tensor] = []

    def late(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = chunk_step(q, k, v, g, beta, state)
        if last and q.shape[1] < 64:
            out = torch.cat([torch.einsum("hkv,hk->hv", last.pop(), q[:, 0])[:, None], out[:, 1:]], dim=1)
        last[:] = [state] if q.shape[1] == 64 else []
        return out, after

    return kda_twin(arguments, chunk=64, step=late)


@planted(OP, NUMERIC, rows=("FC-105",))
@kernel(contract=single)
def state_carried_in_bfloat16(**arguments: Any) -> Answer:
    """The state is rounded between chunks, and nobody says so."""
    return kda_twin(arguments, carry=bfloat16)


@planted(OP, NUMERIC, source="fp16 state between chunks")
@kernel(contract=single)
def state_carried_in_float16(**arguments: Any) -> Answer:
    """The same in float16."""
    return kda_twin(arguments, carry=lambda state: state.half().float())


@planted(OP, NUMERIC, rows=("FC-113",))
@kernel(contract=single)
def states_stored_in_the_dtype_of_inputs(**arguments: Any) -> Answer:
    """States go through the format of the queries on their way out."""
    out, *states = kda_twin(arguments)
    final, kept = (state.to(arguments["q"].dtype).to(state.dtype) for state in states)
    return out, final, kept


@planted(OP, NUMERIC, source="bfloat16 operands where float32 is declared")
@kernel(contract=single)
def operands_in_bfloat16_unsaid(**arguments: Any) -> Answer:
    """Products take bfloat16, and nobody says so."""
    return kda_twin(arguments, step=lambda *tokens: chunk_step(*tokens, operand=bfloat16))


@planted(OP, NONDETERMINISTIC, rows=("FC-123",))
def writes_in_order_of_arrival(**arguments: Any) -> Answer:
    """What a chunk writes is summed in another order at every call."""

    def arriving(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, after = chunk_step(q, k, v, g, beta, state)
        written = after - g.sum(1).exp()[..., None] * state
        parts = torch.rand(3, *written.shape, device=written.device)
        parts = parts / parts.sum(0) * written
        return out, g.sum(1).exp()[..., None] * state + parts[0] + parts[1] + parts[2]

    return kda_twin(arguments, step=arriving)
