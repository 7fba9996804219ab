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
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_FAMILIES = ("exact-uniform", "exact-one-hot")
FAMILIES = ("diffuse", "peaked", "constant-v", "ramp-v", "shifted", "sunken", "visible-nan", *EXACT_FAMILIES)

NOISE = 2.0**-6
LOGIT_SHIFT = 80.0
LOGIT_DEPTH = -60000.0
# half of a logit that lies so deep: its query factor is LOGIT_DEPTH / softmax_scale / DEEP_KEY
DEEP_KEY = 512.0
# other keys then weigh less than 1e-17 in all, far below any output format; larger logits would cost accuracy
ONE_HOT_GAP = 40.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Who the packed keys and queries of a batch are.

    Attributes:
        ramp: ``[S]``, position of each key within its request, from -1 to 1.
        targets: ``[T]``, one packed key that each query may see, -1 where it sees none.
    """

    ramp: Tensor
    targets: Tensor


def tokens_of(query_lens: list[int], key_lens: list[int], *, causal: bool, generator: torch.Generator) -> Tokens:
    """Lay out a packed batch, and draw for each query a visible key, the last one for every other query."""
    ramps, targets, start = [], [], 0
    for n, m in zip(query_lens, key_lens, strict=True):
        ramps.append(torch.linspace(-1, 1, m) if m > 1 else torch.ones(m))
        last_key = torch.arange(n) + m - n if causal else torch.full((n,), m - 1)
        drawn = (torch.rand(n, generator=generator) * (last_key + 1)).long()
        chosen = torch.where(torch.arange(n) % 2 == 0, last_key, drawn)
        targets.append(torch.where(last_key < 0, -1, chosen + start))
        start += m
    return Tokens(ramp=torch.cat(ramps), targets=torch.cat(targets))


def visible_nan(family: str, query_lens: list[int], key_lens: list[int]) -> tuple[int, int] | None:
    """Request and position of the key that is NaN, or None: of the request with the fewest queries, all see it.

    A key that causality hides from some queries of its tile is not asked about: weight 0 times NaN is NaN in the
    mathematics, too.
    """
    fitting = [at for at, (n, m) in enumerate(zip(query_lens, key_lens, strict=True)) if 1 <= n <= m]
    if family != "visible-nan" or not fitting:
        return None
    request = min(fitting, key=lambda at: query_lens[at])
    return request, (key_lens[request] - query_lens[request]) // 2


def column_constants(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One constant per column, magnitudes spread over the binade [1, 2), both signs."""
    magnitude = torch.exp2(torch.rand(shape, generator=generator))
    return magnitude * torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)


def code_bits(count: int) -> int:
    """Bits that tell ``count`` keys apart."""
    return max(1, math.ceil(math.log2(max(2, count))))


def sign_code(numbers: Tensor, width: int, bits: int) -> Tensor:
    """``[len(numbers), width]`` of +1 and -1: bit ``d % bits`` of each number in column ``d``."""
    columns = torch.arange(width) % bits
    return ((numbers[:, None] >> columns) & 1).float() * 2 - 1


def one_hot_strength(width: int, bits: int, softmax_scale: float) -> float:
    """Power of two by which a query multiplies the code of its key, so that all others lie 40 below in the logit.

    Raises:
        ValueError: If the width cannot hold the code.
    """
    repeats = width // bits
    if repeats == 0:
        raise ValueError(f"the key width must be at least the {bits} bits of the code, got {width}")
    return 2.0 ** math.ceil(math.log2(ONE_HOT_GAP / (2 * repeats * softmax_scale)))


