"""Small inputs of the gated delta rule, in families that break kernels, and the oracle on them."""

import itertools
from typing import Any

import torch
from builders import in_dtype
from torch import Tensor

from assay.reference.kda import kda

# no token, one, a block, a block and one, less than a chunk
LENGTHS = [5, 0, 1, 16, 17, 40]
GATES = ("bounded", "softplus", "log")


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def kda_inputs(
    lengths: list[int] | None = None,
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (8, 12),
    gate: str = "bounded",
    family: str = "normal",
    dtype: torch.dtype = torch.float64,
    state_dtype: torch.dtype | None = None,
    seed: int = 0,
    tail: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of the oracle, stored in ``dtype``, drawn on ``device``; ``tail`` rows of NaN follow the last sequence.

    Families: ``normal``; ``slow``, a tenth of the channels hardly decay; ``u01``, keys, queries and values in (0, 1);
    ``runs`` of 16 equal tokens; ``fast``, all channels at the bound; ``alternating``, one key with changing sign.
    """
    lengths = LENGTHS if lengths is None else lengths
    generator = torch.Generator(device).manual_seed(seed)
    (h, hv), (d_k, d_v), tokens = heads, dims, sum(lengths)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64, device=device)

    q, k, v = normal(tokens, h, d_k), normal(tokens, h, d_k), normal(tokens, hv, d_v)
    g, beta = normal(tokens, hv, d_k), normal(tokens, hv)
    a_log, dt_bias = 0.3 * normal(hv), 0.5 * normal(hv, d_k)
    if family == "slow":
        g[..., :: 10 if d_k > 10 else 3] = -9.0
        a_log.zero_(), dt_bias.zero_()
    elif family != "normal":
        a_log.zero_(), dt_bias.zero_()
        g.fill_(8.0 if family == "fast" else -8.0)
        beta.fill_(4.0)
        q, k, v = _repeated(family, q, k, v)
    if gate == "log":
        g = -torch.nn.functional.softplus(g)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = 0.2 * normal(len(lengths), hv, d_k, d_v)
    given: dict[str, Any] = {
        name: value.to(dtype) for name, value in {"q": q, "k": k, "v": v, "g": g, "beta": beta}.items()
    }
    if tail:
        given = {name: torch.cat([x, x.new_full((tail, *x.shape[1:]), torch.nan)]) for name, x in given.items()}
    given |= {"scale": d_k**-0.5, "cu_seqlens": offsets(lengths), "gate": gate}
    given |= {"A_log": a_log.to(wide), "dt_bias": dt_bias.to(wide)} if gate != "log" else {}
    given |= {"lower_bound": -5.0} if gate == "bounded" else {}
    given["initial_state"] = state.to(state_dtype or wide)
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in given.items()}


def _repeated(family: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a family whose gate and write strength are constant."""
    if family == "u01":
        generator = torch.Generator(q.device).manual_seed(len(q))
        q, k, v = (torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device) for x in (q, k, v))
    elif family == "runs":
        first = torch.arange(len(q)) // 16 * 16
        q, k, v = q[first], k[first], v[first]
    elif family == "alternating":
        sign = 1.0 - 2.0 * (torch.arange(len(q), device=q.device) % 2)
        k = k[:1] * sign[:, None, None]
    elif family != "fast":
        raise ValueError(f"there is no family {family!r}")
    return q, k, v


def oracle(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle in float64 on the stored inputs."""
    return kda(**in_dtype(given, torch.float64))
