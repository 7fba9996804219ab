"""The absorbed (multi-query) form of ``mla_prefill``, right and wrong: heads share the latent rows as keys and values.

Queries are projected into the latent space before they meet the keys, outputs out of it afterwards. What a kernel
rounds on the way, one query and one output in the latent space, is what ``Contract.absorbed`` says of ``projected``.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..case import Case
from ..contract import Contract, default_contract
from ..plugin import kernel
from ..record import Verdict
from . import planted, variant
from ._chunked import Pass, State, mla_prefill_twin

OP = "mla_prefill"
NUMERIC, DOWNGRADE = Verdict.NUMERIC, Verdict.PRECISION_DOWNGRADE

Rounding: TypeAlias = Callable[[Tensor], Tensor]


def _declaring(**promises: Any) -> Callable[[Case], Contract]:
    """The contract of a kernel that declares none but absorbs, with other promises."""
    return lambda case: default_contract(case.dtype, projected=True, splits=True).promising(absorbed=True, **promises)


def absorbed_twin(arguments: dict[str, Any], *, query: Rounding | None = None, **changes: Any) -> State:
    """The clean twin over latent rows.

    Args:
        arguments: Of the operation, by name.
        query: What becomes of absorbed queries, float32, ``[T, H, R]``; rounded to the dtype of the inputs if None.
            Their dtype is that in which the latent outputs of passes are kept, too.
        changes: Steps by name, see ``_chunked.Steps``.
    """
    q, weight = arguments["q"], arguments["kv_b_proj"].float()
    d_nope, rank = q.shape[2] - arguments["k_pe"].shape[1], weight.shape[2]
    w_uk, w_uv = weight[:, :d_nope], weight[:, d_nope:]

    def shared(latent: Tensor, rope: Tensor, kv_b_proj: Tensor, width: int) -> tuple[Tensor, Tensor]:
        rows = torch.cat([latent, rope], dim=-1)[:, None].expand(-1, len(weight), -1)
        return rows, rows[..., :rank]

    absorbed = torch.einsum("thd,hdr->thr", q[..., :d_nope].float(), w_uk)
    absorbed = absorbed.to(q.dtype) if query is None else query(absorbed)
    wide_q = torch.cat([absorbed, q[..., d_nope:].to(absorbed.dtype)], dim=-1)
    # the twin reads the width of its output off the weight
    latent_wide = {"q": wide_q, "kv_b_proj": weight.new_empty(len(weight), 2 * rank, 0)}
    latent, lse = mla_prefill_twin({**arguments, **latent_wide}, expand=shared, **changes)
    return torch.einsum("thr,hdr->thd", latent.float(), w_uv).to(q.dtype), lse


@variant(OP)
@kernel(contract=_declaring(projected="fp32", splits_store="fp32"))
def absorbed(**arguments: Any) -> State:
    """Absorbed queries and latent outputs stay in float32."""
    return absorbed_twin(arguments, query=torch.Tensor.float)


@variant(OP)
@kernel(contract=_declaring())
def absorbed_in_input_dtype(**arguments: Any) -> State:
    """Absorbed queries, latent outputs and those of each pass are rounded to the dtype of the inputs."""
    return absorbed_twin(arguments)


@variant(OP)
@kernel(contract=_declaring())
def absorbed_in_one_pass(**arguments: Any) -> State:
    """The same without chunks, as decode kernels work."""

    def whole(history: int, current: int, *rest: int) -> list[Pass]:
        return [Pass(keys=slice(0, history + current), causal=True)]

    return absorbed_twin(arguments, passes=whole)


@planted(OP, NUMERIC, source="softmax_scale derived inside the kernel from the width that it sees")
@kernel(contract=_declaring())
def absorbed_scale_of_latent_width(**arguments: Any) -> State:
    """Logits are scaled as if keys had been ``R + Dr`` wide from the start."""
    width, d_rope = arguments["q"].shape[2], arguments["k_pe"].shape[1]
    ratio = width / (arguments["kv_c"].shape[1] + d_rope)
    return absorbed_twin({**arguments, "softmax_scale": arguments["softmax_scale"] * ratio**0.5})


@planted(OP, DOWNGRADE, source="decode kernel for an fp8 cache that quantises the query, too")
@kernel(contract=_declaring())
def absorbed_queries_in_e4m3(**arguments: Any) -> State:
    """Absorbed queries pass through e4m3, with a scale for each token and head."""
    dtype = arguments["q"].dtype

    def quantised(query: Tensor) -> Tensor:
        scale = query.abs().amax(-1, keepdim=True).clamp(min=1e-30) / torch.finfo(torch.float8_e4m3fn).max
        return ((query / scale).to(torch.float8_e4m3fn).float() * scale).to(dtype)

    return absorbed_twin(arguments, query=quantised)
