"""The keys that each query has selected, one bit a key, and which tiles of the mask hold any bit: plain loops."""

import torch
from torch import Tensor


def topk_mask(indices: Tensor, *, cu_seqlens_q: Tensor, key_lens: Tensor, key_starts: Tensor | None = None) -> Tensor:
    """Pack the selection of each query into bits; return the words of the mask.

    For query ``t`` of request ``r``, over the valid entries of its list::

        valid[t, j]  = key_starts[r] <= indices[t, j] < key_starts[r] + key_lens[r]
        k            = indices[t, j] - key_starts[r]
        mask[t, k >> 5] |= 1 << (k & 31)                            if valid[t, j]

    A position that is listed twice has one bit (a set). Everything that is not valid is padding, in any place and
    order; a word's bit 31 is its sign. Nothing is said of causality.

    Args:
        indices: ``[T, topk]``, integer, positions in the sequence of the query's own request, packed queries.
        cu_seqlens_q: ``[N + 1]``, integer; request ``r`` owns queries ``cu[r] .. cu[r + 1] - 1``.
        key_lens: ``[N]``, integer, how many positions of each request the mask speaks of.
        key_starts: ``[N]``, integer, the position that bit 0 stands for; 0 if None. Not 0 in a mask of one chunk.

    Returns:
        ``[T, W]``, int32, where ``W`` is the number of words that the longest ``key_lens`` needs.
    """
    num_words = -(-int(key_lens.max()) // 32)
    mask = torch.zeros(indices.shape[0], num_words, dtype=torch.int32)
    for request in range(len(key_lens)):
        start = 0 if key_starts is None else int(key_starts[request])
        for query in range(int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])):
            words = [0] * num_words
            for index in indices[query].tolist():
                key = index - start
                if 0 <= key < int(key_lens[request]):
                    words[key >> 5] |= 1 << (key & 31)
            # what does not fit in 31 bits is negative
            mask[query] = torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
    return mask.to(indices.device)


def selected_keys(mask: Tensor, num_keys: int, first_key: int = 0) -> Tensor:
    """Read a mask bit by bit.

    ::

        selected[t, s] = (mask[t, k >> 5] >> (k & 31)) & 1        with k = first_key + s

    Args:
        mask: ``[T, W]``, int32.
        num_keys: Bits to read.
        first_key: The first of them, not negative.

    Returns:
        ``[T, num_keys]``, bool.

    Raises:
        ValueError: If the first bit is negative.
        IndexError: If the mask has fewer bits.
    """
    if first_key < 0:
        raise ValueError(f"first_key must not be negative, got {first_key}")
    key = torch.arange(first_key, first_key + num_keys, device=mask.device)
    return (mask[:, key >> 5] >> (key & 31)) & 1 == 1


def tile_map(mask: Tensor, *, cu_seqlens_q: Tensor, tile_queries: int, tile_keys: int) -> Tensor:
    """Say which tiles of the mask hold any bit at all.

    The queries of each request are cut into tiles of their own: request ``r`` owns ``ceil(n_r / tile_queries)`` rows of
    the map, one request after the other. Keys are cut at multiples of ``tile_keys``, counted from bit 0::

        map[i, j] = whether any query of tile i has a bit j * tile_keys .. (j + 1) * tile_keys - 1

    Args:
        mask: ``[T, W]``, int32.
        cu_seqlens_q: ``[N + 1]``, integer.
        tile_queries: Queries of a tile.
        tile_keys: Keys of a tile, a multiple of 32.

    Returns:
        ``[tiles, ceil(W / (tile_keys / 32))]``, bool.
    """
    words = tile_keys // 32
    rows = []
    for request in range(len(cu_seqlens_q) - 1):
        start, stop = int(cu_seqlens_q[request]), int(cu_seqlens_q[request + 1])
        for first in range(start, stop, tile_queries):
            tile = mask[first : min(first + tile_queries, stop)]
            rows.append([bool((tile[:, word : word + words] != 0).any()) for word in range(0, mask.shape[1], words)])
    return torch.tensor(rows, dtype=torch.bool, device=mask.device).reshape(len(rows), -(-mask.shape[1] // words))
