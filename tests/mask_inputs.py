"""Selections of every kind, packed over requests, for masks of bits and the attention under them."""

from typing import Any

import torch
from torch import Tensor

from assay.optimized.topk_mask import TopkMaskPlan, plan_topk_mask

INT32 = torch.iinfo(torch.int32)


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def selection(
    query_lens: tuple[int, ...], key_lens: tuple[int, ...], topk: int, *, seed: int = 0, device: str = "cpu"
) -> Tensor:
    """Random lists with padding of each kind in any place, repeated positions, bits 0 and 31, and empty lists."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n, m in zip(query_lens, key_lens, strict=True):
        rows.append(torch.randint(0, max(m, 1), (n, topk), generator=generator))
    indices = torch.cat(rows).int()
    kinds = torch.randint(0, 12, indices.shape, generator=generator)
    lens = torch.tensor(key_lens).repeat_interleave(torch.tensor(query_lens))[:, None]
    for kind, value in enumerate((-1, INT32.min, INT32.max, 31, 0)):
        indices[kinds == kind] = value
    indices = torch.where(kinds == 5, lens, indices)
    indices = torch.where(kinds == 6, lens - 1, indices)
    indices[:, 1:] = torch.where(kinds[:, 1:] == 7, indices[:, :-1], indices[:, 1:])
    indices[::5] = -1
    return indices.int().to(device)


def mask_plan(indices: Tensor, query_lens: tuple[int, ...], key_lens: tuple[int, ...], **options: Any) -> TopkMaskPlan:
    """A plan for a selection."""
    starts = options.pop("key_starts", None)
    return plan_topk_mask(
        offsets(query_lens),
        torch.tensor(key_lens),
        topk=indices.shape[1],
        device=indices.device,
        key_starts=None if starts is None else torch.tensor(starts),
        **options,
    )
