"""Attention through torch's own scaled dot product attention: cuDNN on CUDA, the plain form on CPU; a request a call.

Part of ``optimized/attention.py``; call it from there.

What cuDNN does was measured on an H200 (torch 2.11.0, cuDNN 9.19): ``lse`` is ``[1, H, n, 1]`` in natural log; grouped
heads are served; a scale of zero or below gives NaN; an unaligned value tensor gives wrong values without an error; and
each new pair of lengths costs about 55 ms once, for a new execution plan.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ._attention_torch import accumulation_dtype, future_keys
from ._layout import copy_engine_objection

if TYPE_CHECKING:
    from .attention import AttentionPlan, AttentionShape

# the widest heads that were tried, and were right
_MAX_HEAD_DIM_QK, _MAX_HEAD_DIM_V = 576, 512


def refusal(
    shape: "AttentionShape", causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> str | None:
    """Why torch's attention cannot serve a request, or None."""
    if causal and query_lens != key_lens:
        return "torch aligns the causal mask to the first key: each request must have as many queries as keys"
    if shape.device.type == "cpu":
        return None
    if shape.device.type != "cuda":
        return f"a CUDA or CPU device is needed, got {shape.device}"
    if not torch.cuda.is_available() or not torch.backends.cudnn.is_available():
        return "no CUDA device with cuDNN is available"
    if torch.cuda.get_device_capability(shape.device) < (8, 0):
        return f"compute capability 8.0 is needed, got {torch.cuda.get_device_capability(shape.device)}"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN serves bfloat16 and float16, got {shape.dtype}"
    if shape.head_dim_qk % 8 or shape.head_dim_v % 8:
        return f"cuDNN needs head sizes that are multiples of 8, got {shape.head_dim_qk} and {shape.head_dim_v}"
    if shape.head_dim_qk > _MAX_HEAD_DIM_QK or shape.head_dim_v > _MAX_HEAD_DIM_V:
        return (
            f"head sizes up to {_MAX_HEAD_DIM_QK} and {_MAX_HEAD_DIM_V} were tried with cuDNN, "
            f"got {shape.head_dim_qk} and {shape.head_dim_v}"
        )
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: "AttentionPlan") -> tuple[Tensor, Tensor]:
    """Attend request by request; arguments and results as in ``attention``."""
    if q.is_cuda:
        _check_cudnn(q, k, v, softmax_scale)
    query_lens, key_lens = list(plan.query_lens), list(plan.key_lens)
    attend_request = _attend_cudnn if q.is_cuda else _attend_plain
    outs, lses = [], []
    for q_part, k_part, v_part in zip(
        torch.split(q, query_lens), torch.split(k, key_lens), torch.split(v, key_lens), strict=True
    ):
        if q_part.shape[0] == 0 or k_part.shape[0] == 0:
            out, lse = _no_keys(q_part, v_part.shape[-1])
        else:
            out, lse = attend_request(q_part, k_part, v_part, softmax_scale, plan.causal)
        outs.append(out)
        lses.append(lse)
    if len(outs) == 1:
        return outs[0].contiguous(), lses[0].contiguous()
    return torch.cat(outs), torch.cat(lses)


def _check_cudnn(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> None:
    """Refuse what cuDNN would compute wrongly."""
    if softmax_scale <= 0:
        raise NotImplementedError(f"sdpa: cuDNN needs a positive softmax_scale, got {softmax_scale}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        objection = copy_engine_objection(name, tensor) if tensor.numel() else None
        if objection is not None:
            raise NotImplementedError(f"sdpa: {objection}")


def _attend_cudnn(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One request by cuDNN, which serves grouped heads as they are."""
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=softmax_scale
    )
    return out[0].transpose(0, 1), lse.reshape(q.shape[1], q.shape[2]).t()


def _attend_plain(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """One request by torch's plain form, which gives no log-sum-exp: that is computed beside it."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (tensor.transpose(0, 1) for tensor in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=causal, scale=softmax_scale, enable_gqa=group > 1
        )
    wide = accumulation_dtype(q.dtype)
    logits = softmax_scale * (q.to(wide) @ k.to(wide).repeat_interleave(group, dim=0).transpose(1, 2))
    if causal:
        logits = logits.masked_fill(future_keys(q.shape[1], k.shape[1], q.device), float("-inf"))
    return out[0].transpose(0, 1), torch.logsumexp(logits, dim=-1).t()


def _no_keys(q: Tensor, head_dim_v: int) -> tuple[Tensor, Tensor]:
    """The state of queries that see no key: ``(0, -inf)``."""
    out = q.new_zeros(*q.shape[:2], head_dim_v)
    return out, torch.full(q.shape[:2], float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
