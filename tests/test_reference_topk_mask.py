"""The oracle of the bit-packed mask against golden words, sets of positions, and sums of powers of two."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from assay.reference.topk_mask import selected_keys, tile_map, topk_mask

INT32 = torch.iinfo(torch.int32)


def masked(lists: list[list[int]], num_keys: int, start: int | None = None) -> list[list[int]]:
    """The words of one request."""
    words: list[list[int]] = topk_mask(
        torch.tensor(lists, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, len(lists)]),
        key_lens=torch.tensor([num_keys]),
        key_starts=None if start is None else torch.tensor([start]),
    ).tolist()
    return words


def test_words_of_a_public_test() -> None:
    lists = [[0, 31, 32, 63, -1], [1, 64, 127, -1, -1]]
    # bit 31 is the sign: 1 + 2^31 and 2^31 alone
    assert masked(lists, 128) == [[-0x7FFFFFFF, -0x7FFFFFFF, 0, 0], [2, 0, 1, -0x80000000]]


def test_every_bit_of_a_word_has_its_own_value() -> None:
    words = masked([[k] for k in range(64)], 64)
    unsigned = [[word % 2**32 for word in row] for row in words]
    assert unsigned == [[2**k, 0] if k < 32 else [0, 2 ** (k - 32)] for k in range(64)]


def test_a_full_row_is_all_ones() -> None:
    assert masked([list(range(64))], 64) == [[-1, -1]]
    assert masked([list(range(33))], 33) == [[-1, 1]]


def test_a_repeated_position_counts_once() -> None:
    assert masked([[5, 5, 5, 40, 5, 40]], 64) == masked([[40, 5, 5, 5, 5, 5]], 64) == [[32, 256]]


@pytest.mark.parametrize("padding", [-1, -2, -32, INT32.min, 70, 71, 96, INT32.max])
def test_what_is_out_of_range_is_padding_in_any_place(padding: int) -> None:
    # of 70 keys the last word has six: bit 6 of it stands for no key
    assert masked([[padding, 3, padding, 69, padding]], 70) == [[8, 0, 32]]


def test_no_keys_and_no_queries() -> None:
    empty = topk_mask(torch.zeros(3, 2).int(), cu_seqlens_q=torch.tensor([0, 3]), key_lens=torch.tensor([0]))
    assert (empty.shape, empty.dtype) == ((3, 0), torch.int32)
    nobody = topk_mask(torch.zeros(0, 2).int(), cu_seqlens_q=torch.tensor([0, 0]), key_lens=torch.tensor([33]))
    assert nobody.shape == (0, 2)


def requests(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four requests, one without queries, one with neither keys nor valid entries."""
    draw = random.Random(seed)
    lists = [[draw.randint(-3, 150) for _ in range(9)] for _ in range(12)]
    cu = torch.tensor([0, 5, 5, 11, 12])
    return torch.tensor(lists, dtype=torch.int32), cu, torch.tensor([100, 9, 65, 0]), torch.tensor([31, 0, 64, 5])


@pytest.mark.parametrize("seed", range(3))
def test_equals_sums_over_sets(seed: int) -> None:
    indices, cu, lens, starts = requests(seed)
    mask = topk_mask(indices, cu_seqlens_q=cu, key_lens=lens, key_starts=starts)
    for request, (first, last) in enumerate(itertools.pairwise(cu.tolist())):
        positions = set(range(int(starts[request]), int(starts[request] + lens[request])))
        for query in range(first, last):
            keys = {index - int(starts[request]) for index in positions & set(indices[query].tolist())}
            # one integer of 128 bits for the whole row
            assert sum((word % 2**32) << 32 * at for at, word in enumerate(mask[query].tolist())) == sum(
                2**key for key in keys
            )
            assert set(selected_keys(mask, 100)[query].nonzero()[:, 0].tolist()) == keys


def test_a_mask_of_a_chunk_is_a_stretch_of_the_whole_mask() -> None:
    indices, cu, _, _ = requests(4)
    whole = selected_keys(topk_mask(indices, cu_seqlens_q=cu, key_lens=torch.full((4,), 160)), 160)
    for start, length in ((0, 40), (31, 33), (100, 60)):
        starts, lens = torch.full((4,), start), torch.full((4,), length)
        part = topk_mask(indices, cu_seqlens_q=cu, key_lens=lens, key_starts=starts)
        assert torch.equal(selected_keys(part, length), whole[:, start : start + length])


def test_the_map_of_tiles_by_hand() -> None:
    mask = torch.zeros(7, 5, dtype=torch.int32)
    mask[0, 0] = mask[2, 3] = mask[4, 4] = 1
    mask[6, 1] = -0x80000000
    # requests of 3, 0 and 4 queries in tiles of two: rows 0-1, 2, 3-4, 5-6
    found = tile_map(mask, cu_seqlens_q=torch.tensor([0, 3, 3, 7]), tile_queries=2, tile_keys=64)
    assert found.tolist() == [
        [True, False, False],
        [False, True, False],
        [False, False, True],
        [True, False, False],
    ]


def test_the_map_equals_the_bits_one_by_one() -> None:
    indices, cu, lens, starts = requests(5)
    mask = topk_mask(indices, cu_seqlens_q=cu, key_lens=lens, key_starts=starts)
    found = tile_map(mask, cu_seqlens_q=cu, tile_queries=4, tile_keys=32)
    expected = torch.zeros_like(found)
    tiles = [query // 4 for query in range(5)] + [2 + query // 4 for query in range(6)] + [4]
    for query, key in selected_keys(mask, 100).nonzero().tolist():
        expected[tiles[query], key // 32] = True
    assert torch.equal(found, expected)
    assert found.any()
    assert not found.all()


def test_the_map_of_nothing() -> None:
    nothing = tile_map(torch.zeros(0, 3).int(), cu_seqlens_q=torch.tensor([0, 0]), tile_queries=2, tile_keys=64)
    assert nothing.shape == (0, 2)
