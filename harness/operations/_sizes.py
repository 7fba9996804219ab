"""What the sizes of a case of one's own must be, found out before anything is drawn from them.

The cases of an operation are the examples: a size is of the kind that it has there, may be 0 if it is 0 in one of them,
and words are theirs. What one size demands of another is said here, operation by operation.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..case import PER_REQUEST, Case

Sizes = dict[str, Any]

# lengths, slots and their sums are int32 in the arguments
END = 2**31
# of one latent row
MOST_HEADS = 128
# of the decay of a token, by a bounded gate
MOST_BOUND = 5.0


def checked_sizes(given: Sizes, own_cases: Sequence[Case]) -> Sizes:
    """The sizes as a case holds them.

    Args:
        given: By name, as somebody wrote them.
        own_cases: Of the operation.

    Raises:
        ValueError: If one of them is missing, unknown, or not what it must be.
    """
    examples = [case.sizes for case in _usual(own_cases)]
    unknown, missing = sorted(set(given) - set(examples[0])), sorted(set(examples[0]) - set(given))
    if unknown or missing:
        raise ValueError(
            f"a case of {own_cases[0].op} must have the sizes {', '.join(sorted(examples[0]))}; "
            f"missing {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        )
    sizes = {name: _checked(name, value, [example[name] for example in examples]) for name, value in given.items()}
    for relation in (_same_requests, _some_queries, *RELATIONS.get(own_cases[0].op, ())):
        relation(sizes)
    return sizes


def checked_family(given: Any, own_cases: Sequence[Case]) -> str:
    """The family, one of those that need no other sizes than the operation's usual ones.

    Raises:
        ValueError: If it is none of them.
    """
    known = list(dict.fromkeys(case.family for case in _usual(own_cases)))
    _require("family", given, given in known, f"one of {', '.join(known)}")
    return str(given)


def _usual(own_cases: Sequence[Case]) -> list[Case]:
    """Those that have the sizes of the first one."""
    return [case for case in own_cases if set(case.sizes) == set(own_cases[0].sizes)]


def _checked(name: str, value: Any, examples: list[Any]) -> Any:
    like = examples[0]
    if isinstance(like, bool):
        _require(name, value, isinstance(value, bool), "true or false")
    elif isinstance(like, str):
        _require(name, value, value in examples, f"one of {', '.join(dict.fromkeys(examples))}")
    elif isinstance(like, int):
        _require_count(name, value, min(1, *examples))
    elif isinstance(like, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        _require(name, value, number and 0 < value < math.inf, "a positive number")
        return float(value)
    elif isinstance(like, list):
        _require(name, value, isinstance(value, list) and bool(value), "a list of at least one integer")
        least = min(1, *(length for example in examples for length in example))
        for at, length in enumerate(value):
            _require_count(f"{name}[{at}]", length, least)
        _require(f"the sum of {name}", sum(value), sum(value) < END, "below 2^31")
    return value


def _require_count(name: str, value: Any, least: int) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value < END
    _require(name, value, fits, f"an integer of at least {least} and below 2^31")


def _require(name: str, value: Any, fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"{name} must be {what}, got {value!r}")


def _of_requests(sizes: Sizes) -> dict[str, list[int]]:
    """The sizes with one entry per request."""
    return {name: value for name, value in sizes.items() if name.endswith(PER_REQUEST)}


def _same_requests(sizes: Sizes) -> None:
    first, *others = _of_requests(sizes).items()
    for name, lens in others:
        fits = len(lens) == len(first[1])
        _require(f"the length of {name}", len(lens), fits, f"that of {first[0]}, {len(first[1])}")


def _some_queries(sizes: Sizes) -> None:
    """A case without a row could not fail."""
    lens = sizes.get("query_lens", [1])
    _require("the sum of query_lens", sum(lens), sum(lens) > 0, "at least 1")


def _whole_groups(sizes: Sizes) -> None:
    heads, kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
    _require("num_kv_heads", kv_heads, heads % kv_heads == 0, f"a divisor of num_heads {heads}")


def _queries_within_context(sizes: Sizes) -> None:
    for at, (queries, context) in enumerate(zip(sizes["query_lens"], sizes["context_lens"], strict=True)):
        what = f"at least query_lens[{at}] {queries}, whose tokens are part of the context"
        _require(f"context_lens[{at}]", context, queries <= context, what)


def _values_within_rows(sizes: Sizes) -> None:
    what = f"at most d_qk {sizes['d_qk']}, whose leading columns they are"
    _require("d_v", sizes["d_v"], sizes["d_v"] <= sizes["d_qk"], what)
    _require("num_heads", sizes["num_heads"], sizes["num_heads"] <= MOST_HEADS, f"at most {MOST_HEADS}")


def _keys_within_mask(sizes: Sizes) -> None:
    behind = [start + length for start, length in zip(sizes["key_starts"], sizes["key_lens"], strict=True)]
    bits = 32 * sizes["mask_words"]
    what = f"such that a mask of {sizes['mask_words']} words has a bit for each key up to {max(behind)}"
    _require("mask_words", sizes["mask_words"], max(behind) <= bits, what)


def _tile_or_none(sizes: Sizes) -> None:
    tile = sizes["tile_queries"], sizes["tile_keys"]
    powers = all(size & (size - 1) == 0 for size in tile) and tile[0] >= 16 and tile[1] >= 32
    _require("tile_queries and tile_keys", tile, powers or tile == (0, 0), "powers of two from 16 and 32 on, or both 0")


def _whole_value_groups(sizes: Sizes) -> None:
    heads, value_heads = sizes["num_heads"], sizes["num_v_heads"]
    _require("num_v_heads", value_heads, value_heads % heads == 0, f"a multiple of num_heads {heads}")
    _require("bound", sizes["bound"], sizes["bound"] <= MOST_BOUND, f"at most {MOST_BOUND:g}")


def _tokens_within_columns(sizes: Sizes) -> None:
    longest, what = max(sizes["seq_lens"]), "at least the most tokens of a sequence"
    _require("columns", sizes["columns"], longest <= sizes["columns"], f"{what}, {longest}")


RELATIONS: dict[str, tuple[Callable[[Sizes], None], ...]] = {
    "attention": (_whole_groups,),
    "kda": (_whole_value_groups,),
    "kda_step": (_whole_value_groups, _tokens_within_columns),
    "masked_mha": (_whole_groups, _keys_within_mask),
    "mla_prefill": (_queries_within_context,),
    "sparse_mla": (_queries_within_context, _values_within_rows),
    "token_scores": (_queries_within_context,),
    "topk_mask": (_tile_or_none,),
}
