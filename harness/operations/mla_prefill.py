"""The operation ``mla_prefill``: packed current tokens over a slot-mapped latent history."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...optimized.attention import AttentionShape
from ...optimized.mla_prefill import MlaShape, mla_prefill, plan_mla_prefill
from ...reference.mla_prefill import expand_latent, requests
from ..activations import captured_latents
from ..captures import Capture
from ..case import Case
from ..contract import Contract, default_contract
from ..families import latent_values, shared_prefixes, tokens_of, visible_nan
from ..operation import AttentionOutline, CaseRequest, Inputs, Kernel, Latent, Rows, UndefinedColumn
from ..poison import Ledger
from ..providers import BY_NAME, interpreted_tiles_refusal, known_providers, provider_refusal
from ..sampling import sample_heads, sample_queries, sample_requests
from ._mla_prefill_cases import CPU_PRODUCTS, LAYOUTS, captured_call, expanded_products, mla_prefill_cases
from ._mla_prefill_layout import caches_of, far_apart, slots_of, stored

SIZES = ("num_heads", "kv_lora_rank", "d_nope", "d_rope", "d_v", "softmax_scale")


class MlaPrefill:
    """See ``harness.operation.Operation``; the oracle is ``reference.mla_prefill.mla_prefill``."""

    name = "mla_prefill"
    arguments = (
        "q",
        "kv_c",
        "k_pe",
        "kv_b_proj",
        "softmax_scale",
        "cu_seqlens",
        "slot_table",
        "request_rows",
        "context_lens",
        "history_chunk_size",
    )
    optional_arguments = ("history_chunk_size",)
    results = ("out", "lse")
    captured_from = "mla_prefill"

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_mla_prefill_cases``."""
        return mla_prefill_cases(request, self.name)

    def captured_cases(self, capture: Capture, dtype: str, seed: int) -> list[Case]:
        """The call as it was, its cache scattered anew."""
        sizes = captured_call(capture)
        large = expanded_products(sizes) > CPU_PRODUCTS
        return [Case(op=self.name, family="captured", dtype=dtype, seed=seed, sizes=sizes, needs_device=large)]

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Values of the family, scattered over permuted slots of a cache that is NaN wherever no token lies.

        In ``leverage`` the first and the last slot hold a lure instead, the copy of a key that queries are drawn to.
        """
        sizes, ledger = case.sizes, Ledger()
        generator = torch.Generator().manual_seed(case.seed)
        query_lens, context_lens = sizes["query_lens"], sizes["context_lens"]
        prefixes = _prefixes(case)
        tokens = tokens_of(query_lens, context_lens, causal=True, generator=generator, prefixes=prefixes)
        if case.family == "captured":
            values = captured_latents(sizes["captured"], query_lens, context_lens)
        else:
            values = latent_values(case.family, tokens, generator=generator, **{name: sizes[name] for name in SIZES})
        undefined = visible_nan(case.family, query_lens, context_lens)
        if undefined is not None:
            values[1][sum(context_lens[: undefined[0]]) + undefined[1]] = torch.nan
        q, kv_c, k_pe, kv_b_proj = (tensor.to(device).to(getattr(torch, case.dtype)) for tensor in values)
        slots, slot_table, rows = slots_of(context_lens, tokens.shared, generator)
        num_slots = len(slots) + len(slots) // 4 + 2
        if sizes["layout"] == "vast":
            slots, slot_table, num_slots = far_apart(slots, slot_table, num_slots, sizes["kv_lora_rank"], device)
        lures = tokens.targets[[0, -1]] if case.family == "leverage" else None
        arguments: dict[str, Any] = {
            "q": ledger.guarded("q", q, device),
            "kv_b_proj": ledger.guarded("kv_b_proj", kv_b_proj, device),
            "softmax_scale": sizes["softmax_scale"],
            "history_chunk_size": sizes["history_chunk_size"],
        }
        caches = caches_of(kv_c, k_pe, slots, num_slots, lures)
        arguments |= stored(ledger, caches, bundled=sizes["layout"] == "bundled", device=device)
        ends = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
        integers = {"cu_seqlens": ends, "slot_table": slot_table, "request_rows": rows}
        integers["context_lens"] = torch.tensor(context_lens, dtype=torch.int32)
        arguments |= {name: ledger.guarded(name, tensor, device) for name, tensor in integers.items()}
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> AttentionOutline:
        """Every query sees at least itself."""
        query_lens, context_lens = case.sizes["query_lens"], case.sizes["context_lens"]
        nan_request, _ = visible_nan(case.family, query_lens, context_lens) or (-1, 0)
        requests = torch.repeat_interleave(torch.arange(len(query_lens)), torch.tensor(query_lens))
        return AttentionOutline(
            num_tokens=sum(query_lens),
            num_heads=case.sizes["num_heads"],
            d_v=case.sizes["d_v"],
            empty_rows=torch.zeros(sum(query_lens), dtype=torch.bool),
            requests=requests,
            nan_rows=requests == nan_request,
            undefined_columns=_undefined_columns(case, requests),
        )

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """The oracle's own steps (slots, expansion) for the sampled queries and heads of the sampled requests."""
        sizes, rng = case.sizes, np.random.default_rng(case.seed)
        costs = [n * c * sizes["num_heads"] for n, c in zip(sizes["query_lens"], sizes["context_lens"], strict=True)]
        everything, chunk = sum(costs) <= budget, sizes["history_chunk_size"]
        names = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
        parts = requests(*(arguments[name].cpu() for name in names))
        w_uk, w_uv = arguments["kv_b_proj"].double().split([sizes["d_nope"], sizes["d_v"]], dim=1)
        device = arguments["q"].device
        nan_request, _ = visible_nan(case.family, sizes["query_lens"], sizes["context_lens"]) or (-1, 0)
        for request in sample_requests(costs, budget=budget, rng=rng):
            # rows that see a NaN have no answer to compare with: they are G1's
            if request == nan_request:
                continue
            queries, slots, last_key = parts[request]
            history = len(slots) - len(last_key)
            heads = sample_heads(sizes["num_heads"], everything=everything, rng=rng)
            if case.family == "nonfinite-v":
                heads = heads[heads < sizes["num_heads"] - 1]
            if not len(heads):
                continue
            chosen = sample_queries(len(last_key), first_position=history, chunk=chunk, everything=everything, rng=rng)
            kv_c, k_pe = (arguments[name][slots.to(device)].double() for name in ("kv_c", "k_pe"))
            k, v = expand_latent(kv_c, k_pe, w_uk[heads], w_uv[heads])
            k_terms, v_terms = expand_latent(kv_c.square(), k_pe[:, :0], w_uk[heads].square(), w_uv[heads].square())
            yield Rows(
                request=request,
                tokens=queries.start + chosen,
                positions=last_key[chosen],
                heads=heads,
                q=arguments["q"][queries][chosen][:, heads].double(),
                k=k,
                v=v,
                last_key=last_key[chosen].to(device),
                softmax_scale=sizes["softmax_scale"],
                projected_dims=sizes["d_nope"],
                projection_depth=sizes["kv_lora_rank"],
                k_terms=k_terms.sqrt(),
                v_terms=v_terms.sqrt(),
                latent=Latent(rows=kv_c, w_uk=w_uk[heads], w_uv=w_uv[heads]),
                split_ends=(*range(chunk, history, chunk), *([history] if history else []), len(slots)),
                slots=slots,
            )

    def default_contract(self, case: Case) -> Contract:
        """Keys and values are projected inside, and a request with history is merged."""
        return default_contract(case.dtype, projected=True, splits=True)

    def kernels(self) -> list[Kernel]:
        """The chunked twin with each provider that this machine can import."""
        return [_kernel(provider) for provider in known_providers()]


