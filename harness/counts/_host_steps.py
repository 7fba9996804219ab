"""The steps whose host cost is counted, by operation and name: model geometries, few tokens.

Counts depend on requests, passes and dtypes, not on how many tokens there are; heads are as few as a group needs.
"""

from typing import Any

from ..case import Case


def host_steps(op: str) -> dict[str, Case]:
    """The steps of an operation by name; none for an operation that has not been given any."""
    return {
        name: Case(op=op, family="diffuse", dtype="bfloat16", seed=0, sizes=sizes)
        for name, sizes in _STEPS.get(op, {}).items()
    }


def _attention(query_lens: list[int], key_lens: list[int], **sizes: Any) -> dict[str, Any]:
    lens = {"query_lens": query_lens, "key_lens": key_lens}
    return lens | {"softmax_scale": 0.0721, "layout": "packed"} | sizes


def _mla_prefill(query_lens: list[int], context_lens: list[int], chunk: int) -> dict[str, Any]:
    # DeepSeek-V3.2, as a serving engine keeps its cache: latent and rope part in one row
    return {
        "num_heads": 2,
        "kv_lora_rank": 512,
        "d_nope": 128,
        "d_rope": 64,
        "d_v": 128,
        "softmax_scale": 0.0721,
        "query_lens": query_lens,
        "context_lens": context_lens,
        "history_chunk_size": chunk,
        "layout": "bundled",
    }


def _token_scores(mode: str, **candidates: int) -> dict[str, Any]:
    seen = {"mode": mode, "window": 4, "behind": 0, "unobserved": 0, "ranges": "all"}
    first_and_last = {"candidate_start": 0, "recent_keep_tokens": 0}
    return _mla_prefill([5, 1, 16], [69, 1, 48], 16) | seen | first_and_last | candidates


def _masked_mha(query_lens: list[int], context_lens: list[int], first_keys: list[int]) -> dict[str, Any]:
    starts = [context - queries for queries, context in zip(query_lens, context_lens, strict=True)]
    keys = [context - first for first, context in zip(first_keys, context_lens, strict=True)]
    places = {"query_lens": query_lens, "key_lens": keys, "query_starts": starts, "key_starts": first_keys}
    bits = {"mask_words": 3, "selection_seeds": [1] * len(starts), "key_holes": [0] * len(starts)}
    return places | bits | {"softmax_scale": 0.0721, "layout": "beside"}


def _topk_mask(query_lens: list[int], context_lens: list[int], chunk: int) -> dict[str, Any]:
    # a chunk that begins within a word, and the tile of the kernel that reads the mask
    tile = {"tile_queries": 64, "tile_keys": 64, "layout": "packed", "exact_cap": False}
    lens = {"query_lens": query_lens, "context_lens": context_lens, "topk": 64}
    return lens | {"chunk_start": chunk, "chunk_size": 2 * chunk} | tile


def _indexer(query_lens: list[int], key_lens: list[int]) -> dict[str, Any]:
    lens = {"query_lens": query_lens, "key_lens": key_lens}
    return {"num_heads": 2, "head_dim": 128, "topk": 16, "layout": "packed"} | lens


def _sparse_mla(query_lens: list[int], context_lens: list[int], **given: str) -> dict[str, Any]:
    # DeepSeek-V3.2: rows of 576 columns, the first 512 of which are values
    widths = {"num_heads": 2, "d_qk": 576, "d_v": 512, "softmax_scale": 0.0721, "topk": 64}
    lists = {"source": "uniform", "order": "shuffled", "holes": "none", "repeats": "none", "tail": "padding"}
    lens = {"query_lens": query_lens, "context_lens": context_lens, "layout": "packed"}
    return widths | lists | lens | {"lengths": "all", "sink": "none"} | given


def _kda(seq_lens: list[int], gate: str, **given: Any) -> dict[str, Any]:
    # as many channels as in the models, states in float32, value columns first
    widths = {"num_heads": 2, "num_v_heads": 2, "head_dim_k": 128, "head_dim_v": 128, "scale": 0.0884}
    layer = {"gate": gate, "bound": 5.0, "amplitude": True, "beta_is_logits": True, "qk_l2norm": True}
    memory = {"state_dtype": "float32", "state_layout": "VK", "offsets": "int32", "layout": "projection", "tail": 0}
    return widths | layer | memory | {"seq_lens": seq_lens} | given


def _kda_step(seq_lens: list[int], columns: int) -> dict[str, Any]:
    pool = {"columns": columns, "accepted": "sweep", "pool": "packed", "padding": 0, "dropped": False}
    return _kda(seq_lens, "bounded") | pool


_LLAMA = {"num_heads": 8, "num_kv_heads": 2, "d_qk": 128, "d_v": 128}
_DEEPSEEK = {"num_heads": 2, "num_kv_heads": 2, "d_qk": 192, "d_v": 128}

_STEPS: dict[str, dict[str, dict[str, Any]]] = {
    "kda": {
        "3 sequences": _kda([5, 1, 70], "bounded", initial=True, checkpoints="none"),
        "3 sequences, 6 checkpoints": _kda([5, 1, 70], "softplus", initial=False, checkpoints="some"),
    },
    "kda_step": {
        "16 sequences, 1 token": _kda_step([1] * 16, 1),
        "4 sequences, drafts": _kda_step([3, 1, 0, 2], 4),
    },
    "masked_mha": {
        "3 requests": _masked_mha([5, 1, 16], [69, 1, 48], [0, 0, 0]) | _DEEPSEEK,
        "3 requests, chunks": _masked_mha([5, 1, 16], [69, 1, 48], [33, 0, 17]) | _DEEPSEEK,
    },
    "sparse_mla": {
        "3 requests": _sparse_mla([5, 1, 16], [69, 1, 48]),
        "3 requests, lengths and sinks": _sparse_mla([5, 1, 16], [69, 1, 48], lengths="ragged", sink="finite"),
    },
    "attention": {
        "4 requests": _attention([1, 5, 64, 33], [1, 5, 64, 33], causal=True, **_LLAMA),
        "1 pass over history": _attention([64], [128], causal=False, **_DEEPSEEK),
    },
    "mla_prefill": {
        "3 requests, no history": _mla_prefill([5, 1, 16], [5, 1, 16], 16),
        "3 requests, 6 chunks": _mla_prefill([5, 1, 16], [69, 1, 48], 16),
        "16 requests, 16 chunks": _mla_prefill([2] * 16, [18] * 16, 16),
    },
    "token_scores": {
        "3 requests, logits": _token_scores("logits"),
        "3 requests, one scan": _token_scores("probability"),
        "3 requests, two scans": _token_scores("probability", candidate_start=4),
    },
    "token_selection": {
        "16 requests": {
            "context_lens": [40] * 16,
            "sink": 4,
            "recent": 8,
            "part": 0.5,
            "pooling": "max",
            "kernel_size": 5,
        },
    },
    "topk_mask": {
        "1 request": _topk_mask([20], [69], 0),
        "3 requests, chunk": _topk_mask([5, 1, 16], [69, 1, 48], 17),
    },
    "indexer": {
        "3 requests": _indexer([5, 1, 16], [69, 1, 48]),
    },
}
