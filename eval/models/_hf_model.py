"""A transformers model behind the interface of the runner: batches read, answered and scored.

Part of ``hf.py``; made there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._hf_attention import Attention
from ._hf_batch import Answer, PaddedBatch, choose, next_log_probabilities, trailing
from ._hf_cache import forget, new_cache
from ._hf_kda import DeltaRule
from .interface import ERROR, Failure, Generated, GenerateRequest, OutOfMemoryError, Scored, ScoreRequest
from .tokenizers import HubTokenizer

Request = TypeVar("Request", GenerateRequest, ScoreRequest)


class HfModel:
    """The model.

    Attributes:
        tokenizer: Its tokenizer.
        context_length: Tokens that its positions reach.
        seam: Where an operation of the house serves its prefill; None where none does.
    """

    def __init__(
        self,
        network: Any,
        tokenizer: HubTokenizer,
        attention: Attention,
        described: dict[str, Any],
        *,
        step: int,
        delta: DeltaRule | None = None,
    ) -> None:
        """Take what ``load`` made.

        Args:
            network: The model.
            tokenizer: Its tokenizer.
            attention: Serves its attention.
            described: All that its answers depend on.
            step: Most tokens of a prompt that are read at once, 0 for all.
            delta: Serves its linear layers; they serve themselves without.
        """
        self.tokenizer = tokenizer
        self.context_length = int(network.config.max_position_embeddings)
        self.seam = attention.seam
        self._network, self._attention, self._delta = network, attention, delta
        self._described, self._step = described, step
        ends = network.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._like = next(network.parameters())

    def describe(self) -> dict[str, Any]:
        """All that its answers depend on."""
        return dict(self._described)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """All at once."""
        return self._answer(requests, lambda one: one.max_new_tokens, self._generate)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """All at once."""
        ask = self._score if self._attention.selection is None else self._score_selected
        return self._answer(requests, lambda one: len(one.target_ids), ask)

    def _answer(
        self, requests: Sequence[Request], behind: Callable[[Request], int], ask: Callable[[list[Request]], list[Any]]
    ) -> list[Any]:
        """Put what can be asked to the model; the other requests fail."""
        outcomes: list[Any] = [self._refusal(one.prompt_ids, behind(one)) for one in requests]
        asked = [at for at, outcome in enumerate(outcomes) if outcome is None]
        if asked:
            # what a batch that failed had counted is nobody's
            self._attention.take()
            for at, outcome in zip(asked, _in_memory(ask, [requests[at] for at in asked]), strict=True):
                outcomes[at] = outcome
        return outcomes

    def _refusal(self, prompt_ids: tuple[int, ...], behind: int) -> Failure | None:
        if not prompt_ids:
            return Failure(status=ERROR, reason="the prompt must have at least one token, got none")
        if len(prompt_ids) + behind > self.context_length:
            sizes = f"{len(prompt_ids)} and {behind} behind it"
            return Failure(status=ERROR, reason=f"the prompt must fit {self.context_length} tokens, got {sizes}")
        return None

    def _generate(self, requests: list[GenerateRequest]) -> list[Generated | Failure]:
        batch = PaddedBatch.of([one.prompt_ids for one in requests], self._like.device)
        answers = [Answer.to(one, self.tokenizer, self._ends) for one in requests]
        cache = new_cache(self._network.config)
        for _, _, logits in self._prefill(batch, cache, keep=1):
            last = logits[:, -1]
        chosen = choose(last, answers)
        mask, positions = self._keep_selected(batch, cache), batch.positions[:, -1:]
        rows = list(range(len(answers)))
        while growing := [at for at, row in enumerate(rows) if not answers[row].reason]:
            # to drop rows copies the cache: those that are finished are carried along until they are half of it
            if 2 * len(growing) <= len(rows):
                kept = torch.tensor(growing, device=mask.device)
                cache.reorder_cache(kept)
                mask, positions = mask[kept], positions[kept]
                rows, chosen = [rows[at] for at in growing], [chosen[at] for at in growing]
            # positions count the tokens that were read, whatever is left of them in the cache
            mask, positions = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), positions + 1
            ids = torch.tensor(chosen, device=mask.device)[:, None]
            self._attention.begin_decode()
            logits = self._forward(ids, mask, positions, cache, keep=1)
            calls = self._attention.take()
            for row in rows:
                if not answers[row].reason:
                    batch.calls[row].update(calls)
            chosen = choose(logits[:, -1], [answers[row] for row in rows])
        return [answer.outcome(calls) for answer, calls in zip(answers, batch.calls, strict=True)]

    def _score(self, requests: list[ScoreRequest]) -> list[Scored | Failure]:
        """All tokens of a request are read as one prompt."""
        batch = PaddedBatch.of([one.prompt_ids + one.target_ids for one in requests], self._like.device)
        shares, _ = self._shares(batch, new_cache(self._network.config))
        found: list[Scored | Failure] = []
        for one, row, pad, calls in zip(requests, shares.tolist(), batch.pads, batch.calls, strict=True):
            values, at = row[pad:], len(one.prompt_ids) - 1
            found.append(Scored(prompt=tuple(values[:at]), target=tuple(values[at:]), kernel_calls=dict(calls)))
        return found

    def _score_selected(self, requests: list[ScoreRequest]) -> list[Scored | Failure]:
        """The prompt is read, what is selected of it stays, and the target is decoded from that, all at once."""
        batch = PaddedBatch.of([one.prompt_ids for one in requests], self._like.device)
        cache = new_cache(self._network.config)
        shares, last = self._shares(batch, cache)
        mask = self._keep_selected(batch, cache)
        ids, real = trailing([one.target_ids for one in requests], self._like.device)
        parts = [next_log_probabilities(last[:, None], ids[:, :1])]
        if ids.shape[1] > 1:
            self._attention.begin_decode()
            positions = batch.positions[:, -1:] + torch.arange(1, ids.shape[1], device=ids.device)
            logits = self._forward(ids[:, :-1], torch.cat([mask, real[:, :-1]], dim=1), positions, cache, keep=0)
            parts.append(next_log_probabilities(logits, ids[:, 1:]))
            calls = self._attention.take()
            for one, mine in zip(requests, batch.calls, strict=True):
                if len(one.target_ids) > 1:
                    mine.update(calls)
        targets = torch.cat(parts, dim=1).tolist()
        rows = zip(requests, shares.tolist(), targets, batch.pads, batch.calls, strict=True)
        return [
            Scored(prompt=tuple(row[pad:]), target=tuple(behind[: len(one.target_ids)]), kernel_calls=dict(calls))
            for one, row, behind, pad, calls in rows
        ]

    def _shares(self, batch: PaddedBatch, cache: Any) -> tuple[Tensor, Tensor]:
        """Read a batch; log-probabilities of its tokens but the first, ``[B, S - 1]``, and logits behind the last."""
        parts = []
        for start, stop, logits in self._prefill(batch, cache, keep=0):
            following = batch.ids[:, start + 1 : stop + 1]
            parts.append(next_log_probabilities(logits[:, : following.shape[1]], following))
            last = logits[:, -1]
        return torch.cat(parts, dim=1), last

    def _keep_selected(self, batch: PaddedBatch, cache: Any) -> Tensor:
        """Leave in the cache what is selected; the mask of what is left."""
        mask = self._attention.keep_selected(cache, batch.mask)
        batch.count(self._attention.take(), batch.mask.shape[1])
        return mask

    def _prefill(self, batch: PaddedBatch, cache: Any, *, keep: int) -> Iterator[tuple[int, int, Tensor]]:
        """Read a batch step by step; each step's columns and logits, of the last ``keep`` of them or all for 0."""
        self._attention.begin_batch(batch.pads, batch.mask.shape[1])
        for start, stop in batch.steps(self._step):
            self._attention.begin_prefill(batch.pads, start, stop, self._like)
            columns = slice(start, stop)
            logits = self._forward(
                batch.ids[:, columns], batch.mask[:, :stop], batch.positions[:, columns], cache, keep=keep
            )
            batch.count(self._attention.take(), stop)
            idle = [row for row, pad in enumerate(batch.pads) if pad >= stop]
            if stop - start == 1 and idle:
                forget(cache, idle)
            yield start, stop, logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, keep: int) -> Tensor:
        with torch.inference_mode(), self._delta.serving() if self._delta else nullcontext():
            logits: Tensor = self._network(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        return logits


def _in_memory(ask: Callable[[list[Request]], list[Any]], requests: list[Request]) -> list[Any]:
    """Ask, and tell what did not fit from what went wrong."""
    try:
        # decoding writes in place what a prefill made
        with torch.inference_mode():
            return ask(requests)
    except torch.OutOfMemoryError as error:
        reason = str(error)
    except RuntimeError as error:
        # the allocator of the CPU has no class of its own
        if "DefaultCPUAllocator" not in str(error):
            raise
        reason = str(error)
    # raised out here, where the first error no longer holds the tensors of its frames
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    raise OutOfMemoryError(reason.partition("\n")[0])
