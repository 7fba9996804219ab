"""Faults of ``sparse_mla`` in columns, heads, the strides of views, and the buffer that an output is part of."""

from typing import Any

import torch
from torch import Tensor

from ..plugin import kernel
from ..record import Verdict
from . import planted
from ._chunked import logits
from ._sparse import Three, sparse_twin

OP = "sparse_mla"
NUMERIC, NONFINITE, WRITE_SCOPE = Verdict.NUMERIC, Verdict.NONFINITE, Verdict.WRITE_SCOPE
TILE_OF_HEADS = 16


@planted(OP, NUMERIC, source="rows [rope | latent] of another cache")
def values_are_the_last_columns(**arguments: Any) -> Three:
    """The last ``d_v`` columns of a row are its value."""
    return sparse_twin(arguments, values=lambda rows, d_v: rows[..., rows.shape[2] - d_v :])


@planted(OP, NUMERIC, rows=("F24",), source="scale derived from the width of the values")
def scale_of_the_value_width(**arguments: Any) -> Three:
    """The scale is that of ``d_v`` columns instead of ``d_qk``."""
    scale = arguments["softmax_scale"] * (arguments["kv"].shape[1] / arguments["d_v"]) ** 0.5
    return sparse_twin({**arguments, "softmax_scale": scale})


@planted(OP, NUMERIC, source="inner product over the latent part alone")
def rope_part_left_out(**arguments: Any) -> Three:
    """Only the columns of the values count in a logit."""
    d_v = arguments["d_v"]
    return sparse_twin(arguments, logits=lambda q, k, scale: logits(q[..., :d_v], k[..., :d_v], scale))


@planted(OP, NUMERIC, source="columns in whole tiles of 16")
def last_columns_of_a_row_left_out(**arguments: Any) -> Three:
    """Columns past the last whole tile do not count in a logit."""
    whole = arguments["kv"].shape[1] // 16 * 16
    return sparse_twin(arguments, logits=lambda q, k, scale: logits(q[..., :whole], k[..., :whole], scale))


@planted(OP, NUMERIC, source="K and V in one buffer that the first product overwrites")
def values_are_scaled_keys(**arguments: Any) -> Three:
    """The scale was folded into the rows before they became values."""
    scale = arguments["softmax_scale"]
    return sparse_twin(arguments, values=lambda rows, d_v: (rows[..., :d_v] * scale).to(rows.dtype))


@planted(OP, WRITE_SCOPE, source="a tile of 16 heads, and no second one")
def heads_past_16_unwritten(**arguments: Any) -> Three:
    """More heads than a tile has are never stored."""
    results = sparse_twin(arguments)
    lazy = [torch.empty_like(result) for result in results]
    for mine, result in zip(lazy, results, strict=True):
        mine[:, :TILE_OF_HEADS] = result[:, :TILE_OF_HEADS]
    return lazy[0], lazy[1], lazy[2]


@planted(OP, NUMERIC, NONFINITE, source="head offset forgotten in the second tile")
def second_tile_of_heads_is_the_first(**arguments: Any) -> Three:
    """Heads past 16 repeat the queries of those before."""
    head = torch.arange(arguments["q"].shape[1], device=arguments["q"].device) % TILE_OF_HEADS
    return sparse_twin({**arguments, "q": arguments["q"][:, head]})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-091",))
def statistics_regrouped(**arguments: Any) -> Three:
    """Both statistics of padded heads are read as if there were none."""
    out, lse, top = sparse_twin(arguments)
    padded = [torch.nn.functional.pad(one, (0, 3)).flatten()[: one.numel()].view(one.shape) for one in (lse, top)]
    return out, padded[0], padded[1]


@planted(OP, NUMERIC, source="head stride of the queries of another layout")
def heads_and_queries_transposed(**arguments: Any) -> Three:
    """Queries are read as ``[H, T, D]``."""
    q = arguments["q"].contiguous()
    return sparse_twin({**arguments, "q": q.view(q.shape[1], q.shape[0], q.shape[2]).transpose(0, 1).contiguous()})


@planted(OP, NUMERIC, NONFINITE, rows=("FC-087",))
def queries_read_densely(**arguments: Any) -> Three:
    """The row pitch is taken for ``H * D``; the queries are some heads of more."""
    q = arguments["q"]
    heads, width = q.shape[1:]
    return sparse_twin({**arguments, "q": q.as_strided(q.shape, (heads * width, width, 1))})


@planted(OP, NUMERIC, NONFINITE, rows=("F22",), source="row pitch of the cache taken for its width")
def cache_read_densely(**arguments: Any) -> Three:
    """Rows lie wider apart than they are long."""
    kv = arguments["kv"]
    return sparse_twin({**arguments, "kv": kv.as_strided(kv.shape, (kv.shape[1], 1))})


def _write(arguments: dict[str, Any], *, out: Tensor, lse: Tensor, max_logits: Tensor) -> Tensor:
    """The right statistics; the output is left to a fault."""
    answer, own_lse, top = sparse_twin(arguments)
    lse.copy_(own_lse)
    max_logits.copy_(top)
    return answer


@planted(OP, WRITE_SCOPE, rows=("F22", "FC-087"))
@kernel(style="dps")
def output_written_densely(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """The output goes where it would lie alone, over the heads around it."""
    answer = _write(arguments, out=out, lse=lse, max_logits=max_logits)
    out.as_strided(answer.shape, answer.stride()).copy_(answer)


@planted(OP, WRITE_SCOPE, rows=("F21",))
@kernel(style="dps")
def padded_heads_written(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """The head behind the last is stored as well, where the buffer has one."""
    out.copy_(_write(arguments, out=out, lse=lse, max_logits=max_logits))
    queries, heads, width = out.shape
    if out.stride(0) > heads * out.stride(1):
        out.as_strided((queries, heads + 1, width), out.stride())[:, heads] = 0.0


@planted(OP, WRITE_SCOPE, source="rows in whole blocks")
@kernel(style="dps")
def row_behind_the_view_written(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """One query more is stored than there is, where the buffer has a row for it."""
    out.copy_(_write(arguments, out=out, lse=lse, max_logits=max_logits))
    queries, heads, width = out.shape
    if out.stride(0) > heads * out.stride(1):
        out.as_strided((queries + 1, heads, width), out.stride())[queries] = 0.0


@planted(OP, WRITE_SCOPE, source="columns of the output in whole vectors")
@kernel(style="dps")
def columns_behind_the_values_written(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """A column more is stored than values have, where the buffer has one."""
    out.copy_(_write(arguments, out=out, lse=lse, max_logits=max_logits))
    if out.stride(1) > out.shape[2]:
        out.as_strided((*out.shape[:2], out.shape[2] + 1), out.stride())[..., -1] = 0.0


@planted(OP, WRITE_SCOPE, source="epilogue through a copy that is never copied back")
@kernel(style="dps")
def output_left_in_a_copy(*, out: Tensor, lse: Tensor, max_logits: Tensor, **arguments: Any) -> None:
    """A view that is not contiguous is made so, and only that is written."""
    out.contiguous().copy_(_write(arguments, out=out, lse=lse, max_logits=max_logits))