def token_values(count: int, width: int, bits: int) -> Tensor:
    """``[count, width]`` of small integers that name their row: its low and high digits, then its sign code."""
    number = torch.arange(count)
    digits = torch.stack([number % 128 + 1, number // 128 + 1], dim=1).float()
    named = torch.cat([digits, sign_code(number, bits, bits)], dim=1)
    return named[:, torch.arange(width) % named.shape[1]]


def uniform_values(count: int, width: int, generator: torch.Generator) -> Tensor:
    """``[count, width]`` of integers 1 to 7: drawn in even columns, alternating around 5 in odd ones.

    The mean of an alternating column over an even number of keys is exactly 5, so a single lost key shows.
    """
    drawn = torch.randint(1, 8, (count, width), generator=generator).float()
    alternating = 5 + (torch.arange(count) % 2 * 2 - 1).float()[:, None].expand(-1, width)
    return torch.where(torch.arange(width) % 2 == 0, drawn, alternating)


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
        ValueError: If the family is unknown.
    """
    queries, keys = len(tokens.targets), len(tokens.ramp)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    # logits of unit variance whatever the scale, so that an ignored scale argument shows
    strength = 1 / (softmax_scale * math.sqrt(d_qk))
    q, k, v = strength * normal(queries, num_heads, d_qk), normal(keys, num_kv_heads, d_qk), None
    if family == "exact-uniform":
        v = uniform_values(keys, num_kv_heads * d_v, generator).unflatten(1, (num_kv_heads, d_v))
        return torch.zeros_like(q), k, v
    if family == "exact-one-hot":
        bits = code_bits(keys)
        code = one_hot_strength(d_qk, bits, softmax_scale) * sign_code(tokens.targets.clamp(min=0), d_qk, bits)
        k = sign_code(torch.arange(keys), d_qk, bits)[:, None].repeat(1, num_kv_heads, 1)
        return (
            code[:, None].repeat(1, num_heads, 1),
            k,
            token_values(keys, num_kv_heads * d_v, bits).view_as(torch.empty(keys, num_kv_heads, d_v)),
        )
    if family in ("constant-v", "ramp-v"):
        constants = column_constants((num_kv_heads, d_v), generator)
        slope = tokens.ramp[:, None, None] if family == "ramp-v" else 1.0
        return q, k, slope * constants + NOISE * normal(keys, num_kv_heads, d_v)
    v = normal(keys, num_kv_heads, d_v)
    if family == "peaked":
        return 8 * q, k, v
    if family == "shifted":
        sign = 1 - 2 * (torch.arange(num_heads) % 2).float()
        q[..., 0], k[..., 0] = sign * LOGIT_SHIFT / softmax_scale / 8, 8.0
        return q, k, v
    if family == "sunken":
        q[..., 0], k[..., 0] = LOGIT_DEPTH / softmax_scale / DEEP_KEY, DEEP_KEY
        return q, k, v
    if family in ("diffuse", "visible-nan"):
        return q, k, v
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


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
        ValueError: If the family is unknown.
    """
    queries, keys, d_qk = len(tokens.targets), len(tokens.ramp), d_nope + d_rope

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if family in EXACT_FAMILIES:
        return _exact_latent_values(
            family, tokens, num_heads, kv_lora_rank, d_nope, d_rope, d_v, softmax_scale, generator
        )
    q = normal(queries, num_heads, d_qk) / (softmax_scale * math.sqrt(d_qk))
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
    elif family in ("shifted", "sunken"):
        sign = 1 - 2 * (torch.arange(num_heads) % 2).float()
        factor = sign * LOGIT_SHIFT / 8 if family == "shifted" else torch.full((num_heads,), LOGIT_DEPTH / DEEP_KEY)
        key = 8.0 if family == "shifted" else DEEP_KEY
        q[..., -1 if d_rope else 0] = factor / softmax_scale
        if d_rope:
            k_pe[:, -1] = key
        else:
            # the shifting key dimension is the constant channel alone, so that its projection is exact
            kv_c[:, 0], w_uk[:, 0, :] = 1.0, 0.0
            w_uk[:, 0, 0] = key
    elif family not in ("diffuse", "visible-nan"):
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")
    return q, kv_c, k_pe, torch.cat([w_uk, w_uv], dim=1)


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
        q = q[:, None].repeat(1, num_heads, 1)
    weights = torch.zeros(num_heads, d_nope + d_v, kv_lora_rank)
    weights[:, torch.arange(d_nope + d_v), torch.cat([key_channels, value_channels])] = 1.0
    return q, kv_c, sign_code(torch.arange(keys), d_rope, bits), weights
