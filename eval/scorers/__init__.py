"""Answers to scores: the published scorers written anew, equal in value, and their variants under names of their own.

A scorer is found by its name in ``SCORERS``, and none depends on what else is installed. A score lies between 0 and 1,
and is the best over the accepted answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import choice, code, f1, numbers, rouge

__all__ = ["SCORERS", "Scorer", "find_scorer", "first_line"]

Score = Callable[[str, Sequence[str], Sequence[str]], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """One way to score.

    Attributes:
        name: As it stands in manifests and reports.
        version: Raised whenever a score changes.
        binary: Whether every score is 0 or 1, which decides how two runs are compared.
        score: Of an answer, given the accepted ones and the classes of the task.
    """

    name: str
    score: Score
    version: int = 1
    binary: bool = False

    @property
    def id(self) -> str:
        """Name and version: what two runs must have in common."""
        return f"{self.name}@{self.version}"


def first_line(prediction: str) -> str:
    """The first line that is not empty: what tasks with worked examples are scored on."""
    return prediction.lstrip("\n").split("\n")[0]


def find_scorer(name: str) -> Scorer:
    """The scorer of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in SCORERS:
        raise ValueError(f"a scorer must be one of {', '.join(SCORERS)}, got {name!r}")
    return SCORERS[name]


def _best(score: Callable[[str, str], float]) -> Score:
    def best(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        return max(score(prediction, answer) for answer in answers)

    return best


def _best_class(score: Callable[[str, str, Sequence[str]], float]) -> Score:
    def best(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        return max(score(prediction, answer, classes) for answer in answers)

    return best


def _all_answers(score: Callable[[str, Sequence[str]], float]) -> Score:
    def share(prediction: str, answers: Sequence[str], classes: Sequence[str]) -> float:
        return score(prediction, answers)

    return share


_PAIRWISE: dict[str, Callable[[str, str], float]] = {
    "qa_f1": f1.qa_f1,
    "qa_f1_zh": f1.qa_f1_zh,
    "rouge_l": rouge.rouge_l,
    "rouge_l_zh": rouge.rouge_l_zh,
    "count": choice.count,
    "retrieval": choice.retrieval,
    "retrieval_zh": choice.retrieval_zh,
    "code_sim": code.code_sim,
    "code_sim_skip_blank": code.code_sim_skip_blank,
    "code_sim_levenshtein": code.code_sim_levenshtein,
}

SCORERS: dict[str, Scorer] = {
    scorer.name: scorer
    for scorer in (
        *(Scorer(name=name, score=_best(score)) for name, score in _PAIRWISE.items()),
        Scorer(name="classification", score=_best_class(choice.classification)),
        Scorer(name="classification_every_match", score=_best_class(choice.classification_every_match)),
        Scorer(name="string_match_all", score=_all_answers(choice.string_match_all)),
        *(Scorer(name=name, score=_best(score), binary=True) for name, score in numbers.SCORERS.items()),
    )
}
