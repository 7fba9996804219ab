"""The cache that leaves room: the same tensors as that of transformers, and no copy of them for every token."""

import itertools
from typing import Any

import pytest
import torch

from assay.eval.models import _hf_cache

transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")

SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2}
CONFIG = transformers.LlamaConfig(**SIZES)


def states(seed: int, tokens: int, rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of other widths."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, 2, tokens, width, generator=generator) for width in (5, 4))  # type: ignore[return-value]


def both(caches: Any, seed: int, tokens: int, rows: int = 3) -> torch.Tensor:
    """Give a step to the first layer of each cache, which must agree; return our keys."""
    found = [cache.update(*states(seed, tokens, rows), 0) for cache in caches]
    for mine, plain in zip(*found, strict=True):
        assert torch.equal(mine, plain)
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == found[0][0].shape[2]
    keys: torch.Tensor = found[0][0]
    return keys


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_hf_cache, "SPARE", 4)
    return _hf_cache.new_cache(CONFIG), transformers.DynamicCache(config=CONFIG)


def test_it_holds_what_the_cache_of_transformers_holds(caches: Any) -> None:
    for step, tokens in enumerate([5, 2, *[1] * 11, 3, 1, 1, 2, 1]):
        both(caches, step, tokens)


def test_a_token_is_written_behind_the_others(caches: Any) -> None:
    both(caches, 0, 6)
    places = [both(caches, step, 1).data_ptr() for step in range(1, 10)]
    # room for four tokens, then for four more
    assert [a == b for a, b in itertools.pairwise(places)] == [True] * 3 + [False] + [True] * 3 + [False]


def test_what_was_handed_out_stays(caches: Any) -> None:
    both(caches, 0, 6)
    earlier = [both(caches, step, 1) for step in range(1, 4)]
    copies = [one.clone() for one in earlier]
    for step in range(4, 8):
        both(caches, step, 1)
    assert all(torch.equal(one, copy) for one, copy in zip(earlier, copies, strict=True))


def test_rows_that_leave_and_tokens_that_are_dropped_are_not_met_again(caches: Any) -> None:
    both(caches, 0, 6)
    both(caches, 1, 1)
    for cache in caches:
        cache.reorder_cache(torch.tensor([2, 0]))
    both(caches, 2, 1, rows=2)
    both(caches, 3, 1, rows=2)
    for cache in caches:
        layer = cache.layers[0]
        layer.keys, layer.values = layer.keys[:, :, 3:], layer.values[:, :, 3:]
    assert both(caches, 4, 1, rows=2).shape[2] == 7
    both(caches, 5, 1, rows=2)


def test_layers_of_other_kinds_stay_what_they_are() -> None:
    config = transformers.MistralConfig(**SIZES, sliding_window=4)
    plain, mine = transformers.DynamicCache(config=config), _hf_cache.new_cache(config)
    assert [type(layer) for layer in mine.layers] == [type(layer) for layer in plain.layers]
    # and those that hold every token do not
    assert {type(layer).__name__ for layer in _hf_cache.new_cache(CONFIG).layers} == {"RoomyLayer"}
