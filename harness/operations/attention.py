"""The operation ``attention``: varlen softmax attention with its log-sum-exp."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ...optimized.attention import AttentionShape, attention, plan_attention
from ..batches import log_uniform, uneven_batch
from ..case import Case
from ..contract import Contract, default_contract
from ..families import FAMILIES, attention_values, tokens_of, visible_nan
from ..operation import CaseRequest, Inputs, Kernel, Outline, Rows
from ..poison import Ledger
from ..providers import BY_NAME, interpreted_tiles_refusal, known_providers, provider_refusal
from ..sampling import sample_heads, sample_queries, sample_requests

# head dimensions of models: Llama, DeepSeek-V3 expanded, GLM-5 expanded, and one that divides into no tile
GEOMETRIES = ((128, 128), (192, 128), (256, 256), (72, 40))
CPU_LOGITS = 1 << 22


class Attention:
    """See ``harness.operation.Operation``; the oracle is ``reference.attention.attention``."""

    name = "attention"
    arguments = ("q", "k", "v", "softmax_scale", "causal", "cu_seqlens_q", "cu_seqlens_k")
    optional_arguments: tuple[str, ...] = ()

    def cases(self, request: CaseRequest) -> list[Case]:
        """Smoke: every family in every dtype on a small uneven batch. Full: more batches, and model geometries."""
        rng = np.random.default_rng([request.seed, 1])
        cases = []
        for dtype in request.dtypes:
            for at, family in enumerate(FAMILIES):
                sizes = self._small_sizes(rng, request, causal=at % 2 == 0, strided=at % 3 == 1)
                cases.append(self._case(family, dtype, sizes, rng))
            cases.append(self._case("peaked", dtype, self._edge_sizes(request), rng))
            cases.append(self._case("ramp-v", dtype, self._wide_sizes(request), rng))
        if request.tier != "smoke":
            cases += self._full_cases(request, rng)
        return cases

    def _full_cases(self, request: CaseRequest, rng: np.random.Generator) -> list[Case]:
        cases = []
        geometries = [request.geometry] if request.geometry else GEOMETRIES
        for dtype in request.dtypes:
            for family in FAMILIES:
                for causal in (False, True):
                    sizes = self._small_sizes(rng, request, causal=causal, strided=not causal, longest=300, requests=6)
                    cases.append(self._case(family, dtype, sizes, rng))
            for d_qk, d_v in geometries:
                for family, longest, queries in (("diffuse", 8192, 512), ("peaked", 1000, 129), ("ramp-v", 2049, 65)):
                    sizes = self._sizes(
                        request, d_qk=d_qk, d_v=d_v, num_heads=request.heads or 16, num_kv_heads=request.heads or 16
                    )
                    batch = uneven_batch(rng, requests=5, longest=longest, most_queries=queries, chunk=64)
                    sizes |= {"query_lens": batch.query_lens, "key_lens": batch.context_lens, "causal": True}
                    cases.append(self._case(family, dtype, sizes, rng))
        return cases

    def _sizes(self, request: CaseRequest, **sizes: Any) -> dict[str, Any]:
        if request.heads:
            sizes |= {"num_heads": request.heads, "num_kv_heads": request.heads}
        if request.geometry:
            sizes |= dict(zip(("d_qk", "d_v"), request.geometry, strict=True))
        # never the default factor, so that a kernel that ignores the argument is found
        return {"softmax_scale": 0.83 * sizes["d_qk"] ** -0.5, "layout": "packed", **sizes}

    def _small_sizes(
        self,
        rng: np.random.Generator,
        request: CaseRequest,
        *,
        causal: bool,
        strided: bool,
        longest: int = 65,
        requests: int = 4,
    ) -> dict[str, Any]:
        batch = uneven_batch(rng, requests=requests, longest=longest, most_queries=33, chunk=17)
        group = (1, 2)[int(rng.integers(2))]
        sizes = self._sizes(request, d_qk=24, d_v=16, num_heads=2 * group, num_kv_heads=2)
        sizes |= {"layout": "strided" if strided else "packed", "causal": causal}
        if rng.integers(2):
            # a request without queries and one without keys, amid the others
            batch.query_lens[1:1], batch.context_lens[1:1] = [0, 2], [5, 0]
        return sizes | {"query_lens": batch.query_lens, "key_lens": batch.context_lens}

    def _edge_sizes(self, request: CaseRequest) -> dict[str, Any]:
        """Lengths around tile edges, causal with more queries than keys in one request: its first rows see nothing."""
        sizes = self._sizes(request, d_qk=24, d_v=16, num_heads=2, num_kv_heads=1)
        return sizes | {"query_lens": [1, 5, 15, 17, 70], "key_lens": [1, 3, 63, 65, 129], "causal": True}

    def _wide_sizes(self, request: CaseRequest) -> dict[str, Any]:
        """More requests, heads, groups, queries and keys than one tile or warp counts; the first request is empty."""
        sizes = self._sizes(request, d_qk=64, d_v=64, num_heads=9, num_kv_heads=3)
        query_lens, key_lens = [0, 2, 130, 1, 64, 3, 1, 5, 1, 7, 0], [0, 2, 200, 300, 64, 17, 1, 5, 128, 9, 3]
        return sizes | {"query_lens": query_lens, "key_lens": key_lens, "causal": True}

    def _case(self, family: str, dtype: str, sizes: dict[str, Any], rng: np.random.Generator) -> Case:
        if family == "exact-uniform":
            # whole powers of two, seen whole, give the representable means that the exact gate needs
            keys = [2 ** log_uniform(rng, 1, 6) for _ in sizes["key_lens"]]
            sizes = sizes | {
                "key_lens": keys,
                "query_lens": [min(n, m) for n, m in zip(sizes["query_lens"], keys, strict=True)],
            }
        logits = sizes["num_heads"] * sum(n * m for n, m in zip(sizes["query_lens"], sizes["key_lens"], strict=True))
        seed = int(rng.integers(2**31))
        return Case(op=self.name, family=family, dtype=dtype, seed=seed, sizes=sizes, needs_device=logits > CPU_LOGITS)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tensors between guard bands; in the ``strided`` layout as columns of wider rows full of NaN."""
        sizes, ledger = case.sizes, Ledger()
        generator = torch.Generator().manual_seed(case.seed)
        names = ("num_heads", "num_kv_heads", "d_qk", "d_v", "softmax_scale")
        tokens = tokens_of(sizes["query_lens"], sizes["key_lens"], causal=sizes["causal"], generator=generator)
        values = attention_values(case.family, tokens, generator=generator, **{name: sizes[name] for name in names})
        undefined = visible_nan(case.family, sizes["query_lens"], sizes["key_lens"])
        if undefined is not None:
            values[1][sum(sizes["key_lens"][: undefined[0]]) + undefined[1]] = torch.nan
        q, k, v = (tensor.to(device).to(getattr(torch, case.dtype)) for tensor in values)
        d_qk, d_v = sizes["d_qk"], sizes["d_v"]
        columns = {"q": slice(0, d_qk), "k": slice(0, d_qk), "v": slice(d_qk, d_qk + d_v)}
        width = {"q": d_qk + 8, "k": d_qk + d_v, "v": d_qk + d_v}
        arguments: dict[str, Any] = {"softmax_scale": sizes["softmax_scale"], "causal": sizes["causal"]}
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if sizes["layout"] == "strided":
                pick = _columns(columns[name])
                arguments[name] = ledger.guarded_view(name, tensor, device, pick, width=width[name])
            else:
                arguments[name] = ledger.guarded(name, tensor, device)
        for name, lens in (("cu_seqlens_q", sizes["query_lens"]), ("cu_seqlens_k", sizes["key_lens"])):
            ends = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
            arguments[name] = ledger.guarded(name, ends, device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """Rows see no key where the request has none, or where causality cuts all of them off."""
        empty, requests, undefined = [], [], []
        nan_request, _ = visible_nan(case.family, case.sizes["query_lens"], case.sizes["key_lens"]) or (-1, 0)
        for request, (n, m) in enumerate(zip(case.sizes["query_lens"], case.sizes["key_lens"], strict=True)):
            last_key = torch.arange(n) + m - n if case.sizes["causal"] else torch.full((n,), m - 1)
            empty.append(last_key < 0)
            undefined.append(torch.full((n,), request == nan_request))
            requests.append(torch.full((n,), request))
        return Outline(
            num_tokens=sum(case.sizes["query_lens"]),
            num_heads=case.sizes["num_heads"],
            d_v=case.sizes["d_v"],
            empty_rows=torch.cat(empty),
            requests=torch.cat(requests),
            nan_rows=torch.cat(undefined),
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
        for request in sample_requests(costs, budget=budget, rng=rng):
            n, m = query_lens[request], key_lens[request]
            # rows that see a NaN have no answer to compare with: they are G1's
            if n == 0 or request == nan_request:
                continue
            offset = m - n if sizes["causal"] else 0
            heads = sample_heads(sizes["num_heads"], everything=everything, rng=rng)
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
