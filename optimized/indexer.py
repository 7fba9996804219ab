"""The lightning indexer of DeepSeek Sparse Attention: for each query the keys that attention will look at."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ._attention_checks import lengths

_MODULES = {"torch": "._indexer_torch", "triton": "._indexer_triton"}
IMPLEMENTATIONS = tuple(_MODULES)
# scores of a block of queries, and what choosing the best of them takes beside: keys of 64 bits, twice
_BYTES_A_SCORE = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerShape:
    """What an implementation must know of the tensors before it sees them.

    Attributes:
        device: Where the tensors live.
        dtype: Of ``q`` and ``k``: bfloat16, float16, float32 or (``torch``) float64.
        num_heads: Index heads ``H``.
        head_dim: ``D``, width of an index query and key.
        topk: Entries of a query's list.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    head_dim: int
    topk: int

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive, and dtypes that no implementation computes in."""
        for name in ("num_heads", "head_dim", "topk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {self.dtype}")

    @property
    def score_dtype(self) -> torch.dtype:
        """Of weights and scores: float32, or float64 for float64 inputs."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerPlan:
    """What the host decides once a step.

    Attributes:
        shape: Of the tensors that will be passed.
        query_lens: ``N`` query counts.
        key_lens: ``N`` key counts.
        blocks: ``(queries, keys, first)``: rows that are scored at once, the keys of their request, and the position of
            the first of the rows among those keys.
        implementation: One of ``IMPLEMENTATIONS``.
        choice: Its name, or for ``auto`` what was taken and why.
    """

    shape: IndexerShape
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    blocks: tuple[tuple[slice, slice, int], ...]
    implementation: str
    choice: str


