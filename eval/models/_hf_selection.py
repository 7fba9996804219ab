"""Sparse decoding: which tokens of a prompt stay in the latent cache once it was read, in each layer for itself.

Scores are those that ``mla_prefill`` collects on its way: one for all heads of a layer, and under ``probability`` with
every token up to a query in the softmax. ``snapkv`` observes the last tokens of a prompt, and pools; ``h2o`` observes
all of them, and adds up what the steps of a prefill gave, each weighted by its queries, as Sparse-vLLM does. The choice
is ``token_selection``'s. A row that stays was turned to its position when it was written, and tokens that follow go on
counting from the end of the prompt, not from the end of what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...optimized.mla_prefill import MlaPrefillPlan
from ...optimized.token_scores import Mode, TokenScoresPlan, plan_token_scores
from ...optimized.token_selection import accumulate_weighted, sparse_vllm_h2o_step, token_selection

SNAPKV, H2O = "snapkv", "h2o"
METHODS = (SNAPKV, H2O)
MODES: tuple[Mode, ...] = ("logits", "probability")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The rule.

    Attributes:
        method: ``snapkv`` or ``h2o``.
        scores: ``logits`` or ``probability``.
        budget: Tokens of a prompt that stay at most; a shorter prompt stays whole.
        sink: First tokens that always stay.
        recent: Last tokens that always stay.
        window: Last tokens whose queries are observed, with ``snapkv``; 0 with ``h2o``.
        pool: Neighbours whose highest score counts, odd, with ``snapkv``; 1 with ``h2o``.
    """

    method: str
    scores: Mode
    budget: int
    sink: int
    recent: int
    window: int
    pool: int

    def __post_init__(self) -> None:
        """Refuse what chooses nothing, or not by the method."""
        if self.method not in METHODS:
            raise ValueError(f"selection must be one of {', '.join(METHODS)}, got {self.method!r}")
        if self.scores not in MODES:
            raise ValueError(f"scores must be one of {', '.join(MODES)}, got {self.scores!r}")
        if self.method == H2O and (self.window, self.pool) != (0, 1):
            raise ValueError(f"h2o observes every token and pools none, got window {self.window} and pool {self.pool}")
        if self.method == SNAPKV and self.window < 1:
            raise ValueError(f"window must be at least 1, got {self.window}")
        if self.pool % 2 == 0:
            raise ValueError(f"pool must be odd, got {self.pool}")
        if self.budget <= self.sink + self.recent:
            raise ValueError(
                f"budget must be more than the {self.sink} + {self.recent} tokens that always stay, got {self.budget}"
            )

    @property
    def name(self) -> str:
        """For the counts of calls."""
        return f"{self.method}_{self.scores}"


class Observed:
    """The scores of one batch, gathered over the steps of its prefill."""

    def __init__(self, selection: Selection, pads: Sequence[int], length: int, note: Callable[[str], None]) -> None:
        """Begin.

        Args:
            selection: The rule.
            pads: Columns without a token, by row.
            length: Columns of the batch.
            note: Is told what made the scores of a layer in a step, such as ``token_scores/torch``.
        """
        self.selection, self._note = selection, note
        self._pads = torch.tensor(pads)
        self._length = length
        # by layer, [B, length], by position
        self._scores: dict[int, Tensor] = {}

    def scoring(self, plan: MlaPrefillPlan, rows: Sequence[int]) -> "Scoring | None":
        """What is observed in a step of these rows of the batch, or None for nothing."""
        lens = zip(plan.context_lens, plan.current.query_lens, strict=True)
        if self.selection.method == H2O:
            ranges = [(context - count, context) for context, count in lens]
        elif max(plan.context_lens) < self._length:
            # the longest prompt fills all columns, so this is not the last step
            return None
        else:
            ranges = [(max(0, context - self.selection.window), context) for context, _ in lens]
        score_plan = plan_token_scores(plan, mode=self.selection.scores, query_ranges=torch.tensor(ranges))
        return Scoring(plan=score_plan, rows=tuple(rows), observed=self)

    def add(self, layer: int, scores: Tensor, scoring: "Scoring") -> None:
        """Take the scores of a step, ``[N, max_context]``."""
        plan, device = scoring.plan.prefill, scores.device
        self._note(f"token_scores/{scoring.plan.implementation}")
        if self.selection.method == H2O:
            contexts = torch.tensor(plan.context_lens)
            scores = sparse_vllm_h2o_step(scores, contexts, mode=self.selection.scores)
        rows = torch.tensor(scoring.rows, device=device)
        step = scores.new_zeros(len(self._pads), self._length)
        step[rows, : scores.shape[1]] = scores
        if self.selection.method == H2O:
            counts = torch.zeros(len(self._pads), dtype=torch.int64)
            counts[list(scoring.rows)] = torch.tensor(plan.current.query_lens)
            total = self._scores.get(layer, torch.zeros_like(step))
            step = accumulate_weighted(total, step, counts)
        self._scores[layer] = step

    def keep(self, cache: Any) -> tuple[Tensor, int]:
        """Leave in a cache what is chosen, ``[B, 1, C, ..]``, in order and at the right end of each row.

        Returns:
            Where a token is left, ``[B, C]``, int64, the same for every layer; and the number of layers.

        Raises:
            NotImplementedError: If a layer's cache does not hold the whole prompt.
        """
        lens = self._length - self._pads
        selection = self.selection
        capacity = min(selection.budget, max(self._length, selection.sink + selection.recent))
        counts = lens.clamp(max=capacity)
        width = int(counts.max())
        place = torch.arange(width) - (width - counts)[:, None]
        for layer, scores in self._scores.items():
            kept = token_selection(
                scores,
                context_lens=lens,
                budgets=torch.full_like(lens, capacity),
                sink=selection.sink,
                recent=selection.recent,
                kernel_size=selection.pool,
            )
            # what stands before a row's first token is masked, and any finite row will do
            positions = kept.long().gather(1, place.clamp(min=0).to(kept.device))
            _take(cache.layers[layer], positions + self._pads.to(kept.device)[:, None], self._length)
        return (place >= 0).long().to(kept.device), len(self._scores)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """What one step observes: the plan of its scores, the rows of the batch that it serves, and who gathers them."""

    plan: TokenScoresPlan
    rows: tuple[int, ...]
    observed: Observed

    def note(self, layer: int, scores: Tensor) -> None:
        """Hand over the scores of a layer."""
        self.observed.add(layer, scores, self)


def _take(layer: Any, columns: Tensor, length: int) -> None:
    """Leave these columns, ``[B, C]``, of a layer of a cache of transformers."""
    if layer.keys.shape[2] != length:
        raise NotImplementedError(f"a cache must hold the {length} tokens of a prompt, got {layer.keys.shape[2]}")
    at = columns[:, None, :, None]
    layer.keys = layer.keys.gather(2, at.expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3]))
    layer.values = layer.values.gather(2, at.expand(-1, layer.values.shape[1], -1, layer.values.shape[3]))
