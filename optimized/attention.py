"""Attention over packed requests with its log-sum-exp, by one of several providers, and the merge of partial states."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from ._attention_checks import check_inputs, check_merge, check_scale, lengths
from ._attention_torch import merge_into_torch, merge_torch

MergeImplementation = Literal["torch", "triton"]

# Named providers and the module of each; a module is imported when its provider is first asked for.
_MODULES = {
    "torch": "._attention_torch",
    "sdpa": "._attention_sdpa",
    "triton": "._attention_triton",
    "fa3": ".external.fa3",
    "fa4": ".external.fa4",
    "flashinfer": ".external.flashinfer",
    "cudnn_frontend": ".external.cudnn_frontend",
    "flash": ".external.flash",
    "flex": ".external.flex",
}
PROVIDERS = tuple(_MODULES)

# cuDNN needs about 55 ms for each new pair of lengths and is then a quarter faster than the own kernel (H200): within
# the some 60 layers of a step that is repaid by requests of this many operations
_SDPA_FIRST_FLOP = 2e12


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a provider must know of the tensors before it sees them.

    Attributes:
        device: Where the tensors live.
        dtype: Of ``q``, ``k``, ``v`` and ``out``: bfloat16, float16, float32 or (provider ``torch``) float64.
        num_heads: Query heads ``H``.
        num_kv_heads: Key and value heads ``H_kv``; divides ``H``.
        head_dim_qk: ``Dq``, width of a query and of a key.
        head_dim_v: ``Dv``, width of a value; may differ from ``Dq``.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_v: int

    def __post_init__(self) -> None:
        """Refuse sizes that are not positive, and query heads that do not form groups."""
        for name in ("num_heads", "num_kv_heads", "head_dim_qk", "head_dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            raise TypeError(f"dtype must be bfloat16, float16, float32 or float64, got {self.dtype}")


class Refusal(Protocol):
    """Says why a provider cannot serve a request, or None if it can; imports the provider's library if it must."""

    def __call__(
        self, shape: AttentionShape, causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
    ) -> str | None:
        """Return the reason, a phrase that follows "because"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One way to compute attention.

    Attributes:
        name: One of ``PROVIDERS``.
        refusal: Why it cannot serve a request, or None.
        attend: ``(q, k, v, softmax_scale, plan) -> (out, lse)``; never synchronises.
        prepare: Host work that must be done once a plan; what it returns is kept in ``plan.prepared``.
    """

    name: str
    refusal: Refusal
    attend: Callable[[Tensor, Tensor, Tensor, float, "AttentionPlan"], tuple[Tensor, Tensor]]
    prepare: Callable[["AttentionPlan"], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """What the host decides once a step; every value in it has been checked.

    Attributes:
        shape: Of the tensors that will be passed.
        causal: Whether a query is barred from later keys; aligned to the end of the keys (bottom right).
        cu_seqlens_q: ``[N + 1]``, int32, on ``shape.device``; a copy, so that it cannot drift from the host's numbers.
        cu_seqlens_k: The same for keys and values.
        query_lens: ``N`` query counts on the host.
        key_lens: ``N`` key counts on the host.
        provider: The provider that will compute.
        choice: Its name, or for ``auto`` what was taken and why each earlier one was refused.
        prepared: The provider's own object, or None.
    """

    shape: AttentionShape
    causal: bool
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    provider: Provider
    choice: str
    prepared: object = None

    @property
    def num_queries(self) -> int:
        """``T``, queries of all requests."""
        return sum(self.query_lens)

    @property
    def num_keys(self) -> int:
        """``S``, keys of all requests."""
        return sum(self.key_lens)


def find_provider(name: str) -> Provider:
    """Return the provider of that name, importing its module.

    Raises:
        ValueError: If there is no such provider.
    """
    if name not in _MODULES:
        raise ValueError(f"provider must be 'auto' or one of {', '.join(PROVIDERS)}, got {name!r}")
    try:
        module = importlib.import_module(_MODULES[name], __package__)
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux: the provider then exists and refuses; any other missing module is a defect
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return _missing_provider(name, f"{error.name} is not installed")
    return Provider(name=name, refusal=module.refusal, attend=module.attend, prepare=getattr(module, "prepare", None))


def resolve_provider(
    name: str, shape: AttentionShape, *, causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> tuple[Provider, str]:
    """Find the provider that will serve a request; return ``(provider, choice)``.

    Args:
        name: ``auto`` or one of ``PROVIDERS``. On a CUDA device ``auto`` takes the first that serves of ``triton``,
            ``sdpa``, ``torch``, or of ``sdpa``, ``triton``, ``torch`` if each request is so large that cuDNN's work for
            a new shape is soon repaid; elsewhere it takes ``torch``. External libraries are taken by name only, and a
            name is never replaced by another.
        shape: Of the tensors.
        causal: As in ``plan_attention``.
        query_lens: Queries per request.
        key_lens: Keys per request.

    Returns:
        The provider, and for ``auto`` the account of the choice (else the name).

    Raises:
        ValueError: If there is no such provider.
        NotImplementedError: If the named provider, or with ``auto`` every one of them, cannot serve the request.
    """
    names = _auto_order(shape, causal, query_lens, key_lens) if name == "auto" else (name,)
    refused: list[str] = []
    for candidate in names:
        provider = find_provider(candidate)
        reason = provider.refusal(shape, causal, query_lens, key_lens)
        if reason is None:
            return provider, _account(candidate, names, refused) if name == "auto" else candidate
        refused.append(f"{candidate}: {reason}")
    raise NotImplementedError(f"attention provider {name!r} cannot serve this request; {'; '.join(refused)}")


def plan_attention(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    causal: bool,
    shape: AttentionShape,
    provider: str = "auto",
) -> AttentionPlan:
    """Check the lengths and choose the provider, once a step. This may synchronise; ``attention`` does not.

    Args:
        cu_seqlens_q: ``[N + 1]``, int32 or int64, any device; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        cu_seqlens_k: ``[N + 1]``, the same for keys and values.
        causal: Whether a query is barred from later keys. Of ``n`` queries and ``m`` keys, query ``i`` sees keys
            ``0 .. i + m - n``; queries or keys of length zero are legal.
        shape: Of the tensors that ``attention`` will get.
        provider: ``auto`` or one of ``PROVIDERS``.

    Returns:
        The plan, valid for any tensors of this shape and these lengths.

    Raises:
        TypeError: If the offsets are not int32 or int64.
        ValueError: If the offsets do not start at 0, decrease, or count different requests, or if there is no such
            provider.
        NotImplementedError: If the provider cannot serve the request.
    """
    query_lens = lengths("cu_seqlens_q", cu_seqlens_q)
    key_lens = lengths("cu_seqlens_k", cu_seqlens_k)
    if len(query_lens) != len(key_lens):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same requests, got {len(query_lens)} and {len(key_lens)}"
        )
    chosen, choice = resolve_provider(provider, shape, causal=causal, query_lens=query_lens, key_lens=key_lens)
    plan = AttentionPlan(
        shape=shape,
        causal=causal,
        cu_seqlens_q=cu_seqlens_q.to(device=shape.device, dtype=torch.int32, copy=True),
        cu_seqlens_k=cu_seqlens_k.to(device=shape.device, dtype=torch.int32, copy=True),
        query_lens=query_lens,
        key_lens=key_lens,
        provider=chosen,
        choice=choice,
    )
    return plan if chosen.prepare is None else replace(plan, prepared=chosen.prepare(plan))


def attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
    """Attend within each request of a packed batch; return ``(out, lse)``.

    ::

        out = softmax(softmax_scale * q k^T + mask) v        one request at a time

    A query without keys gives ``out = 0`` and ``lse = -inf``, the identity of the merge.

    Args:
        q: ``[T, H, Dq]``, packed, any strides.
        k: ``[S, H_kv, Dq]``, dtype of ``q``; query head ``h`` uses key head ``h // (H / H_kv)``.
        v: ``[S, H_kv, Dv]``, dtype of ``q``; may be a strided view such as ``kv[..., Dn:]``.
        softmax_scale: Factor on the logits, a finite number of the host; zero and negative are legal for ``torch`` and
            ``triton``.
        plan: Of ``plan_attention``, for these lengths.

    Returns:
        ``out``, ``[T, H, Dv]`` in the dtype of ``q``, and ``lse``, ``[T, H]``, float32 (float64 for float64 inputs),
        natural log of the scaled logits.

    Raises:
        TypeError: If a dtype is not that of the plan, or the scale is no number.
        ValueError: If a shape or device is not that of the plan, or the scale is not finite.
        NotImplementedError: If the provider does not serve these strides or this scale.

    Precision: logits and softmax in float32, weights rounded to the dtype of ``q`` before the second product, row sum
    of the weights before that rounding, float32 sums. Never synchronises; CUDA graphs can capture it.
    Oracle: ``reference.attention.attention``.
    """
    check_inputs(q, k, v, plan)
    check_scale(softmax_scale)
    return plan.provider.attend(q, k, v, float(softmax_scale), plan)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint sets of keys; return ``(out, lse)``.

    ::

        lse = ln(exp(lse_a) + exp(lse_b))
        out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

    ``(0, -inf)`` is the identity. A side whose ``lse`` is ``-inf`` takes no part, whatever its ``out`` holds.

    Args:
        out_a: ``[T, H, Dv]``, normalised, any strides.
        lse_a: ``[T, H]``, natural log of the scaled logits; finite or ``-inf``.
        out_b: As ``out_a``; its dtype may differ.
        lse_b: As ``lse_a``.

    Returns:
        ``out``, ``[T, H, Dv]`` in the dtype of ``out_a``, and ``lse``, ``[T, H]``, in the wider of the two dtypes.

    Raises:
        ValueError: If the shapes or devices disagree.
        TypeError: If an operand is not floating.

    Precision: float32 (float64 if an operand is), one rounding at the end.
    Oracle: ``reference.attention.merge_states``.
    """
    check_merge(out_a, lse_a, out_b, lse_b)
    out, lse = merge_torch(out_a, lse_a, out_b, lse_b)
    return out.to(out_a.dtype), lse


def merge_into(
    out: Tensor,
    lse: Tensor,
    part_out: Tensor,
    part_lse: Tensor,
    *,
    implementation: MergeImplementation | None = None,
) -> None:
    """Merge a partial result into a running one, in place; the mathematics of ``merge_states``.

    Args:
        out: ``[T, H, Dv]``, float32 or float64, the running result; overwritten. May be a strided view.
        lse: ``[T, H]``, dtype of ``out``, natural log; overwritten. May be a strided view.
        part_out: ``[T, H, Dv]``, any floating dtype and strides; must not overlap ``out``.
        part_lse: ``[T, H]``, dtype of ``out``.
        implementation: ``triton`` (default on CUDA: one pass over the data) or ``torch`` (default elsewhere).

    Raises:
        ValueError: If the shapes or devices disagree, ``out`` or ``lse`` overlaps itself, or there is no such
            implementation.
        TypeError: If ``out`` is neither, ``lse`` or ``part_lse`` differs from it, or ``part_out`` is not floating.
        NotImplementedError: If ``triton`` is asked for where it cannot run.
    """
    check_merge(out, lse, part_out, part_lse)
    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    for name, tensor in (("out", out), ("lse", lse), ("part_lse", part_lse)):
        if tensor.dtype != wide:
            raise TypeError(f"{name} must be {wide}, got {tensor.dtype}")
    for name, tensor in (("out", out), ("lse", lse)):
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise ValueError(f"{name} must not overlap itself, got strides {tensor.stride()}")
    if implementation is None:
        implementation = "triton" if out.is_cuda and wide == torch.float32 else "torch"
    if implementation == "torch":
        merge_into_torch(out, lse, part_out, part_lse)
    elif implementation == "triton":
        importlib.import_module("._merge_triton", __package__).merge_into_triton(out, lse, part_out, part_lse)
    else:
        raise ValueError(f"implementation must be 'torch' or 'triton', got {implementation!r}")


def _missing_provider(name: str, reason: str) -> Provider:
    """A provider whose own package cannot be imported: it refuses everything and says why."""

    def refusal(
        shape: AttentionShape, causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
    ) -> str | None:
        return reason

    def attend(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, plan: AttentionPlan) -> tuple[Tensor, Tensor]:
        raise NotImplementedError(f"attention provider {name!r} cannot serve this request; {reason}")

    return Provider(name=name, refusal=refusal, attend=attend)


def _auto_order(
    shape: AttentionShape, causal: bool, query_lens: tuple[int, ...], key_lens: tuple[int, ...]
) -> tuple[str, ...]:
    """The providers that ``auto`` tries, in this order."""
    if shape.device.type != "cuda":
        return ("torch",)
    width = 2 * shape.num_heads * (shape.head_dim_qk + shape.head_dim_v) * (0.5 if causal else 1.0)
    sizes = [width * n * m for n, m in zip(query_lens, key_lens, strict=True) if n * m > 0]
    large = bool(sizes) and min(sizes) >= _SDPA_FIRST_FLOP
    return ("sdpa", "triton", "torch") if large else ("triton", "sdpa", "torch")


def _account(taken: str, names: tuple[str, ...], refused: list[str]) -> str:
    """The sentence that ``auto`` leaves in the plan."""
    why = f"; refused: {'; '.join(refused)}" if refused else ""
    return f"auto took {taken} of {', '.join(names)}{why}"