def plan_indexer(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    shape: IndexerShape,
    workspace_bytes: int = 512 << 20,
    implementation: str = "auto",
) -> IndexerPlan:
    """Check the lengths and choose the implementation, once a step. This may synchronise; ``indexer`` does not.

    Args:
        cu_seqlens_q: ``[N + 1]``, int32 or int64, any device; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        cu_seqlens_k: ``[N + 1]``, the same for keys.
        shape: Of the tensors that ``indexer`` will get.
        workspace_bytes: What scores may take at once; at least one query is scored at a time.
        implementation: One of ``IMPLEMENTATIONS``, or ``auto``: ``triton`` on a CUDA device where it serves, else
            ``torch``. A name is never replaced by another.

    Returns:
        The plan, valid for any tensors of this shape and these lengths.

    Raises:
        TypeError: If the offsets are not int32 or int64.
        ValueError: If the offsets do not start at 0, decrease, or count different requests, or if there is no such
            implementation.
        NotImplementedError: If the named implementation does not serve the shape.
    """
    query_lens, key_lens = lengths("cu_seqlens_q", cu_seqlens_q), lengths("cu_seqlens_k", cu_seqlens_k)
    if len(query_lens) != len(key_lens):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same requests, got {len(query_lens)} and {len(key_lens)}"
        )
    name, choice = _resolve(implementation, shape)
    blocks = []
    start_q = start_k = 0
    for n, m in zip(query_lens, key_lens, strict=True):
        rows = max(1, workspace_bytes // (_BYTES_A_SCORE * max(m, shape.topk)))
        for first in range(0, n, rows):
            queries = slice(start_q + first, start_q + min(first + rows, n))
            blocks.append((queries, slice(start_k, start_k + m), first + m - n))
        start_q, start_k = start_q + n, start_k + m
    return IndexerPlan(
        shape=shape,
        query_lens=query_lens,
        key_lens=key_lens,
        blocks=tuple(blocks),
        implementation=name,
        choice=choice,
    )


def indexer(q: Tensor, k: Tensor, weights: Tensor, *, plan: IndexerPlan) -> tuple[Tensor, Tensor]:
    """Choose for each query the keys that attention will look at; return ``(topk_indices, topk_scores)``.

    ::

        score[t, s]  = sum_h weights[t, h] relu(q[t, h] . k[s])        for keys s up to the query's own position
        topk_indices = the topk keys of the highest scores, the best first; of equal ones the lower position first

    Of ``n`` queries and ``m`` keys of a request, query ``i`` sees keys ``0 .. i + m - n`` (aligned to the end).

    Args:
        q: ``[T, H, D]``, packed index queries, any strides.
        k: ``[S, D]``, dtype of ``q``; index keys, one for all heads, any strides. A scale of each key, as of a
            quantised one, must be folded into them: the weights have no place for it.
        weights: ``[T, H]``, float32 (float64 for float64 inputs), with every other factor in them; may be negative.
        plan: Of ``plan_indexer``, for these lengths.

    Returns:
        ``topk_indices``, ``[T, topk]``, int32, positions among the keys of the query's own request, -1 where no key is
        left; and ``topk_scores``, ``[T, topk]``, dtype of ``weights``, ``-inf`` there.

    Raises:
        TypeError: If a dtype is not that of the plan.
        ValueError: If a shape or device is not that of the plan.

    Precision: products and sums in float32; scores that are equal in it are ties, whose order is exact. Deterministic.
    Never synchronises; CUDA graphs can capture it. Oracle: ``reference.indexer.indexer``.
    """
    _check_call(q, k, weights, plan)
    shape = plan.shape
    indices = torch.empty(len(q), shape.topk, dtype=torch.int32, device=q.device)
    scores = torch.empty(len(q), shape.topk, dtype=shape.score_dtype, device=q.device)
    score: Callable[[Tensor, Tensor, Tensor, int], Tensor] = find_implementation(plan.implementation).score
    for queries, keys, first in plan.blocks:
        best, best_scores = best_keys(score(q[queries], k[keys], weights[queries], first), shape.topk)
        indices[queries] = best
        scores[queries] = best_scores
    return indices, scores


def best_keys(scores: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The keys of the highest scores, the best first, of equal ones the lower position first.

    torch's own selection keeps any of the entries that are equal; here no two are, since each score is joined with its
    position in one number of 64 bits, which orders first by one and then by the other.

    Args:
        scores: ``[n, m]``, float32 or float64, ``-inf`` where hidden, never NaN.
        topk: Entries of a list.

    Returns:
        ``[n, topk]``, int32, and their scores; -1 and ``-inf`` where no key is left.
    """
    kept = min(topk, scores.shape[1])
    # turns -0 into 0: they are equal, but not their bits
    scores = scores + 0.0
    if scores.dtype == torch.float64:
        best, keys = torch.sort(scores, dim=-1, descending=True, stable=True)
        best, keys = best[:, :kept], keys[:, :kept]
    else:
        bits = scores.view(torch.int32)
        # negative floats are ordered the other way round
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        position = torch.arange(scores.shape[1], device=scores.device)
        joined = (ordered.long() << 32) | (0xFFFFFFFF - position)
        keys = 0xFFFFFFFF - (joined.topk(kept, dim=-1).values & 0xFFFFFFFF)
        best = scores.gather(1, keys)
    keys = keys.masked_fill(best == float("-inf"), -1).int()
    missing = topk - kept
    return (
        torch.nn.functional.pad(keys, (0, missing), value=-1),
        torch.nn.functional.pad(best, (0, missing), value=float("-inf")),
    )


def find_implementation(name: str) -> ModuleType:
    """The module of an implementation, imported when it is first asked for.

    Raises:
        ValueError: If there is no such implementation.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(_MODULES[name], __package__)


def _check_call(q: Tensor, k: Tensor, weights: Tensor, plan: IndexerPlan) -> None:
    """Compare shapes, dtypes and devices with the plan; reads no value."""
    shape, num_queries = plan.shape, sum(plan.query_lens)
    for name, tensor, sizes, dtype in (
        ("q", q, (num_queries, shape.num_heads, shape.head_dim), shape.dtype),
        ("k", k, (sum(plan.key_lens), shape.head_dim), shape.dtype),
        ("weights", weights, (num_queries, shape.num_heads), shape.score_dtype),
    ):
        if tuple(tensor.shape) != sizes:
            raise ValueError(f"{name} must have shape {sizes} as planned, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype} as planned, got {tensor.dtype}")
        if tensor.device.type != shape.device.type or shape.device.index not in (None, tensor.device.index):
            raise ValueError(f"{name} must be on {shape.device} as planned, got {tensor.device}")


def _resolve(name: str, shape: IndexerShape) -> tuple[str, str]:
    """The implementation that will serve, and the account of the choice."""
    if name != "auto":
        reason = _refusal(name, shape)
        if reason is not None:
            raise NotImplementedError(f"implementation {name!r} cannot serve this shape; {reason}")
        return name, name
    if shape.device.type != "cuda":
        return "torch", "auto took torch"
    reason = _refusal("triton", shape)
    if reason is None:
        return "triton", "auto took triton"
    return "torch", f"auto took torch; refused: triton: {reason}"


def _refusal(name: str, shape: IndexerShape) -> str | None:
    """Why an implementation cannot serve, or None."""
    try:
        reason: str | None = find_implementation(name).refusal(shape)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"
    return reason
