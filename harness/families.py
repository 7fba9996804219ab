"""What the values of a case look like: each family makes another kind of fault visible.

``diffuse``        normal values: every key has a little weight; denominators and scales show
``peaked``         a few keys hold the weight; a lost, doubled or misplaced key shows
``constant-v``     values near one constant per column, spread over a binade: a bias shows that noise would hide
``ramp-v``         values rise along the history: a low-precision accumulator or a lost chunk shows
``shifted``        logits moved by +80 or -80, head by head: a missing or misplaced maximum shows
``sunken``         logits near -60000, or as low as the format reaches: a maximum that starts at a finite number shows
``visible-nan``    one key of one request is NaN: so must be all its rows, and no others
``exact-uniform``  all logits zero, small integer values: every representable mean must come out bit for bit
``exact-one-hot``  one key holds all weight and its value names its token: a wrong key shows bit for bit

Those below are drawn less often, for what they show is a matter of few sizes:

``leverage``       each query is drawn to one key, often the last it sees, and that key has an equal one with another
                   value; the two hold half of the weight: maxima tie, values have one sign; slots at the ends of a
                   cache hold such keys, or lures
``overflow``       keys near the largest number of float16, logits near +60000 and -60000
``nonfinite-v``    NaN or infinity in the values alone: so must be the output of those columns, and nothing else
"""

import math

import torch
from torch import Tensor

from ._families_codes import (
    ONE_HOT_GAP,
    code_bits,
    column_constants,
    one_hot_strength,
    sign_code,
    token_values,
    uniform_values,
)
from ._families_tokens import Tokens, key_seen_by_all, nonfinite_dims, shared_prefixes, tokens_of, visible_nan

__all__ = [
    "EXACT_FAMILIES",
    "FAMILIES",
    "ONE_HOT_GAP",
    "RARE_FAMILIES",
    "Tokens",
    "attention_values",
    "code_bits",
    "column_constants",
    "key_seen_by_all",
    "latent_values",
    "moved_logits",
    "nonfinite_dims",
    "one_hot_strength",
    "query_strength",
    "shared_prefixes",
    "sign_code",
    "token_values",
    "tokens_of",
    "uniform_values",
    "visible_nan",
    "within_float16",
]

EXACT_FAMILIES = ("exact-uniform", "exact-one-hot")
FAMILIES = ("diffuse", "peaked", "constant-v", "ramp-v", "shifted", "sunken", "visible-nan", *EXACT_FAMILIES)
RARE_FAMILIES = ("leverage", "overflow", "nonfinite-v")

NOISE = 2.0**-6
LOGIT_SHIFT = 80.0
LOGIT_DEPTH = -60000.0
MOVED_FAMILIES = ("shifted", "sunken", "overflow")
# the key's factor of a moved logit, at usual scales
SHIFTED_KEY, DEEP_KEY = 8.0, 512.0
# 7/8 of the way to the largest number of float16, exact in every dtype; and the largest power of two below it
LARGE_KEY, LARGEST_POWER = 57344.0, 32768.0


