"""Grouped-query attention rewritten as multi-head latent attention, weight by weight and without training.

Two facts make it possible. RoPE turns each frequency's pair of channels by itself, so an orthogonal mix of the KV heads
at one frequency commutes with it: the keys of all KV heads can lie side by side in one shared rope key, and a query
head reads its own KV head back out of the mix. And what is not turned is linear in the hidden state, so the unturned
key channels and the values of all KV heads fit in one latent row, in any basis.

Every frequency that keeps RoPE costs ``2 * num_kv_heads`` columns of the shared rope key; a frequency that drops it
costs 2 columns of the nope part and moves into the latent. The step is exact for a layer whose dropped frequencies
have no phase. Dropping none is exact for the original layer, but leaves the nope part empty; dropping the slowest ones
changes little, since a phase of ``frequency * distance`` radians is small at short distances.

The idea of mixing KV heads per frequency is TransMLA's RoRoPE (arXiv 2502.07864). Here both bases come from the weights
alone, so a conversion needs no calibration text, and ``W_UK`` differs from one KV head to the next.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GqaWeights:
    """The projections of one grouped-query attention layer with RoPE in half-split layout.

    Attributes:
        q_proj: ``[H * D, E]``; in each head, channels ``f`` and ``f + D / 2`` turn together.
        k_proj: ``[H_kv * D, E]``; ``H`` is a multiple of ``H_kv``.
        v_proj: ``[H_kv * D, E]``.
        inv_freq: ``[D / 2]``, radians per token, fastest first.
        num_heads: ``H``.
        num_kv_heads: ``H_kv``.
    """

    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    inv_freq: Tensor
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        """Check the shapes against each other."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads {self.num_kv_heads}, got {self.num_heads}")
        hidden = self.q_proj.shape[-1]
        for name, heads in (("q_proj", self.num_heads), ("k_proj", self.num_kv_heads), ("v_proj", self.num_kv_heads)):
            expected, shape = (heads * self.head_dim, hidden), tuple(getattr(self, name).shape)
            if shape != expected:
                raise ValueError(f"{name} must have shape {expected}, got {shape}")

    @property
    def head_dim(self) -> int:
        """``D``, the width of a query, key or value of one head."""
        return 2 * self.inv_freq.shape[0]

    @property
    def softmax_scale(self) -> float:
        """Factor on the logits."""
        return float(self.head_dim**-0.5)

    def kv_head_of_head(self) -> Tensor:
        """The KV head that each query head reads, ``[H]``, int64."""
        return torch.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaWeights:
    """The projections of one latent attention layer, RoPE in half-split layout, no norm on the latent.

    Attributes:
        q_proj: ``[H, Dn + Dr, E]``, the part without RoPE first.
        latent_proj: ``[R, E]``, hidden state to ``kv_c``.
        rope_proj: ``[Dr, E]``, hidden state to ``k_pe`` before RoPE.
        kv_b_proj: ``[H, Dn + Dv, R]``, ``W_UK`` above ``W_UV``.
        inv_freq: ``[Dr / 2]``, radians per token.
        softmax_scale: Factor on the logits: that of the original layer, not ``(Dn + Dr) ** -0.5``.
    """

    q_proj: Tensor
    latent_proj: Tensor
    rope_proj: Tensor
    kv_b_proj: Tensor
    inv_freq: Tensor
    softmax_scale: float


def convert_to_mla(gqa: GqaWeights, *, rope_frequencies: int) -> MlaWeights:
    """Convert one layer; the fastest ``rope_frequencies`` frequencies keep RoPE, the others lose their phase.

    With ``F = D / 2`` and ``n = rope_frequencies`` the result has ``Dr = 2 n H_kv``, ``Dn = 2 (F - n)``, ``Dv = D`` and
    ``R = H_kv (Dn + D)``. It computes what the original layer computes with ``inv_freq[n:] = 0``.

    Args:
        gqa: The layer, float64 for a conversion without loss.
        rope_frequencies: ``0 .. D / 2``; ``D / 2`` is exact for the original layer and has ``Dn = 0``.

    Returns:
        The converted layer, in the dtype of the weights.

    Raises:
        ValueError: If ``rope_frequencies`` is out of range.
    """
    frequencies = gqa.inv_freq.shape[0]
    if not 0 <= rope_frequencies <= frequencies:
        raise ValueError(f"rope_frequencies must be in 0 .. {frequencies}, got {rope_frequencies}")
    q = gqa.q_proj.reshape(gqa.num_heads, 2, frequencies, -1)  # [H, 2, F, E]
    k = gqa.k_proj.reshape(gqa.num_kv_heads, 2, frequencies, -1)  # [H_kv, 2, F, E]
    q_rope, rope_proj = _shared_rope_key(q[:, :, :rope_frequencies], k[:, :, :rope_frequencies], gqa.kv_head_of_head())
    latent_proj, kv_b_proj = _latent(k[:, :, rope_frequencies:].flatten(1, 2), gqa)
    return MlaWeights(
        q_proj=torch.cat([q[:, :, rope_frequencies:].flatten(1, 2), q_rope], dim=1),
        latent_proj=latent_proj,
        rope_proj=rope_proj,
        kv_b_proj=kv_b_proj,
        inv_freq=gqa.inv_freq[:rope_frequencies].repeat(gqa.num_kv_heads),
        softmax_scale=gqa.softmax_scale,
    )


