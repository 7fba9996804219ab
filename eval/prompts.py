"""From a sample to the token ids that a model is given: truncation, then the chat template, as LongBench does it."""

from dataclasses import dataclass

from .models.interface import Tokenizer
from .tasks import Sample, Task

MIDDLE, NONE = "middle", "none"
IF_PRESENT, NEVER, REQUIRED = "if-present", "never", "required"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPolicy:
    """How prompts are cut and wrapped; two runs are compared only if they have the same one.

    Attributes:
        truncation: ``middle`` takes the middle out of a prompt of more than ``max_tokens``; ``none`` cuts nothing.
        max_tokens: Length of the raw prompt, before the chat template; the answer's budget is not part of it.
        chat: ``if-present`` wraps prompts where the model has a chat template, ``required`` refuses a model without
            one, ``never`` wraps none. Tasks with worked examples are never wrapped.
    """

    truncation: str = MIDDLE
    max_tokens: int = 7500
    chat: str = IF_PRESENT

    def __post_init__(self) -> None:
        """Refuse unknown words, and lengths that leave nothing on either side of the middle."""
        if self.truncation not in (MIDDLE, NONE):
            raise ValueError(f"truncation must be {MIDDLE!r} or {NONE!r}, got {self.truncation!r}")
        if self.chat not in (IF_PRESENT, NEVER, REQUIRED):
            raise ValueError(f"chat must be {IF_PRESENT!r}, {NEVER!r} or {REQUIRED!r}, got {self.chat!r}")
        if self.truncation == MIDDLE and self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, got {self.max_tokens}")

    def wraps(self, task: Task, tokenizer: Tokenizer) -> bool:
        """Whether a chat template is put around the prompts of a task.

        Raises:
            ValueError: If one is required and the model has none.
        """
        if not task.chat or self.chat == NEVER:
            return False
        if self.chat == REQUIRED and not tokenizer.has_chat_template:
            hint = "chat = 'if-present' goes without"
            raise ValueError(f"the model must have a chat template for {task.name}, got none; {hint}")
        return tokenizer.has_chat_template


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model is given for a sample.

    Attributes:
        text: After truncation and chat template.
        ids: Its tokens.
        target_ids: The tokens of the gold answer behind it.
        tokens_before: Length of the raw prompt in tokens.
        truncated: Whether something was taken out.
    """

    text: str
    ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    tokens_before: int
    truncated: bool


def build_prompt(task: Task, sample: Sample, tokenizer: Tokenizer, policy: PromptPolicy, *, max_target: int) -> Prompt:
    """The prompt of a sample, and at most ``max_target`` tokens of its gold answer.

    The length after truncation can differ from ``max_tokens``: the cut text is tokenised anew, and the template comes
    on top. That is how the published scores are made.

    Raises:
        ValueError: If a chat template is required and the model has none.
    """
    wrapped = policy.wraps(task, tokenizer)
    ids = tokenizer.encode(sample.prompt, special=True)
    before = len(ids)
    truncated = policy.truncation == MIDDLE and before > policy.max_tokens
    text = middle_out(ids, tokenizer, policy.max_tokens) if truncated else sample.prompt
    if wrapped:
        text = tokenizer.chat(text)
        ids = tokenizer.encode(text, special=False)
    elif truncated:
        ids = tokenizer.encode(text, special=True)
    target = tokenizer.encode(sample.target if wrapped else _joined(text, sample.target), special=False)
    return Prompt(
        text=text,
        ids=tuple(ids),
        target_ids=tuple(target[:max_target]),
        tokens_before=before,
        truncated=truncated,
    )


def middle_out(ids: list[int], tokenizer: Tokenizer, max_tokens: int) -> str:
    """The first and the last ``int(max_tokens / 2)`` tokens as text; an odd length loses one token more."""
    half = int(max_tokens / 2)
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[-half:])


def _joined(prompt: str, target: str) -> str:
    """The target as it follows the prompt: after a space where words are parted by spaces and none is there yet."""
    parted = prompt[-1:].isascii() and not prompt[-1:].isspace()
    return f" {target}" if parted and target[:1].isascii() and not target[:1].isspace() else target
