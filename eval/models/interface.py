"""What the runner asks of a model: generate, score, describe; and of its tokenizer.

A model is any object of this form. It answers a batch at once, one outcome per request in their order, and tells a
request that failed from one that was answered: nothing that went wrong looks like a wrong answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

STOP, LENGTH = "stop", "length"
ERROR, TIMEOUT, OUT_OF_MEMORY = "error", "timeout", "oom"


class OutOfMemoryError(RuntimeError):
    """A batch did not fit into memory; the runner asks again with half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One greedy continuation.

    Attributes:
        prompt_ids: Token ids of the whole prompt, special tokens among them.
        max_new_tokens: Tokens after which the answer is cut.
        min_new_tokens: Tokens before which it does not end.
        stop: Texts that end it; the answer is what stands before the first of them.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One teacher-forced pass: the log-probabilities of the prompt and of a target behind it."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """An answer.

    Attributes:
        text: Without special tokens and stop texts.
        ids: All token ids that were generated, also those of a stop text.
        finish_reason: ``stop`` (end of sequence or stop text) or ``length``.
        gaps: Per generated token, the log-probability of the likeliest token minus that of the next; empty if unknown.
        kernel_calls: How often each kernel served this request, by ``stage/kernel`` such as ``prefill/chunked``; empty
            if the model cannot tell.
        latency_s: From sending the request to its end; None where the request was one of a batch.
        first_token_s: From sending the request to its first token; None if unknown.
        facts: What else is known, such as accepted draft tokens; plain values.
    """

    text: str
    ids: tuple[int, ...]
    finish_reason: str
    gaps: tuple[float, ...] = ()
    kernel_calls: Mapping[str, int] = field(default_factory=dict)
    latency_s: float | None = None
    first_token_s: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Log-probabilities, natural.

    Attributes:
        target: One per token of the target.
        prompt: One per token of the prompt after its first; empty if the model gives none.
        kernel_calls: As in ``Generated``.
    """

    target: tuple[float, ...]
    prompt: tuple[float, ...] = ()
    kernel_calls: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A request that was not answered: ``status`` is ``error``, ``timeout`` or ``oom``, ``reason`` is for people."""

    status: str
    reason: str


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back."""

    has_chat_template: bool

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids; with ``special``, the tokens that the model expects around a text are added."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""

    def chat(self, text: str) -> str:
        """The text as the only message of a user in the model's chat template, up to where the answer begins.

        Special tokens are written out, so the result is encoded without adding them again.
        """


@runtime_checkable
class Model(Protocol):
    """A model behind the runner.

    Attributes:
        tokenizer: Its tokenizer.
        context_length: Tokens that prompt and answer may have together.
    """

    tokenizer: Tokenizer
    context_length: int

    def describe(self) -> dict[str, Any]:
        """Everything that its answers depend on, as plain JSON values and without secrets.

        Digest of the weights, attention implementation, kernels, dtype, versions: a run is continued only where this is
        the same.
        """

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """Answer each request.

        Raises:
            OutOfMemoryError: If the batch does not fit; nothing of it is answered then.
        """

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """Log-probabilities of each request.

        Raises:
            OutOfMemoryError: If the batch does not fit; nothing of it is answered then.
        """