def _prefixes(case: Case) -> list[int] | None:
    """Tokens that each request shares with the one before it, None where the layout shares none.

    Raises:
        ValueError: If there is no such layout, or its requests would share a token that only one of them may see.
    """
    layout = case.sizes["layout"]
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout != "shared":
        return None
    if case.family == "visible-nan":
        raise ValueError("layout must not share slots in visible-nan, whose NaN is seen by one request")
    return shared_prefixes(case.sizes["query_lens"], case.sizes["context_lens"])


def _undefined_columns(case: Case, requests: Tensor) -> tuple[UndefinedColumn, ...]:
    """In ``nonfinite-v`` the last column of the last head, whose projection is undefined."""
    if case.family != "nonfinite-v":
        return ()
    heads, everyone = case.sizes["num_heads"], torch.ones_like(requests, dtype=torch.bool)
    return (
        UndefinedColumn(rows=everyone, heads=slice(heads - 1, heads), dim=case.sizes["d_v"] - 1, value=float("nan")),
    )


def _kernel(provider: str) -> Kernel:
    def contract(case: Case) -> Contract:
        return default_contract(case.dtype, projected=True, splits=True).promising(
            capturable=True,
            # now and then cuDNN gives another log-sum-exp for the same single query
            deterministic=provider != "sdpa",
        )

    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        q, kv_c, k_pe, kv_b_proj = (arguments[name] for name in ("q", "kv_c", "k_pe", "kv_b_proj"))
        d_nope = q.shape[2] - k_pe.shape[1]
        shape = MlaShape(
            num_heads=q.shape[1],
            kv_lora_rank=kv_c.shape[1],
            d_nope=d_nope,
            d_rope=k_pe.shape[1],
            d_v=kv_b_proj.shape[1] - d_nope,
        )
        names = ("cu_seqlens", "slot_table", "request_rows", "context_lens")
        plan = plan_mla_prefill(
            *(arguments[name] for name in names),
            shape=shape,
            dtype=q.dtype,
            num_slots=len(kv_c),
            history_chunk_size=arguments["history_chunk_size"],
            provider=provider,
        )
        return lambda: mla_prefill(q, kv_c, k_pe, kv_b_proj, softmax_scale=arguments["softmax_scale"], plan=plan)

    def unsupported(case: Case, device: torch.device) -> str | None:
        sizes = case.sizes
        shape = AttentionShape(
            device=device,
            dtype=getattr(torch, case.dtype),
            num_heads=sizes["num_heads"],
            num_kv_heads=sizes["num_heads"],
            head_dim_qk=sizes["d_nope"] + sizes["d_rope"],
            head_dim_v=sizes["d_v"],
        )
        query_lens, context_lens, chunk = sizes["query_lens"], sizes["context_lens"], sizes["history_chunk_size"]
        refused = provider_refusal(provider, shape, causal=True, query_lens=query_lens, key_lens=query_lens)
        if refused is None and context_lens != query_lens:
            passes = [min(chunk, max(context_lens))]
            refused = provider_refusal(provider, shape, causal=False, query_lens=query_lens[:1], key_lens=passes)
        if refused is not None:
            return refused
        # the passes over the history, one after the other, are as many key tiles as its chunks need
        keys = [size for n, c in zip(query_lens, context_lens, strict=True) for size in _passes(n, c, chunk)]
        return interpreted_tiles_refusal(
            provider, device, heads=sizes["num_heads"], query_lens=query_lens, key_lens=keys
        )

    return Kernel(
        name=f"mla_prefill[{provider}]",
        contract=contract,
        bind=bind,
        unsupported=unsupported,
        by_name=provider in BY_NAME,
    )


def _passes(queries: int, context: int, chunk: int) -> list[int]:
    """Keys of each pass of one request: its current tokens, then its history in chunks."""
    history = context - queries
    return [queries, *(min(chunk, history - at) for at in range(0, history, chunk))]


OPERATION = MlaPrefill()
