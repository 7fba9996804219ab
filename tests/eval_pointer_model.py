"""A model of two layers of latent attention that copies: it needs every part of it, and no training.

The first layer finds the last tokens by their positions, the second finds where they stood together before, and what
came next there is what comes next here. No residual goes past the attention, so a wrong kernel makes a worse model.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from assay.eval.models.interface import LENGTH, Generated, GenerateRequest, Scored, ScoreRequest
from assay.eval.models.ngram import Characters
from assay.eval.models.seam import Seam
from assay.optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill

VOCABULARY, WIDTH, FREQUENCIES = 160, 32, 8
# how sharply positions, contexts and the next token are told apart
POSITION, CONTEXT, NEXT = 16.0, 6.0, 16.0
# offsets that the first layer looks back
OFFSETS = 3


class PointerModel:
    """The model; a prompt is read ``step`` tokens at a time, and its history ``chunk`` tokens at a time."""

    context_length = 1 << 16

    def __init__(self, *, kernel: str = "", step: int = 32, chunk: int = 32) -> None:
        """Have ``kernel`` serve its attention, or the house."""
        self.tokenizer = Characters()
        self.seam = Seam("mla_prefill", kernel)
        self._step, self._chunk = int(step), int(chunk)
        generator = torch.Generator().manual_seed(0)
        self._names = torch.nn.functional.normalize(torch.randn(VOCABULARY, WIDTH, generator=generator), dim=1)
        self._frequencies = torch.rand(FREQUENCIES, generator=generator) * math.pi
        eye = torch.eye(WIDTH)
        # [H, Dn + Dv, R]: the first layer hands a name on, the second one keeps two for keys and one for values
        self._weights = (eye.repeat(2, 1).expand(OFFSETS, -1, -1).contiguous(), torch.eye(3 * WIDTH)[None])

    def describe(self) -> dict[str, Any]:
        """All that its answers depend on."""
        return {"name": "pointer", "attention": self.seam.op, **self.seam.describe()}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated]:
        """Read the prompts, and answer with one token."""
        logits, calls = self._read([request.prompt_ids for request in requests])
        chosen = [int(one[-1].argmax()) for one in logits]
        return [
            Generated(text=chr(one), ids=(one,), finish_reason=LENGTH, kernel_calls=self._counted(calls))
            for one in chosen
        ]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        """All prompts with their targets in one batch."""
        rows = [(*request.prompt_ids, *request.target_ids) for request in requests]
        logits, calls = self._read(rows)
        found = []
        for request, row, one in zip(requests, rows, logits, strict=True):
            shares, following = one[:-1].log_softmax(dim=1), torch.tensor(row[1:]) % VOCABULARY
            values, at = shares.gather(1, following[:, None])[:, 0].tolist(), len(request.prompt_ids) - 1
            kernel_calls = self._counted(calls)
            found.append(Scored(prompt=tuple(values[:at]), target=tuple(values[at:]), kernel_calls=kernel_calls))
        return found

    def _counted(self, calls: int) -> dict[str, int]:
        return {f"prefill/{self.seam.name}": calls}

    def _read(self, rows: Sequence[Sequence[int]]) -> tuple[list[Tensor], int]:
        """Logits ``[tokens, vocabulary]`` of each row, and how often the attention was called."""
        names = [self._names[torch.tensor(row) % VOCABULARY] for row in rows]
        places = [self._turned(torch.arange(len(row))) for row in rows]
        queries = [
            torch.stack([self._turned(torch.arange(len(row)) - back) for back in range(OFFSETS)], dim=1) for row in rows
        ]
        padded = [torch.cat([torch.zeros(len(one), OFFSETS, WIDTH), one], dim=2) for one in queries]
        first, calls = self._attend(0, padded, names, places, POSITION)
        contexts = [one.flatten(1) for one in first]
        # the two tokens before a place say where it is found, its own is what is found there
        latents = [torch.cat([one[:, WIDTH:], one[:, :WIDTH]], dim=1) for one in contexts]
        asked = [torch.cat([one[:, : 2 * WIDTH], torch.zeros(len(one), 2)], dim=1)[:, None] for one in contexts]
        bare = [torch.zeros(len(row), 2) for row in rows]
        second, more = self._attend(1, asked, latents, bare, CONTEXT)
        return [NEXT * one[:, 0] @ self._names.T for one in second], calls + more

    def _turned(self, places: Tensor) -> Tensor:
        angles = places[:, None] * self._frequencies
        return torch.cat([angles.cos(), angles.sin()], dim=1) / math.sqrt(FREQUENCIES)

    def _attend(
        self, layer: int, q: list[Tensor], kv_c: list[Tensor], k_pe: list[Tensor], scale: float
    ) -> tuple[list[Tensor], int]:
        """Outputs ``[tokens, H, Dv]`` of each row, read step by step behind its history, and the number of calls."""
        lengths, outs = [len(one) for one in q], [list[Tensor]() for _ in q]
        table = torch.full((len(q), max(lengths)), -1, dtype=torch.int32)
        ends = [0, *itertools.accumulate(lengths)]
        for row, length in enumerate(lengths):
            table[row, :length] = ends[row] + torch.arange(length)
        caches, weight = (torch.cat(kv_c), torch.cat(k_pe)), self._weights[layer]
        starts = range(0, max(lengths), self._step)
        for start in starts:
            rows = [row for row, length in enumerate(lengths) if length > start]
            parts = [q[row][start : start + self._step] for row in rows]
            integers = {
                "cu_seqlens": torch.tensor([0, *itertools.accumulate(map(len, parts))], dtype=torch.int32),
                "slot_table": table,
                "request_rows": torch.tensor(rows, dtype=torch.int32),
                "context_lens": torch.tensor([start + len(part) for part in parts], dtype=torch.int32),
            }
            tensors = {"q": torch.cat(parts), "kv_c": caches[0], "k_pe": caches[1], "kv_b_proj": weight}
            plan = self._plan(tensors, integers)
            arguments = {**tensors, "softmax_scale": scale, **integers, "history_chunk_size": self._chunk}
            out = self.seam.serve(layer, arguments, partial(_house, *tensors.values(), softmax_scale=scale, plan=plan))
            for row, part in zip(rows, out.split([len(one) for one in parts]), strict=True):
                outs[row].append(part)
        return [torch.cat(one) for one in outs], len(starts)

    def _plan(self, tensors: dict[str, Tensor], integers: dict[str, Tensor]) -> MlaPrefillPlan:
        q, kv_c, k_pe, weight = tensors.values()
        d_nope = q.shape[2] - k_pe.shape[1]
        shape = MlaShape(
            num_heads=q.shape[1],
            kv_lora_rank=kv_c.shape[1],
            d_nope=d_nope,
            d_rope=k_pe.shape[1],
            d_v=weight.shape[1] - d_nope,
        )
        options: dict[str, Any] = {"shape": shape, "dtype": q.dtype, "num_slots": len(kv_c)}
        return plan_mla_prefill(*integers.values(), history_chunk_size=self._chunk, provider="torch", **options)


def _house(*tensors: Tensor, softmax_scale: float, plan: MlaPrefillPlan) -> Tensor:
    out, _ = mla_prefill(*tensors, softmax_scale=softmax_scale, plan=plan)
    return out


def load(**options: Any) -> PointerModel:
    """For the command line."""
    return PointerModel(**options)