def _shared_rope_key(q: Tensor, k: Tensor, kv_head_of_head: Tensor) -> tuple[Tensor, Tensor]:
    """Mix the KV heads at each frequency; return ``q_rope`` ``[H, Dr, E]`` and the shared key ``[Dr, E]``.

    With the orthogonal ``U[f]``, key component ``c`` is ``sum_g U[f, c, g] k[g]`` and the query of a head of group
    ``g`` is ``U[f, c, g] q``; summed over ``c`` the product is ``q . k[g]`` again.
    """
    mix = principal_axes(torch.einsum("gzfe,hzfe->fgh", k, k))  # [n, component, H_kv]
    key = torch.einsum("fcg,gzfe->zcfe", mix, k)
    query = torch.einsum("fch,hzfe->hzcfe", mix[:, :, kv_head_of_head], q)
    return query.flatten(1, 3), key.flatten(0, 2)


def _latent(k_nope: Tensor, gqa: GqaWeights) -> tuple[Tensor, Tensor]:
    """Put unturned keys ``[H_kv, Dn, E]`` and values in one latent; return ``latent_proj`` and ``kv_b_proj``.

    The basis is that of the principal axes of the stacked projections, so ``W_UK`` and ``W_UV`` are dense.
    """
    d_nope, d_value = k_nope.shape[1], gqa.head_dim
    joint = torch.cat([k_nope.flatten(0, 1), gqa.v_proj])  # [R, E]
    axes = principal_axes(joint @ joint.T)
    kv_head = gqa.kv_head_of_head()[:, None]
    key_rows = kv_head * d_nope + torch.arange(d_nope)
    value_rows = gqa.num_kv_heads * d_nope + kv_head * d_value + torch.arange(d_value)
    return axes @ joint, axes.T[torch.cat([key_rows, value_rows], dim=1)]


def principal_axes(gram: Tensor) -> Tensor:
    """Orthonormal eigenvectors of ``[..., n, n]`` as rows, strongest first, largest entry of each positive."""
    _, vectors = torch.linalg.eigh(gram)
    axes: Tensor = vectors.flip(-1).transpose(-2, -1)
    # an eigenvector's sign is the library's choice: fix it, so that equal weights give equal files
    largest = axes.abs().argmax(dim=-1, keepdim=True)
    return axes * axes.gather(-1, largest).sign()


def rotate(x: Tensor, inv_freq: Tensor) -> Tensor:
    """Apply RoPE in half-split layout to tokens ``0 .. T - 1``.

    Args:
        x: ``[T, ..., 2 m]``.
        inv_freq: ``[m]``, radians per token.

    Returns:
        Shape and dtype of ``x``.
    """
    angle = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * inv_freq.to(x.dtype)
    angle = angle.view(x.shape[0], *[1] * (x.dim() - 2), inv_freq.shape[0])
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1)


def gqa_inputs(gqa: GqaWeights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, H, D]``, keys ``[T, H_kv, D]`` (both after RoPE) and values of hidden states ``[T, E]``."""
    projections = (gqa.q_proj, gqa.k_proj, gqa.v_proj)
    q, k, v = ((hidden @ weight.T).view(hidden.shape[0], -1, gqa.head_dim) for weight in projections)
    return rotate(q, gqa.inv_freq), rotate(k, gqa.inv_freq), v


def mla_inputs(mla: MlaWeights, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of ``mla_prefill`` for the hidden states of one prompt; return ``(q, kv_c, k_pe)``.

    Args:
        mla: The layer.
        hidden: ``[T, E]``, input of the projections (after the layer's norm).

    Returns:
        ``q`` ``[T, H, Dn + Dr]``, ``kv_c`` ``[T, R]``, ``k_pe`` ``[T, Dr]``; the rope parts are turned.
    """
    q = torch.einsum("te,hde->thd", hidden, mla.q_proj)
    d_nope = q.shape[-1] - mla.rope_proj.shape[0]
    q = torch.cat([q[..., :d_nope], rotate(q[..., d_nope:], mla.inv_freq)], dim=-1)
    return q, hidden @ mla.latent_proj.T, rotate(hidden @ mla.rope_proj.T, mla.inv_freq)
