"""Correct kernels of the gated delta rule in other forms: other chunks, other orders, other places of rounding."""

from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..plugin import kernel
from . import variant
from ._kda_twin import (
    Answer,
    between,
    bfloat16,
    chunk_step,
    chunks,
    inverse,
    kda_twin,
    same,
    token_step,
)

OP = "kda"


def single(case: Case, **promises: Any) -> Contract:
    """Everything in float32, but for what is stored."""
    stored = PRECISION_OF_DTYPE[case.dtype]
    kept = PRECISION_OF_DTYPE[case.sizes["state_dtype"]]
    return Contract(p="fp32", out=stored, state="fp32", state_store=kept).promising(**promises)


def brain(case: Case) -> Contract:
    """Operands of products in bfloat16, whatever the inputs are."""
    return single(case, p="bf16")


@variant(OP)
@kernel(contract=single)
def clean(**arguments: Any) -> Answer:
    """The clean twin: chunks of 16."""
    return kda_twin(arguments)


@variant(OP)
@kernel(contract=single)
def chunks_of_64(**arguments: Any) -> Answer:
    """Chunks of 64."""
    return kda_twin(arguments, chunk=64)


@variant(OP)
@kernel(contract=single)
def token_by_token(**arguments: Any) -> Answer:
    """No chunks."""
    return kda_twin(arguments, step=token_step)


@variant(OP)
@kernel(contract=single)
def weights_first(**arguments: Any) -> Answer:
    """The inverse applied to keys and values first, as in fla: ``U - W S``."""
    return kda_twin(arguments, chunk=32, step=weighted_step)


@variant(OP)
@kernel(contract=single)
def sums_from_the_value(**arguments: Any) -> Answer:
    """The prediction taken off the value channel by channel, so that every partial sum is as large as the value."""
    return kda_twin(arguments, step=subtracting_step)


@variant(OP)
@kernel(contract=single)
def states_transposed(**arguments: Any) -> Answer:
    """States kept value columns first, and handed out as views."""
    out, final, kept = kda_twin(arguments)
    return out, final.mT.contiguous().mT, kept.mT.contiguous().mT


@variant(OP)
@kernel(contract=single)
def segments(**arguments: Any) -> Answer:
    """Sequences in two segments side by side, each an affine map of the state before it."""
    return kda_twin(arguments, chunk=1 << 20, step=segmented_step)


@variant(OP)
@kernel(contract=brain)
def operands_in_bfloat16(**arguments: Any) -> Answer:
    """Chunks of 16 whose products take bfloat16, the inverse included; the sums and the state in float32."""
    return kda_twin(arguments, step=lambda *tokens: chunk_step(*tokens, operand=bfloat16))


@variant(OP)
@kernel(contract=lambda case: single(case, state="bf16"))
def state_in_bfloat16(**arguments: Any) -> Answer:
    """A state that is rounded between chunks, and says so."""
    return kda_twin(arguments, carry=bfloat16)


def weighted_step(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, *, operand: Any = same
) -> tuple[Tensor, Tensor]:
    """A chunk with the inverse first."""
    total = g.double().cumsum(1)
    start, end, decay = total.exp().float(), (total[:, -1:] - total).exp().float(), between(total).float()
    gram = beta[:, :, None] * torch.einsum("hid,hjd,hijd->hij", k, k, decay).tril(-1)
    weights = operand(inverse(gram) * beta[:, None])
    u, w = weights @ operand(v), operand(weights @ operand(k * start))
    written = operand(u - w @ operand(state))
    read = operand(torch.einsum("hid,hjd,hijd->hij", q, k, decay).tril())
    out = operand(q * start) @ operand(state) + read @ written
    return out, start[:, -1, :, None] * state + operand(k * end).mT @ written


def subtracting_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token after the other; the accumulator of a product begins with what it is subtracted from."""
    out = torch.empty_like(v)
    for t in range(q.shape[1]):
        state = g[:, t].exp()[..., None] * state
        error = v[:, t].clone()
        for channel in range(k.shape[2]):
            error -= state[:, channel] * k[:, t, channel, None]
        state = state + (beta[:, t, None] * k[:, t])[:, :, None] * error[:, None]
        out[:, t] = torch.einsum("hkv,hk->hv", state, q[:, t])
    return out, state


def segmented_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """All tokens up to a stop: the map of the first part, found from a state of ones, then the second part."""
    cut = q.shape[1] // 2
    parts = [[x[:, :cut] for x in (q, k, v, g, beta)], [x[:, cut:] for x in (q, k, v, g, beta)]]

    def walk(tokens: list[Tensor], before: Tensor) -> tuple[Tensor, Tensor]:
        outs = []
        for first, last in chunks(tokens[0].shape[1], 16, []):
            q, k, v, g, beta = (x[:, first:last] for x in tokens)
            out, before = chunk_step(q, k, v, g, beta, before)
            outs.append(out)
        return torch.cat([tokens[2][:, :0], *outs], dim=1), before

    one = torch.eye(k.shape[2], dtype=k.dtype, device=k.device).expand(k.shape[0], -1, -1)
    nothing = torch.zeros(*k.shape[:2], k.shape[2], dtype=k.dtype, device=k.device)
    linear = walk([*parts[0][:2], nothing[:, :cut], *parts[0][3:]], one)[1]
    first, added = walk(parts[0], torch.zeros_like(state))
    # outputs of the first part are linear in the state before it as well
    first, _ = walk(parts[0], state)
    second, after = walk(parts[1], linear @ state + added)
    return torch.cat([first, second], dim=1), after
