"""The operation ``attention``: varlen softmax attention with its log-sum-exp."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...optimized.attention import AttentionShape, attention, plan_attention
from ...reference.mla_prefill import expand_latent
from ..activations import captured_latents, captured_requests, captured_tensors
from ..captures import Capture
from ..case import Case
from ..contract import Contract, default_contract
from ..families import attention_values, key_seen_by_all, nonfinite_dims, tokens_of, visible_nan
from ..operation import AttentionOutline, CaseRequest, Inputs, Kernel, Rows, UndefinedColumn
from ..poison import Ledger
from ..providers import BY_NAME, interpreted_tiles_refusal, known_providers, provider_refusal
from ..sampling import sample_heads, sample_queries, sample_requests
from ._attention_cases import CPU_LOGITS, LAYOUTS, attention_cases, captured_call, count_logits


class Attention:
    """See ``harness.operation.Operation``; the oracle is ``reference.attention.attention``."""

    name = "attention"
    arguments = ("q", "k", "v", "softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k")
    optional_arguments: tuple[str, ...] = ()
    results = ("out", "lse")
    captured_from = "attention"

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_attention_cases``."""
        return attention_cases(request, self.name)

    def captured_cases(self, capture: Capture, dtype: str, seed: int) -> list[Case]:
        """The call as it was."""
        sizes = captured_call(capture)
        large = count_logits(sizes) > CPU_LOGITS
        return [Case(op=self.name, family="captured", dtype=dtype, seed=seed, sizes=sizes, needs_device=large)]

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tensors between guard bands, or, by layout, columns of wider rows whose rest is NaN."""
        sizes, ledger = case.sizes, Ledger()
        values = [tensor.to(device).to(getattr(torch, case.dtype)) for tensor in _values(case)]
        arguments: dict[str, Any] = {"softmax_scale": sizes["softmax_scale"], "causal": sizes["causal"]}
        arguments |= _placed(ledger, dict(zip("qkv", values, strict=True)), sizes["layout"], device)
        for name, lens in (("cu_seqlens_q", sizes["query_lens"]), ("cu_seqlens_k", sizes["key_lens"])):
            ends = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
            arguments[name] = ledger.guarded(name, ends, device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> AttentionOutline:
        """Rows see no key where the request has none, or where causality cuts all of them off."""
        empty, requests, undefined = [], [], []
        nan_request, _ = visible_nan(case.family, case.sizes["query_lens"], case.sizes["key_lens"]) or (-1, 0)
        for request, (n, m) in enumerate(zip(case.sizes["query_lens"], case.sizes["key_lens"], strict=True)):
            last_key = torch.arange(n) + m - n if case.sizes["causal"] else torch.full((n,), m - 1)
            empty.append(last_key < 0)
            undefined.append(torch.full((n,), request == nan_request))
            requests.append(torch.full((n,), request))
        owners, (request, _, heads) = torch.cat(requests), _undefined_values(case) or (-1, 0, slice(0))
        columns = nonfinite_dims(case.sizes["d_v"]).items() if request >= 0 else ()
        return AttentionOutline(
            num_tokens=sum(case.sizes["query_lens"]),
            num_heads=case.sizes["num_heads"],
            d_v=case.sizes["d_v"],
            empty_rows=torch.cat(empty),
            requests=owners,
            nan_rows=torch.cat(undefined),
            undefined_columns=tuple(
                UndefinedColumn(rows=owners == request, heads=heads, dim=dim, value=value) for dim, value in columns
            ),
        )

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """The sampled rows of each sampled request, keys and values repeated to the query heads."""
        sizes, rng = case.sizes, np.random.default_rng(case.seed)
        query_lens, key_lens = sizes["query_lens"], sizes["key_lens"]
        costs = [n * m * sizes["num_heads"] for n, m in zip(query_lens, key_lens, strict=True)]
        everything = sum(costs) <= budget
        starts_q, starts_k = np.cumsum([0, *query_lens]), np.cumsum([0, *key_lens])
        group = sizes["num_heads"] // sizes["num_kv_heads"]
        nan_request, _ = visible_nan(case.family, query_lens, key_lens) or (-1, 0)
        undefined_request, _, undefined_heads = _undefined_values(case) or (-1, 0, slice(0))
        for request in sample_requests(costs, budget=budget, rng=rng):
            n, m = query_lens[request], key_lens[request]
            # rows that see a NaN have no answer to compare with: they are G1's
            if n == 0 or request == nan_request:
                continue
            offset = m - n if sizes["causal"] else 0
            heads = sample_heads(sizes["num_heads"], everything=everything, rng=rng)
            if request == undefined_request:
                # the last of all, and the same of them
                heads = heads[heads < undefined_heads.start]
            if not len(heads):
                continue
            chosen = sample_queries(n, first_position=max(offset, 0), chunk=64, everything=everything, rng=rng)
            tokens, keys = int(starts_q[request]) + chosen, slice(int(starts_k[request]), int(starts_k[request + 1]))
            last_key = chosen + offset if sizes["causal"] else torch.full_like(chosen, m - 1)
            yield Rows(
                request=request,
                tokens=tokens,
                positions=chosen + offset,
                heads=heads,
                q=arguments["q"][tokens][:, heads].double(),
                k=arguments["k"][keys][:, heads // group].double(),
                v=arguments["v"][keys][:, heads // group].double(),
                last_key=last_key.to(arguments["q"].device),
                softmax_scale=sizes["softmax_scale"],
            )

    def default_contract(self, case: Case) -> Contract:
        """Nothing is projected and nothing merged."""
        return default_contract(case.dtype, projected=False, splits=False)

    def kernels(self) -> list[Kernel]:
        """The twin with each provider that this machine can import."""
        return [_kernel(provider) for provider in known_providers()]


def _values(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q``, ``k`` and ``v`` of the family, float32, with what is undefined in them."""
    sizes, generator = case.sizes, torch.Generator().manual_seed(case.seed)
    query_lens, key_lens = sizes["query_lens"], sizes["key_lens"]
    if case.family == "captured" and "k" in captured_tensors(sizes["captured"]):
        q, k, v = captured_requests(captured_tensors(sizes["captured"]), query_lens, key_lens, ("k", "v"))
        return q.float(), k.float(), v.float()
    if case.family == "captured":
        q, kv_c, k_pe, weights = (t.float() for t in captured_latents(sizes["captured"], query_lens, key_lens))
        w_uk, w_uv = weights.split([weights.shape[1] - sizes["d_v"], sizes["d_v"]], dim=1)
        return q, *expand_latent(kv_c, k_pe, w_uk, w_uv)
    tokens = tokens_of(query_lens, key_lens, causal=sizes["causal"], generator=generator)
    names = ("num_heads", "num_kv_heads", "d_qk", "d_v", "softmax_scale")
    q, k, v = attention_values(case.family, tokens, generator=generator, **{name: sizes[name] for name in names})
    starts = np.cumsum([0, *key_lens])
    nan_key = visible_nan(case.family, query_lens, key_lens)
    if nan_key is not None:
        k[starts[nan_key[0]] + nan_key[1]] = torch.nan
    undefined = _undefined_values(case)
    if undefined is not None:
        for dim, value in nonfinite_dims(sizes["d_v"]).items():
            v[starts[undefined[0]] + undefined[1], -1, dim] = value
    if case.family == "nonfinite-v":
        # nobody looks at these: NaN in keys whose values are finite, and in values whose keys are
        for request in (at for at, n in enumerate(query_lens) if n == 0):
            k[starts[request] : starts[request + 1] : 2] = torch.nan
            v[starts[request] + 1 : starts[request + 1] : 2] = torch.nan
    return q, k, v