def attention_values(
    family: str,
    tokens: Tokens,
    *,
    num_heads: int,
    num_kv_heads: int,
    d_qk: int,
    d_v: int,
    softmax_scale: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw ``q``, ``[T, H, Dq]``, ``k``, ``[S, H_kv, Dq]``, and ``v``, ``[S, H_kv, Dv]``, float32.

    Raises:
        ValueError: If the family is unknown, or the scale so small that float16 does not hold the queries.
    """
    queries, keys = len(tokens.targets), len(tokens.ramp)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    strength = query_strength(softmax_scale, d_qk)
    q, k, v = strength * normal(queries, num_heads, d_qk), normal(keys, num_kv_heads, d_qk), None
    if family == "exact-uniform":
        v = uniform_values(keys, num_kv_heads * d_v, generator).unflatten(1, (num_kv_heads, d_v))
        return torch.zeros_like(q), k, v
    if family == "exact-one-hot":
        bits = code_bits(keys)
        code = one_hot_strength(d_qk, bits, softmax_scale) * sign_code(tokens.targets.clamp(min=0), d_qk, bits)
        k = sign_code(torch.arange(keys), d_qk, bits)[:, None].repeat(1, num_kv_heads, 1)
        return (
            within_float16(code[:, None].repeat(1, num_heads, 1), softmax_scale),
            k,
            token_values(keys, num_kv_heads * d_v, bits).view_as(torch.empty(keys, num_kv_heads, d_v)),
        )
    if family in ("constant-v", "ramp-v"):
        constants = column_constants((num_kv_heads, d_v), generator)
        slope = tokens.ramp[:, None, None] if family == "ramp-v" else 1.0
        return within_float16(q, softmax_scale), k, slope * constants + NOISE * normal(keys, num_kv_heads, d_v)
    v = normal(keys, num_kv_heads, d_v)
    if family == "peaked":
        q *= 8
    elif family in MOVED_FAMILIES:
        q[..., 0], key = moved_logits(family, num_heads, keys, softmax_scale, generator)
        k[..., 0] = key[:, None]
    elif family == "leverage":
        k = k[torch.minimum(torch.arange(keys), tokens.twins)]
        own = _at(k, tokens.targets).repeat_interleave(num_heads // num_kv_heads, dim=1)
        q, v[..., ::2] = q + _pull(own, tokens, softmax_scale), 1 + v[..., ::2].abs()
    elif family not in ("diffuse", "visible-nan", "nonfinite-v"):
        raise _unknown(family)
    return within_float16(q, softmax_scale), k, v


def query_strength(softmax_scale: float, width: int) -> float:
    """Deviation of queries that gives logits of unit variance whatever the scale: an ignored argument shows.

    Raises:
        ValueError: If no queries do.
    """
    if not math.isfinite(softmax_scale) or softmax_scale == 0:
        raise ValueError(f"softmax_scale must be a number other than 0, got {softmax_scale}")
    return 1 / (softmax_scale * math.sqrt(width))


def within_float16(q: Tensor, softmax_scale: float) -> Tensor:
    """The queries, which float16 must hold as well, so that a case is the same in every dtype.

    Raises:
        ValueError: If it does not.
    """
    if q.numel() and float(q.abs().max()) > torch.finfo(torch.float16).max:
        raise ValueError(f"softmax_scale must be so large that float16 holds the queries, got {softmax_scale:g}")
    return q


def moved_logits(
    family: str, num_heads: int, keys: int, softmax_scale: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Two factors of which one dimension of a logit is the product: ``[H]`` of each query head, ``[S]`` of each key."""
    if family == "overflow":
        sign = 1 - 2 * torch.randint(2, (keys,), generator=generator).float()
        return torch.full((num_heads,), LOGIT_DEPTH / LARGE_KEY) / softmax_scale, LARGE_KEY * sign
    depth, key = (LOGIT_SHIFT, SHIFTED_KEY) if family == "shifted" else (LOGIT_DEPTH, DEEP_KEY)
    # where a small scale asks for a query beyond float16 the key takes its share
    while abs(depth / key / softmax_scale) > LARGE_KEY and key < LARGEST_POWER:
        key *= 2
    sign = 1 - 2 * (torch.arange(num_heads) % 2).float() if family == "shifted" else torch.ones(num_heads)
    return sign * depth / key / softmax_scale, torch.full((keys,), key)


def _pull(keys: Tensor, tokens: Tokens, softmax_scale: float) -> Tensor:
    """What to add to the queries, ``[T, H, D]``, so that each one's target and its twin hold half of the weight.

    More would leave the output next to the value of one key, which is representable: rounding would then add no noise
    but take the other keys away, in every row alike.

    Args:
        keys: ``[T, H, D]``, the target of each query as its head sees it.
        tokens: Of the batch.
        softmax_scale: Factor on the logits.
    """
    towards = keys / keys.square().sum(-1, keepdim=True).clamp(min=1e-6)
    rise = tokens.visible.clamp(min=1).log() * (tokens.targets >= 0)
    return rise[:, None, None] / softmax_scale * towards


def _at(rows: Tensor, targets: Tensor) -> Tensor:
    """The row of each query's target; any row, or 0 where there are none, for a query without one."""
    return rows[targets.clamp(min=0)] if len(rows) else rows.new_zeros(len(targets), *rows.shape[1:])


def _unknown(family: str) -> ValueError:
    return ValueError(f"family must be one of {', '.join((*FAMILIES, *RARE_FAMILIES))}, got {family!r}")


def latent_values(
    family: str,
    tokens: Tokens,
    *,
    num_heads: int,
    kv_lora_rank: int,
    d_nope: int,
    d_rope: int,
    d_v: int,
    softmax_scale: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw ``q``, ``[T, H, Dq]``, ``kv_c``, ``[S, R]``, ``k_pe``, ``[S, Dr]``, and the weights.

    The weights ``kv_b_proj`` are ``[H, Dn + Dv, R]``; all are float32.

    Channel 0 of the latent is a constant and channel 1 the ramp wherever a family needs them.

    Raises:
        ValueError: If the family is unknown, the latent too narrow for it, or the scale so small that float16 does not
            hold the queries.
    """
    queries, keys, d_qk = len(tokens.targets), len(tokens.ramp), d_nope + d_rope

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    strength = query_strength(softmax_scale, d_qk)
    if family in EXACT_FAMILIES:
        if not torch.equal(tokens.shared, torch.arange(keys)):
            raise ValueError(f"layout must not share slots in {family}, whose values name their token")
        return _exact_latent_values(
            family, tokens, num_heads, kv_lora_rank, d_nope, d_rope, d_v, softmax_scale, generator
        )
    q = strength * normal(queries, num_heads, d_qk)
    kv_c, k_pe = normal(keys, kv_lora_rank), normal(keys, d_rope)
    w_uk = normal(num_heads, d_nope, kv_lora_rank) / math.sqrt(kv_lora_rank)
    w_uv = normal(num_heads, d_v, kv_lora_rank) / math.sqrt(kv_lora_rank)
    if family in ("constant-v", "ramp-v"):
        if kv_lora_rank < 2:
            raise ValueError(f"kv_lora_rank must be at least 2 for {family}, got {kv_lora_rank}")
        kv_c[:, 0], kv_c[:, 1] = 1.0, tokens.ramp
        w_uk[..., :2] = 0.0
        w_uv *= NOISE
        w_uv[..., 0 if family == "constant-v" else 1] = column_constants((num_heads, d_v), generator)
    elif family == "peaked":
        q *= 8
    elif family in MOVED_FAMILIES:
        q[..., -1 if d_rope else 0], key = moved_logits(family, num_heads, keys, softmax_scale, generator)
        if d_rope:
            k_pe[:, -1] = key
        else:
            # the moving key dimension is the sign channel alone, so that its projection is exact
            kv_c[:, 0], w_uk[:, 0, :] = key.sign(), 0.0
            w_uk[:, 0, 0] = key.abs().max()
    elif family == "leverage":
        if kv_lora_rank < 2:
            raise ValueError(f"kv_lora_rank must be at least 2 for {family}, got {kv_lora_rank}")
        twins = torch.minimum(torch.arange(keys), tokens.twins)
        # channel 0 is seen by the values alone: equal keys have different ones, most of one sign
        kv_c, k_pe = torch.cat([1 + kv_c[:, :1].abs(), kv_c[twins, 1:]], dim=1), k_pe[twins]
        w_uk[..., 0], w_uv[..., 0] = 0.0, 1.0
    elif family == "nonfinite-v":
        # no latent can be undefined for the values alone; a row of their projection can
        w_uv[-1, -1, 0] = torch.nan
    elif family not in ("diffuse", "visible-nan"):
        raise _unknown(family)
    kv_c, k_pe = kv_c[tokens.shared], k_pe[tokens.shared]
    if family == "leverage":
        latent, rope = _at(kv_c, tokens.targets), _at(k_pe, tokens.targets)[:, None].expand(-1, num_heads, -1)
        own = torch.cat([torch.einsum("tr,hdr->thd", latent, w_uk), rope], dim=-1)
        q = q + _pull(own, tokens, softmax_scale)
    return within_float16(q, softmax_scale), kv_c, k_pe, torch.cat([w_uk, w_uv], dim=1)


def _exact_latent_values(
    family: str,
    tokens: Tokens,
    num_heads: int,
    kv_lora_rank: int,
    d_nope: int,
    d_rope: int,
    d_v: int,
    softmax_scale: float,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Latents whose projection by a selection matrix is exact: each key or value dimension copies one channel."""
    queries, keys, bits = len(tokens.targets), len(tokens.ramp), code_bits(len(tokens.ramp))
    if family == "exact-uniform":
        kv_c = uniform_values(keys, kv_lora_rank, generator)
        key_channels, value_channels = torch.arange(d_nope) % kv_lora_rank, torch.arange(d_v) % kv_lora_rank
        q = torch.zeros(queries, num_heads, d_nope + d_rope)
    else:
        code = sign_code(torch.arange(keys), kv_lora_rank, bits)
        values = token_values(keys, bits + 2, bits)
        if kv_lora_rank < 2 * bits + 2:
            raise ValueError(f"kv_lora_rank must be at least {2 * bits + 2} for {keys} keys, got {kv_lora_rank}")
        kv_c = code
        kv_c[:, bits : 2 * bits + 2] = values
        key_channels, value_channels = torch.arange(d_nope) % bits, bits + torch.arange(d_v) % (bits + 2)
        strength = one_hot_strength(d_nope, bits, softmax_scale)
        target = tokens.targets.clamp(min=0)
        q = strength * torch.cat([sign_code(target, d_nope, bits), sign_code(target, d_rope, bits)], dim=1)
        q = within_float16(q[:, None].repeat(1, num_heads, 1), softmax_scale)
    weights = torch.zeros(num_heads, d_nope + d_v, kv_lora_rank)
    weights[:, torch.arange(d_nope + d_v), torch.cat([key_channels, value_channels])] = 1.0
    return q, kv_c, sign_code(torch.arange(keys), d_rope, bits), weights
