"""Where the latents of ``mla_prefill`` lie: slots, tables, caches."""

import torch
from torch import Tensor

from ..poison import Ledger

# elements of a latent cache that a 32-bit offset does not reach the end of, and those that a CPU is asked to hold
VAST_ELEMENTS = 1 << 31
CPU_ELEMENTS = 1 << 28


def slots_of(context_lens: list[int], shared: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Slots of the packed tokens, the slot table and the row of each request.

    Slots are a random permutation with a fifth of the cache unused. Every other draw leaves out the first and the last
    slot, so that their NaN shows where they are taken for padding; the others give both to tokens, so that a token
    there shows where it is taken for padding. Rows are permuted among more rows than there are requests.
    """
    total, count = sum(context_lens), len(context_lens)
    slots = torch.randperm(total + total // 4, generator=generator)[:total] + 1
    if total > 1 and int(torch.randint(2, (), generator=generator)):
        ends = torch.randperm(total, generator=generator)[:2]
        slots[ends] = torch.tensor([0, total + total // 4 + 1])
    slots = slots[shared]
    rows = torch.randperm(count + 2, generator=generator)[:count].int()
    table = torch.full((count + 2, max(context_lens) + 3), -1, dtype=torch.int32)
    for row, part in zip(rows.tolist(), slots.split(context_lens), strict=True):
        table[row, : len(part)] = part.int()
    return slots, table, rows


def far_apart(
    slots: Tensor, slot_table: Tensor, num_slots: int, rank: int, device: torch.device
) -> tuple[Tensor, Tensor, int]:
    """The upper half of the slots moved so far up that 32 bits do not hold the offset of their latents.

    Raises:
        ValueError: If a CPU is to hold such a cache.
    """
    gap = -(-VAST_ELEMENTS // rank)
    if device.type == "cpu" and gap * rank > CPU_ELEMENTS:
        raise ValueError("layout must not be vast on a CPU: its cache has more elements than 32 bits count")
    slots, slot_table = (torch.where(t >= num_slots // 2, t + gap, t) for t in (slots, slot_table))
    return slots, slot_table, num_slots + gap


def caches_of(kv_c: Tensor, k_pe: Tensor, slots: Tensor, num_slots: int, lures: Tensor | None) -> dict[str, Tensor]:
    """Rows of tokens in their slots, NaN in all others; copies of the tokens ``lures`` where an end is free."""
    caches, slots, ends = {}, slots.to(kv_c.device), torch.tensor([0, num_slots - 1], device=kv_c.device)
    free = ~torch.isin(ends, slots)
    for name, tensor in (("kv_c", kv_c), ("k_pe", k_pe)):
        caches[name] = tensor.new_full((num_slots, tensor.shape[1]), torch.nan)
        caches[name][slots] = tensor
        if lures is not None:
            caches[name][ends[free]] = tensor[lures.to(kv_c.device)[free]]
    return caches


def stored(ledger: Ledger, caches: dict[str, Tensor], *, bundled: bool, device: torch.device) -> dict[str, Tensor]:
    """The caches: two of their own, or the columns of one row ``[latent | rope]`` as serving engines keep it."""
    if not bundled:
        return {name: ledger.guarded(name, cache, device) for name, cache in caches.items()}
    cache = ledger.guarded("cache", torch.cat(list(caches.values()), dim=1), device)
    rank = caches["kv_c"].shape[1]
    return {"kv_c": cache[:, :rank], "k_pe": cache[:, rank:]}
