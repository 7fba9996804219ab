"""Attention of each query to the keys that its bits select, as far as it may look, by one of two implementations."""

from torch import Tensor

from ._attention_checks import check_scale
from ._masked_mha_chunks import ChunkedMaskPlan, KeyChunk, masked_mha_in_chunks, plan_masked_chunks
from ._masked_mha_plan import IMPLEMENTATIONS, MaskedMhaPlan, check_call, plan_masked_mha

__all__ = [
    "IMPLEMENTATIONS",
    "ChunkedMaskPlan",
    "KeyChunk",
    "MaskedMhaPlan",
    "masked_mha",
    "masked_mha_in_chunks",
    "plan_masked_chunks",
    "plan_masked_mha",
]


def masked_mha(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    plan: MaskedMhaPlan,
    tile_map: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend within each request to the selected keys of the past; return ``(out, lse)``.

    Of request ``r``, query ``i`` has position ``query_starts[r] + i`` and key ``s`` has position
    ``key_starts[r] + s``, both counted from the key of bit 0. A query sees a key if its bit is set and it is not in the
    query's future::

        z[i, h, s] = softmax_scale * q[i, h] . k[s, h // group]    if mask[i] has bit key_starts[r] + s,
                                                                   and key_starts[r] + s <= query_starts[r] + i
        lse[i, h]  = ln sum_s exp(z[i, h, s])
        out[i, h]  = sum_s exp(z[i, h, s] - lse[i, h]) v[s, h // group]

    A key counts once, however often it was selected (a set). A query that sees no key gives ``out = 0`` and
    ``lse = -inf``, the identity of the merge; results for chunks of the keys merge to that of all of them.

    Args:
        q: ``[T, H, Dq]``, packed, any strides.
        k: ``[S, H_kv, Dq]``, dtype of ``q``; query head ``h`` uses key head ``h // (H / H_kv)``. A key that a query may
            not see may hold anything.
        v: ``[S, H_kv, Dv]``, dtype of ``q``; may be a strided view such as ``kv[..., Dn:]``. Values of keys that are
            not selected must be finite, as they are multiplied by 0.
        mask: ``[T, W]``, int32, of ``topk_mask``, any strides; wide enough for the position of every key.
        softmax_scale: Factor on the logits, a finite number of the host; zero and negative are legal.
        plan: Of ``plan_masked_mha``, for these lengths.
        tile_map: ``[tiles, columns]``, bool, of ``topk_mask`` with ``plan.tile``: which tiles of the mask hold a bit;
            the others are skipped. Without, every tile of the past is looked at. ``torch`` has no tiles, and takes
            none.

    Returns:
        ``out``, ``[T, H, Dv]`` in the dtype of ``q``, and ``lse``, ``[T, H]``, float32 (float64 for float64 inputs),
        natural log of the scaled logits.

    Raises:
        TypeError: If a dtype is not that of the plan, or the scale is no number.
        ValueError: If a shape or device is not that of the plan, the mask is too narrow, or the scale is not finite.

    Precision: logits and softmax in float32, weights rounded to the dtype of ``q`` before the second product, row sum
    of the weights before that rounding, float32 sums. Deterministic; the same bits with and without a map. Never
    synchronises; CUDA graphs can capture it. Oracle: ``reference.masked_mha.masked_mha``. Source: the masked prefill of
    vLLM's sparse MLA, where bits alone carry causality.
    """
    check_call(q, k, v, mask, tile_map, plan)
    check_scale(softmax_scale)
    result: tuple[Tensor, Tensor] = plan.module.attend(q, k, v, mask, tile_map, float(softmax_scale), plan)
    return result
