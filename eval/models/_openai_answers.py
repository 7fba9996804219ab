"""What OpenAI-compatible servers send back: streams of events, token ids, log-probabilities."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..surrogates import writable
from .interface import LENGTH, STOP


class TruncatedError(RuntimeError):
    """The stream ended before the answer did."""


class AnswerError(RuntimeError):
    """The server answered something that is not understood."""


@dataclass(slots=True)
class Streamed:
    """An answer as it came.

    Attributes:
        text: Without stop texts, which servers leave out.
        ids: Token ids; None where the server sends none.
        gaps: Lead of the likeliest token over the next one, per token.
        finish_reason: ``stop`` or ``length``.
        usage: Counts of the server.
        first_s: When the first token came, by the clock.
    """

    text: str = ""
    ids: list[int] | None = None
    gaps: list[float] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None

    def add(self, event: dict[str, Any], now: float) -> None:
        """One event of the stream."""
        if event.get("usage"):
            self.usage = event["usage"]
        choices = event.get("choices") or []
        if not choices:
            return
        if len(choices) > 1:
            raise AnswerError(f"a request must have one answer, got {len(choices)}")
        choice = choices[0]
        if self.first_s is None and (choice.get("text") or choice.get("token_ids")):
            self.first_s = now
        self.text += choice.get("text") or ""
        if choice.get("token_ids") is not None:
            self.ids = [*(self.ids or []), *map(int, choice["token_ids"])]
        for likely in (choice.get("logprobs") or {}).get("top_logprobs") or []:
            self.gaps.append(_lead(likely))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def check(self) -> None:
        """Refuse an answer without a regular end.

        Raises:
            TruncatedError: If the stream ended early.
            AnswerError: If the server gave up on the answer.
        """
        if not self.finish_reason:
            raise TruncatedError("the stream must end with a finish reason, got none: the connection was cut")
        if self.finish_reason not in (STOP, LENGTH):
            raise AnswerError(f"the finish reason must be {STOP!r} or {LENGTH!r}, got {self.finish_reason!r}")
        # a letter of two halves may have come in two events
        self.text = writable(self.text)


def _lead(likely: dict[str, float]) -> float:
    """The likeliest log-probability minus the next; NaN where the server sent but one."""
    values = sorted(likely.values(), reverse=True)
    return values[0] - values[1] if len(values) > 1 else float("nan")


async def lines(chunks: AsyncIterator[str]) -> AsyncIterator[str]:
    """The lines of a stream. They end in line feeds alone: U+2028 and its like may stand in an answer."""
    rest = ""
    async for chunk in chunks:
        *whole, rest = (rest + chunk).split("\n")
        for line in whole:
            yield line
    if rest:
        yield rest


async def events(lines: AsyncIterator[str]) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream.

    Raises:
        TruncatedError: If it ends in the middle of an event.
        AnswerError: If the server sends an error in the place of an event.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise TruncatedError(f"an event must be JSON, got {data[:60]!r}") from error
        if "error" in event:
            raise AnswerError(f"the server reports {str(event['error'])[:200]}")
        yield event


def vllm_prompt_logprobs(body: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """Log-probabilities of ``ids`` after the first, from vLLM's ``prompt_logprobs``.

    Raises:
        AnswerError: If they are missing or not of these tokens.
    """
    entries = (body.get("choices") or [{}])[0].get("prompt_logprobs")
    if not entries or len(entries) != len(ids):
        raise AnswerError(f"prompt_logprobs must be given for {len(ids)} tokens, got {len(entries or [])}")
    found = []
    for one, entry in zip(ids[1:], entries[1:], strict=True):
        if not entry or str(one) not in entry:
            raise AnswerError(f"prompt_logprobs must hold token {one}, got {', '.join(entry or {})[:60] or 'none'}")
        found.append(float(entry[str(one)]["logprob"]))
    return found


def sglang_prompt_logprobs(body: dict[str, Any], ids: Sequence[int]) -> list[float]:
    """The same from SGLang's ``input_token_logprobs``: pairs of log-probability and token id.

    Raises:
        AnswerError: If they are missing or not of these tokens.
    """
    entries = body.get("meta_info", {}).get("input_token_logprobs") or []
    if [int(entry[1]) for entry in entries] != list(ids):
        raise AnswerError(f"input_token_logprobs must be those of the {len(ids)} tokens sent, got {len(entries)}")
    return [float(entry[0]) for entry in entries[1:]]
