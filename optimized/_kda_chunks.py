"""Where the chunks of a packed batch lie, and into which segments its long sequences are cut; work of the host.

Part of ``optimized/kda.py``; call it from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# fields of a row of either table, 16 bytes
FIELDS = 4

# a segment costs a second walk over its chunks and a matrix product per head, so it must be worth it
FEWEST_CHUNKS = 16
FEWEST_SEGMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """A batch in chunks, on the device.

    A chunk ends at the end of its sequence, or where the state is wanted, so that a state can be kept after any token.

    Attributes:
        chunks: ``[num_chunks, 4]``, int32: first token, number of tokens, index of the state to keep after it or -1, 0.
        segments: ``[num_segments, 4]``, int32: sequence, first chunk, end of its chunks, whether it is the sequence's
            last; in the order of the sequences.
        starts: ``[N + 1]``, int32: where the segments of each sequence begin.
        num_chunks: Rows of ``chunks``.
        num_segments: Rows of ``segments``; one a sequence unless long ones are cut.
        num_sequences: ``N``.
    """

    chunks: Tensor
    segments: Tensor
    starts: Tensor
    num_chunks: int
    num_segments: int
    num_sequences: int

    @property
    def cut(self) -> bool:
        """Whether a sequence has more than one segment."""
        return self.num_segments > self.num_sequences


def most_chunks(tokens: int, sequences: int, checkpoints: int, chunk_size: int) -> int:
    """Chunks that so many tokens, sequences and states to keep need at most."""
    return (tokens + (chunk_size - 1) * sequences) // chunk_size + checkpoints


def most_cuts(num_chunks: int, width: int, processors: int) -> int:
    """Segments that so many chunks have at most beyond one a sequence.

    Args:
        num_chunks: Of the batch.
        width: Programs of a segment.
        processors: Of the device.
    """
    return min(num_chunks // FEWEST_CHUNKS, processors // width)


def lay_out(
    lengths: Sequence[int],
    checkpoints: Sequence[tuple[int, int]],
    *,
    chunk_size: int,
    width: int,
    processors: int,
    device: torch.device,
) -> Chunks:
    """Cut a batch into chunks and segments.

    Args:
        lengths: Tokens of each sequence.
        checkpoints: ``(sequence, tokens)`` of each state to keep.
        chunk_size: Tokens of a chunk at most.
        width: Programs that walk a segment side by side.
        processors: Of the device, which as many programs keep busy.
        device: Where the tables go.
    """
    rows, counts = _chunk_rows(lengths, checkpoints, chunk_size)
    spans = _segment_rows(counts, _longest_segment(counts, width, processors))
    starts = np.searchsorted([span[0] for span in spans], np.arange(len(lengths) + 1))
    table = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int32)).to(device)
    return Chunks(
        chunks=table,
        segments=torch.tensor(spans, dtype=torch.int32).to(device),
        starts=torch.from_numpy(starts.astype(np.int32)).to(device),
        num_chunks=len(rows),
        num_segments=len(spans),
        num_sequences=len(lengths),
    )


def _chunk_rows(
    lengths: Sequence[int], checkpoints: Sequence[tuple[int, int]], chunk_size: int
) -> tuple["np.ndarray[tuple[int, int], np.dtype[np.int64]]", list[int]]:
    """Rows of the table of chunks, and how many each sequence has."""
    wanted: dict[int, list[tuple[int, int]]] = {}
    for index, (sequence, tokens) in enumerate(checkpoints):
        wanted.setdefault(sequence, []).append((tokens, index))
    pieces: list[tuple[int, int, int, int]] = []
    start = 0
    for sequence, length in enumerate(lengths):
        position = 0
        for stop, index in [*sorted(wanted.get(sequence, [])), (length, -1)]:
            pieces.append((sequence, start + position, stop - position, index))
            position = stop
        start += length
    owner, first, size, kept = np.array(pieces, dtype=np.int64).T
    # a state that is wanted before any further token needs a chunk without tokens to carry it
    count = np.maximum(-(-size // chunk_size), kept >= 0)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    rows = np.zeros((len(place), FIELDS), dtype=np.int64)
    rows[:, 0] = np.repeat(first, count) + place * chunk_size
    rows[:, 1] = np.minimum(np.repeat(size, count) - place * chunk_size, chunk_size)
    rows[:, 2] = np.where(place == np.repeat(count, count) - 1, np.repeat(kept, count), -1)
    return rows, np.bincount(owner, weights=count, minlength=len(lengths)).astype(int).tolist()


def _longest_segment(counts: Sequence[int], width: int, processors: int) -> int:
    """Chunks of a segment at most; all of the longest sequence if cutting it would not pay."""
    longest = max(counts)
    segment = max(FEWEST_CHUNKS, -(-sum(counts) * width // processors))
    return segment if longest >= FEWEST_SEGMENTS * segment else max(longest, 1)


def _segment_rows(counts: Sequence[int], segment: int) -> list[tuple[int, int, int, int]]:
    """Rows of the table of segments; those of a sequence as even as they can be."""
    rows, first = [], 0
    for sequence, count in enumerate(counts):
        # never more than whole segments fit, so that their number stays below what was planned
        parts = max(1, count // segment)
        cuts = [first + count * part // parts for part in range(parts + 1)]
        for part in range(parts):
            rows.append((sequence, cuts[part], cuts[part + 1], int(part == parts - 1)))
        first += count
    return rows