def _undefined_values(case: Case) -> tuple[int, int, slice] | None:
    """Request and position of the key whose values are not finite in the last key head, and that head's query heads."""
    found = key_seen_by_all(case.sizes["query_lens"], case.sizes["key_lens"])
    if case.family != "nonfinite-v" or found is None:
        return None
    heads, kv_heads = case.sizes["num_heads"], case.sizes["num_kv_heads"]
    return *found, slice(heads - heads // kv_heads, heads)


def _placed(
    ledger: Ledger, tensors: dict[str, torch.Tensor], layout: str, device: torch.device
) -> dict[str, torch.Tensor]:
    """The tensors by name: ``packed``; ``strided`` with gaps between heads; ``fused`` side by side in one row a token.

    Raises:
        ValueError: If there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "packed":
        return {name: ledger.guarded(name, tensor, device) for name, tensor in tensors.items()}
    d_qk, d_v = tensors["q"].shape[2], tensors["v"].shape[2]
    if layout == "strided":
        columns = {"q": slice(0, d_qk), "k": slice(0, d_qk), "v": slice(d_qk, d_qk + d_v)}
        width = {"q": d_qk + 8, "k": d_qk + d_v, "v": d_qk + d_v}
        return {
            name: ledger.guarded_view(name, tensor, device, _columns(columns[name]), width=width[name])
            for name, tensor in tensors.items()
        }
    widths = [tensor.shape[1] * tensor.shape[2] for tensor in tensors.values()]
    rows = tensors["q"].new_full((max(map(len, tensors.values())), sum(widths)), torch.nan)
    for part, tensor in zip(rows.split(widths, dim=1), tensors.values(), strict=True):
        part[: len(tensor)] = tensor.flatten(1)
    parts = ledger.guarded("qkv", rows, device).split(widths, dim=1)
    return {
        name: part[: len(tensor)].unflatten(1, tensor.shape[1:])
        for part, (name, tensor) in zip(parts, tensors.items(), strict=True)
    }


def _columns(columns: slice) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda buffer: buffer[..., columns]


def attention_shape(case: Case, device: torch.device) -> AttentionShape:
    """What a provider is asked about."""
    return AttentionShape(
        device=device,
        dtype=getattr(torch, case.dtype),
        num_heads=case.sizes["num_heads"],
        num_kv_heads=case.sizes["num_kv_heads"],
        head_dim_qk=case.sizes["d_qk"],
        head_dim_v=case.sizes["d_v"],
    )


def _kernel(provider: str) -> Kernel:
    def contract(case: Case) -> Contract:
        return default_contract(case.dtype, projected=False, splits=False).promising(
            capturable=True,
            # now and then cuDNN gives another log-sum-exp for the same single query
            deterministic=provider != "sdpa",
        )

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, k, v = arguments["q"], arguments["k"], arguments["v"]
        shape = AttentionShape(
            device=q.device,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim_qk=q.shape[2],
            head_dim_v=v.shape[2],
        )
        plan = plan_attention(
            arguments["cu_seqlens_q"],
            arguments["cu_seqlens_k"],
            causal=arguments["causal"],
            shape=shape,
            provider=provider,
        )
        return lambda: attention(q, k, v, softmax_scale=arguments["softmax_scale"], plan=plan)

    def unsupported(case: Case, device: torch.device) -> str | None:
        sizes = case.sizes
        lens = {"query_lens": sizes["query_lens"], "key_lens": sizes["key_lens"]}
        refused = provider_refusal(provider, attention_shape(case, device), causal=sizes["causal"], **lens)
        return refused or interpreted_tiles_refusal(provider, device, heads=sizes["num_heads"], **lens)

    return Kernel(
        name=f"attention[{provider}]",
        contract=contract,
        bind=bind,
        unsupported=unsupported,
        by_name=provider in BY_NAME,
    )


OPERATION = Attention()
