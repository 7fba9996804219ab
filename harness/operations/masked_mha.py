"""The operation ``masked_mha``: attention to the keys that bits select, as far as causality lets a query look."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...reference.mla_prefill import expand_latent
from ..activations import captured_latents
from ..case import Case
from ..contract import Contract, default_contract
from ..families import Tokens, attention_values, nonfinite_dims, tokens_of
from ..operation import AttentionOutline, CaseRequest, Inputs, Kernel, Rows, UndefinedColumn
from ..poison import Ledger
from ..sampling import sample_heads, sample_queries, sample_requests
from ._masked_mha_cases import LAYOUTS, masked_mha_cases
from ._masked_mha_kernels import masked_mha_kernels
from ._masked_mha_selection import packed, request_bits, visible_keys

# the value of a key that no query sees: large enough to show, small enough for float16 to hold it scaled
BAIT = -1024.0


class MaskedMha:
    """See ``harness.operation.Operation``; the oracle is ``reference.masked_mha.masked_mha``."""

    name = "masked_mha"
    arguments = (
        "q",
        "k",
        "v",
        "mask",
        "softmax_scale",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "query_starts",
        "key_starts",
    )
    optional_arguments: tuple[str, ...] = ()
    results = ("out", "lse")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_masked_mha_cases``."""
        return masked_mha_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tensors between guard bands, whose bits are all set; keys that no query sees are NaN.

        Their values are finite, which a value must be wherever its weight is 0, and large.
        """
        sizes, ledger = case.sizes, Ledger()
        values = [tensor.to(device).to(getattr(torch, case.dtype)) for tensor in _values(case)]
        bits = [request_bits(sizes, request, counted=_counted(case)) for request in range(len(sizes["query_lens"]))]
        tensors = dict(zip("qkv", values, strict=True)) | {"mask": packed(torch.cat(bits))}
        arguments: dict[str, Any] = {"softmax_scale": sizes["softmax_scale"]}
        arguments |= _placed(ledger, tensors, sizes["layout"], device)
        for name, lens in (("cu_seqlens_q", sizes["query_lens"]), ("cu_seqlens_k", sizes["key_lens"])):
            ends = torch.tensor([0, *np.cumsum(lens).tolist()], dtype=torch.int32)
            arguments[name] = ledger.guarded(name, ends, device)
        for name in ("query_starts", "key_starts"):
            arguments[name] = ledger.guarded(name, torch.tensor(sizes[name], dtype=torch.int32), device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> AttentionOutline:
        """Rows see no key where nothing is selected, or nothing but the future."""
        sizes, visible = case.sizes, _visible(case)
        owners = torch.repeat_interleave(torch.arange(len(visible)), torch.tensor(sizes["query_lens"]))
        nan_key, undefined = _nan_key(case, visible), _undefined_values(case, visible)
        seen = [
            keys[:, nan_key[1]] if nan_key is not None and nan_key[0] == at else torch.zeros(len(keys)).bool()
            for at, keys in enumerate(visible)
        ]
        columns = () if undefined is None else nonfinite_dims(sizes["d_v"]).items()
        return AttentionOutline(
            num_tokens=sum(sizes["query_lens"]),
            num_heads=sizes["num_heads"],
            d_v=sizes["d_v"],
            empty_rows=torch.cat([~keys.any(1) for keys in visible]),
            requests=owners,
            nan_rows=torch.cat(seen),
            lists=("mask",),
            undefined_columns=tuple(
                UndefinedColumn(rows=owners == undefined[0], heads=undefined[2], dim=dim, value=value)
                for dim, value in columns
                if undefined is not None
            ),
        )

    def rows(self, case: Case, arguments: dict[str, Any], *, budget: int) -> Iterator[Rows]:
        """The sampled rows of each sampled request; what none of them sees is 0, whatever it holds."""
        sizes, rng, visible = case.sizes, np.random.default_rng(case.seed), _visible(case)
        query_lens, key_lens = sizes["query_lens"], sizes["key_lens"]
        costs = [n * m * sizes["num_heads"] for n, m in zip(query_lens, key_lens, strict=True)]
        everything = sum(costs) <= budget
        starts_q, starts_k = np.cumsum([0, *query_lens]), np.cumsum([0, *key_lens])
        group, device = sizes["num_heads"] // sizes["num_kv_heads"], arguments["q"].device
        nan_key = _nan_key(case, visible) or (-1, 0)
        undefined_request, _, undefined_heads = _undefined_values(case, visible) or (-1, 0, slice(0))
        for request in sample_requests(costs, budget=budget, rng=rng):
            n, m = query_lens[request], key_lens[request]
            first_query, first_key = sizes["query_starts"][request], sizes["key_starts"][request]
            heads = sample_heads(sizes["num_heads"], everything=everything, rng=rng)
            if request == undefined_request:
                heads = heads[heads < undefined_heads.start]
            chosen = sample_queries(n, first_position=max(first_query, 0), chunk=64, everything=everything, rng=rng)
            if request == nan_key[0]:
                # rows that see a NaN have no answer to compare with: they are G1's
                chosen = chosen[~visible[request][chosen, nan_key[1]]]
            if not len(heads) or not len(chosen):
                continue
            selected = visible[request][chosen]
            hidden = ~selected.any(0)[:, None, None].to(device)
            keys = slice(int(starts_k[request]), int(starts_k[request + 1]))
            k, v = (arguments[name][keys][:, heads // group].double().masked_fill(hidden, 0.0) for name in ("k", "v"))
            tokens, positions = int(starts_q[request]) + chosen, chosen + first_query
            yield Rows(
                request=request,
                tokens=tokens,
                positions=positions,
                heads=heads,
                q=arguments["q"][tokens][:, heads].double(),
                k=k,
                v=v,
                last_key=(positions - first_key).clamp(min=-1, max=m - 1).to(device),
                softmax_scale=sizes["softmax_scale"],
                selected=selected.to(device),
            )

    def default_contract(self, case: Case) -> Contract:
        """Nothing is projected inside, and nothing has to be merged."""
        return default_contract(case.dtype, projected=False, splits=False)

    def kernels(self) -> list[Kernel]:
        """See ``_masked_mha_kernels``."""
        return masked_mha_kernels()


def _counted(case: Case) -> bool:
    """Whether the queries see ``2^k`` keys, so that means are exact."""
    return case.family == "exact-uniform"


def _visible(case: Case) -> list[Tensor]:
    """The keys that each query sees, request by request."""
    return [visible_keys(case.sizes, at, counted=_counted(case)) for at in range(len(case.sizes["query_lens"]))]


def _values(case: Case) -> tuple[Tensor, ...]:
    """``q``, ``k`` and ``v`` of the family, float32, with what is undefined in them and what no query sees."""
    sizes, generator, visible = case.sizes, torch.Generator().manual_seed(case.seed), _visible(case)
    if case.family == "captured":
        lens = sizes["query_lens"], sizes["key_lens"]
        q, kv_c, k_pe, weights = (t.float() for t in captured_latents(sizes["captured"], *lens))
        w_uk, w_uv = weights.split([weights.shape[1] - sizes["d_v"], sizes["d_v"]], dim=1)
        k, v = expand_latent(kv_c, k_pe, w_uk, w_uv)
    else:
        names = ("num_heads", "num_kv_heads", "d_qk", "d_v", "softmax_scale")
        tokens = _tokens(case, visible, generator)
        q, k, v = attention_values(case.family, tokens, generator=generator, **{name: sizes[name] for name in names})
    unseen = ~torch.cat([keys.any(0) for keys in visible])
    k[unseen], v[unseen] = torch.nan, BAIT
    starts = np.cumsum([0, *sizes["key_lens"]])
    nan_key, undefined = _nan_key(case, visible), _undefined_values(case, visible)
    if nan_key is not None:
        k[starts[nan_key[0]] + nan_key[1]] = torch.nan
    if undefined is not None:
        for dim, value in nonfinite_dims(sizes["d_v"]).items():
            v[starts[undefined[0]] + undefined[1], -1, dim] = value
    for request, n in enumerate(sizes["query_lens"]):
        if n == 0:
            # nobody multiplies them by anything
            v[starts[request] : starts[request + 1]] = torch.nan
    return q, k, v


def _tokens(case: Case, visible: list[Tensor], generator: torch.Generator) -> Tokens:
    """The tokens of the batch: every other query is drawn to the last key that it sees, the rest to any one."""
    sizes, targets, start = case.sizes, [], 0
    for keys in visible:
        n, m = keys.shape
        drawn = torch.rand(n, m, generator=generator).masked_fill(~keys, -1.0)
        last = torch.where(keys, torch.arange(m), -1)
        chosen = torch.where((torch.arange(n) % 2 == 0)[:, None], last, drawn)
        best = chosen.argmax(1) if m else torch.zeros(n, dtype=torch.long)
        targets.append(torch.where(keys.any(1), best + start, -1))
        start += m
    tokens = tokens_of(sizes["query_lens"], sizes["key_lens"], causal=False, generator=generator)
    counts = torch.cat([keys.sum(1) for keys in visible])
    return replace(tokens, targets=torch.cat(targets), visible=counts)


def _nan_key(case: Case, visible: list[Tensor]) -> tuple[int, int] | None:
    """Request and key that is NaN in ``visible-nan``: seen by as many of its queries as possible, but not by all.

    A key of the request with the fewest queries; one that all of them see where no other key is seen at all.
    """
    if case.family != "visible-nan":
        return None
    return _fewest(visible, lambda counts, n: (counts > 0) & (counts < n)) or _fewest(
        visible, lambda counts, n: counts > 0
    )


def _fewest(visible: list[Tensor], fits: Callable[[Tensor, int], Tensor]) -> tuple[int, int] | None:
    """The request with the fewest queries that has a fitting key, told by how many of its queries see it, and that key.

    Of several keys the one that most queries see; None if no request has any.
    """
    found = []
    for request, keys in enumerate(visible):
        counts = keys.sum(0)
        fitting = counts.masked_fill(~fits(counts, len(keys)), 0)
        if bool((fitting > 0).any()):
            found.append((len(keys), request, int(fitting.argmax())))
    return min(found)[1:] if found else None


def _undefined_values(case: Case, visible: list[Tensor]) -> tuple[int, int, slice] | None:
    """Request and key whose values are not finite in the last key head, and that head's query heads.

    All queries of the request see the key: a weight of 0 times such a value is no number.
    """
    found = _fewest(visible, lambda counts, n: counts == n) if case.family == "nonfinite-v" else None
    if found is None:
        return None
    heads, kv_heads = case.sizes["num_heads"], case.sizes["num_kv_heads"]
    return *found, slice(heads - heads // kv_heads, heads)


def _placed(ledger: Ledger, tensors: dict[str, Tensor], layout: str, device: torch.device) -> dict[str, Tensor]:
    """The tensors by name: ``packed``; ``strided`` with gaps between heads and words; ``beside``, keys beside values.

    Raises:
        ValueError: If there is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "packed":
        return {name: ledger.guarded(name, tensor, device) for name, tensor in tensors.items()}
    placed, (d_qk, d_v) = {}, (tensors[name].shape[2] for name in "kv")
    if layout == "beside":
        rows = ledger.guarded("kv", torch.cat([tensors.pop("k"), tensors.pop("v")], dim=-1), device)
        placed = {"k": rows[..., :d_qk], "v": rows[..., d_qk:]}
    first, gap = {"v": d_qk}, {"q": 8, "k": d_v, "v": 0, "mask": 1}
    for name, tensor in tensors.items():
        start, width = first.get(name, 0), tensor.shape[-1]
        columns = slice(start, start + width)
        wide = start + width + gap[name]
        placed[name] = ledger.guarded_view(name, tensor, device, _columns(columns), width=wide)
    return placed


def _columns(columns: slice) -> Callable[[Tensor], Tensor]:
    return lambda buffer: buffer[..., columns]


OPERATION = MaskedMha()
