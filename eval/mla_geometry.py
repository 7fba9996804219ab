"""Grouped-query attention as latent attention of given sizes, such as those of DeepSeek-V3: not exact, and no training.

``mla_conversion`` keeps RoPE on whole frequencies, so its rope key is ``2 * H_kv`` columns wide for each. Here the KV
heads are mixed at each frequency, by the axes in which keys of the model really lie, and components are ordered: the
first few keep RoPE, the others lose their phase and go to the latent. How many of each frequency stay is one choice for
all layers, which share their frequencies.

A component that loses its phase has the product ``q . k`` at every distance, where it had ``q . k cos(w d)`` and a sine
part. Of all constants the mean of that cosine comes closest, so the product is damped by it: a fast component vanishes,
a slow one stays nearly as it was. What is lost is the energy of its products times ``1 - mean(cos)^2``, and the
components that would lose most keep RoPE. Keys alone do not tell: a component with large keys that no query asks for
is part of no logit.

Sizes that are wider than what they hold are filled by isometries and not by zeros, so that no column of a layer can be
left out unseen, and ``W_UK`` and ``W_UV`` are dense and differ from head to head.

The idea of mixing KV heads per frequency is TransMLA's RoRoPE (arXiv 2502.07864).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .mla_conversion import GqaWeights, MlaWeights, principal_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaSizes:
    """Of a latent layer: rank ``R``, and ``Dn``, ``Dr``, ``Dv`` of a head."""

    kv_lora_rank: int
    d_nope: int
    d_rope: int
    d_v: int


DEEPSEEK_V3 = MlaSizes(kv_lora_rank=512, d_nope=128, d_rope=64, d_v=128)


def mix_heads(gqa: GqaWeights, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """The axes in which the keys of the KV heads lie at each frequency, and how much their products amount to.

    Args:
        gqa: The layer.
        covariance: ``[E, E]``, mean of ``x x^T`` over the layer's inputs.

    Returns:
        ``axes``, ``[F, component, H_kv]``, orthonormal rows; and ``energy``, ``[F, component]``, mean square of a key
        times that of the queries that ask for it, summed over the heads. The largest energy of a frequency comes first.
    """
    covariance = covariance.to(gqa.k_proj.dtype)
    k = gqa.k_proj.reshape(gqa.num_kv_heads, 2, gqa.inv_freq.shape[0], -1)
    axes = principal_axes(torch.einsum("gzfe,ed,hzfd->fgh", k, covariance, k))
    keys, queries = _mixed(gqa, axes)
    key_energy = torch.einsum("zfce,ed,zfcd->fc", keys, covariance, keys)
    query_energy = torch.einsum("hzfce,ed,hzfcd->fc", queries, covariance, queries)
    energy, order = (key_energy * query_energy).sort(dim=1, descending=True, stable=True)
    return axes.gather(1, order[:, :, None].expand_as(axes)), energy


def mean_cosine(inv_freq: Tensor, *, horizon: int) -> Tensor:
    """Of each frequency over distances ``1 .. horizon``, near ones weighing more, by ``1 / distance``."""
    distance = torch.arange(1, horizon + 1, dtype=inv_freq.dtype)
    return ((inv_freq[:, None] * distance).cos() / distance).sum(dim=1) / (1 / distance).sum()


def choose_components(energies: Sequence[Tensor], inv_freq: Tensor, *, count: int, horizon: int) -> Tensor:
    """How many components of each frequency keep RoPE, ``[F]``, int64: of all layers together, ``count`` in all.

    Args:
        energies: ``[F, H_kv]`` of each layer, of ``mix_heads``.
        inv_freq: ``[F]``, radians per token.
        count: Components that keep RoPE.
        horizon: Distances that matter.

    Raises:
        ValueError: If there are not so many.
    """
    # a layer counts by shares, or the one with the largest products would decide alone
    share = torch.stack([energy / energy.sum() for energy in energies]).sum(dim=0)
    lost = share * (1 - mean_cosine(inv_freq, horizon=horizon) ** 2)[:, None]
    if not 0 <= count <= lost.numel():
        raise ValueError(f"d_rope must be 2 columns for each of at most {lost.numel()} components, got {2 * count}")
    best = lost.flatten().sort(descending=True, stable=True).indices[:count]
    # of one frequency, the largest ones come first by their order
    return torch.bincount(best // lost.shape[1], minlength=len(lost))


def convert_to_sizes(
    gqa: GqaWeights, axes: Tensor, *, kept: Tensor, damping: Tensor, sizes: MlaSizes, seed: int
) -> tuple[MlaWeights, Tensor]:
    """Convert one layer.

    With ``n`` components kept, of ``F * H_kv``, it holds ``Dr = 2 n`` columns with RoPE, ``2 (F H_kv - n)`` of ``Dn``
    without, and ``2 (F H_kv - n) + H_kv D`` of ``R``; all of them kept is exact.

    Args:
        gqa: The layer, float64 for a conversion without more loss.
        axes: Of ``mix_heads``.
        kept: ``[F]``, of ``choose_components``.
        damping: ``[F]``, factor on the product of components that lose their phase.
        sizes: Of the result.
        seed: Of the isometries.

    Returns:
        The layer; and ``value_basis``, ``[H, Dv, D]``: an output ``o`` of the original is ``value_basis^T o'`` of the
        result, which the output projection has to take up.

    Raises:
        ValueError: If the sizes do not hold it.
    """
    heads, width = gqa.num_heads, gqa.head_dim
    generator = torch.Generator().manual_seed(seed)
    component = torch.arange(gqa.num_kv_heads)
    with_rope, without = (component < kept[:, None]).nonzero(), (component >= kept[:, None]).nonzero()
    rank, d_nope = 2 * len(without) + gqa.num_kv_heads * width, 2 * len(without)
    _check_sizes(sizes, rank=rank, d_nope=d_nope, d_rope=2 * len(with_rope), d_v=width)
    keys, queries = _mixed(gqa, axes)
    q_rope, rope_proj = (_columns(x, with_rope) for x in (queries, keys))
    q_nope, k_nope = (_columns(x, without) for x in (queries * damping[:, None, None], keys))

    basis = _isometry(sizes.kv_lora_rank, rank, 1, generator)[0].to(keys)
    turned = _isometry(sizes.d_nope, d_nope, heads, generator).to(keys)
    value_basis = _isometry(sizes.d_v, width, heads, generator).to(keys)
    joint = torch.cat([k_nope, gqa.v_proj])
    value_rows = d_nope + gqa.kv_head_of_head()[:, None] * width + torch.arange(width)
    up_key = turned @ basis[:, :d_nope].T  # [H, Dn, R]
    up_value = value_basis @ basis.T[value_rows]  # [H, Dv, R]
    mla = MlaWeights(
        q_proj=torch.cat([turned @ q_nope, q_rope], dim=1),
        latent_proj=basis @ joint,
        rope_proj=rope_proj,
        kv_b_proj=torch.cat([up_key, up_value], dim=1),
        inv_freq=gqa.inv_freq[with_rope[:, 0]],
        softmax_scale=gqa.softmax_scale,
    )
    return mla, value_basis


def _mixed(gqa: GqaWeights, axes: Tensor) -> tuple[Tensor, Tensor]:
    """Keys by component, ``[2, F, H_kv, E]``, and what each head asks of them, ``[H, 2, F, H_kv, E]``.

    With the orthogonal ``U[f]`` of the axes, component ``c`` is ``sum_g U[f, c, g] k[g]``, the query of a head of group
    ``g`` is ``U[f, c, g] q``, and the sum of their products over ``c`` is ``q . k[g]`` again.
    """
    frequencies = gqa.inv_freq.shape[0]
    q = gqa.q_proj.reshape(gqa.num_heads, 2, frequencies, -1)
    k = gqa.k_proj.reshape(gqa.num_kv_heads, 2, frequencies, -1)
    of_head = axes[:, :, gqa.kv_head_of_head()]
    return torch.einsum("fcg,gzfe->zfce", axes, k), torch.einsum("fch,hzfe->hzfce", of_head, q)


def _columns(mixed: Tensor, chosen: Tensor) -> Tensor:
    """Components ``[n, 2]``, frequency and place, of ``[.., 2, F, H_kv, E]`` in half-split layout, ``[.., 2 n, E]``."""
    return mixed[..., chosen[:, 0], chosen[:, 1], :].flatten(-3, -2)


def _isometry(rows: int, columns: int, count: int, generator: torch.Generator) -> Tensor:
    """``[count, rows, columns]``, float64, orthonormal columns without a direction of their own."""
    drawn = torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(drawn)
    # a column's sign is the library's choice
    signed: Tensor = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
    return signed


def _check_sizes(sizes: MlaSizes, *, rank: int, d_nope: int, d_rope: int, d_v: int) -> None:
    """Refuse sizes that do not hold a layer."""
    if sizes.d_rope != d_rope:
        raise ValueError(f"d_rope must be the {d_rope} columns of the components that keep RoPE, got {sizes.d_rope}")
    for name, least in (("kv_lora_rank", rank), ("d_nope", d_nope), ("d_v", d_v)):
        if getattr(sizes, name) < least:
            raise ValueError(f"{name} must be at least {least}, got {getattr(sizes, name)}")
