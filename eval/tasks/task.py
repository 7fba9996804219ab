"""What a task asks for, and one of its samples."""

from dataclasses import dataclass

from ..scorers import first_line

REAL, SYNTHETIC = "real", "synthetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: how a model is asked and how its answers are scored.

    Attributes:
        name: By which a suite selects it, such as ``qasper``, ``qasper_e`` or ``synthetic_qasper``.
        family: ``longbench``, ``longbench_e``, ``gsm8k``, ``synthetic`` or ``needle``.
        category: Of the macro average, such as ``single_doc_qa``.
        language: ``en``, ``zh`` or ``code``.
        scorers: Names of scorers; the first one is the score of the task, the others are read beside it.
        max_new_tokens: Length at which an answer is cut.
        min_new_tokens: Length before which it must not end.
        stop: Texts that end an answer; they are no part of it.
        chat: Whether a model's chat template is put around the prompt, where it has one.
        first_line: Whether only the first line of an answer is scored.
        num_samples: How many records the published file has; None if the task is generated.
        origin: ``real`` or ``synthetic``; the two are never averaged.
    """

    name: str
    family: str
    category: str
    language: str
    scorers: tuple[str, ...]
    max_new_tokens: int
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    chat: bool = True
    first_line: bool = False
    num_samples: int | None = None
    origin: str = REAL

    @property
    def scored_by(self) -> str:
        """The scorer whose mean is the score of the task."""
        return self.scorers[0]

    def answer(self, output: str) -> str:
        """The part of a model's output that is scored; nothing else is stripped."""
        return first_line(output) if self.first_line else output


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One question of a task.

    Attributes:
        task: Name of the task.
        id: Unique within the task, the same wherever the data comes from.
        index: Position in its source, from 0.
        prompt: The whole prompt, before truncation and chat template.
        answers: Accepted answers, at least one.
        target: The text whose log-probability is measured after the prompt.
        cluster: Digest of what samples may share, such as the context; samples of one cluster are not independent.
        classes: All classes of a classification task.
        length: Of the record, as published: words, or characters in Chinese; None if it has none.
        stratum: Label of the part of the task it belongs to, such as a bin of lengths; empty if there are no parts.
    """

    task: str
    id: str
    index: int
    prompt: str
    answers: tuple[str, ...]
    target: str
    cluster: str
    classes: tuple[str, ...] = ()
    length: int | None = None
    stratum: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A record that cannot be asked: it is counted as skipped, never left out."""

    task: str
    id: str
    index: int
    reason: str
