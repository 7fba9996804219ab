"""Decoding over latent rows as they lie in the cache, with the queries brought to them.

A model of transformers expands all latent rows of its cache to keys and values again for every token that it decodes.
What ``W_UK`` and ``W_UV`` do to the rows can be done to the few queries and outputs instead::

    z_t = scale (W_UK^T q_nope) . kv_c[t] + scale q_rope . k_pe[t]
    out = W_UV sum_t softmax(z)_t kv_c[t]

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2, the absorbed form.
"""

import torch
from torch import Tensor

from ...optimized.mla_prefill import MlaShape
from ._hf_exact_scores import absorbed_queries

ABSORBED = "absorbed"


def absorbed_attention(
    query: Tensor, kv_c: Tensor, k_pe: Tensor, weight: Tensor, mask: Tensor | None, *, scale: float, shape: MlaShape
) -> Tensor:
    """Attend a few new tokens to latent rows; return ``[B, n, H, Dv]``, dtype of ``query``.

    Args:
        query: ``[B, H, n, Dn + Dr]``.
        kv_c: ``[B, 1, S, R]``, those of the new tokens last.
        k_pe: ``[B, 1, S, Dr]``.
        weight: ``[H, Dn + Dv, R]``, per head ``W_UK`` above ``W_UV``.
        mask: Added to the logits, ``[B, 1, n, S]``; None where every token is seen.
        scale: Factor on the logits.
        shape: Of the layer.

    Precision: as eager attention: logits and weights are rounded to the dtype, the softmax is float32 at least.
    """
    rows, positions = kv_c[:, 0], k_pe[:, 0]
    absorbed = absorbed_queries(query.transpose(1, 2).flatten(0, 1), weight, shape)
    # the heads of a row share its keys, so they are rows of one product
    nope, rope = (
        part.unflatten(0, (len(query), -1)).transpose(1, 2).flatten(1, 2)
        for part in absorbed.split([shape.kv_lora_rank, shape.d_rope], dim=-1)
    )
    products = torch.baddbmm(nope @ rows.transpose(1, 2), rope, positions.transpose(1, 2))
    logits = scale * products.unflatten(1, (shape.num_heads, -1))
    if mask is not None:
        logits = logits + mask
    wide = torch.promote_types(logits.dtype, torch.float32)
    shares = logits.softmax(dim=-1, dtype=wide).to(query.dtype)
    mixed = (shares.flatten(1, 2) @ rows).unflatten(1, (shape.num_heads, -1))
    return torch.einsum("bhnr,hvr->bnhv", mixed, weight[:, shape.d_nope :])
