"""Similarity of a line of code with the right one, in percent and rounded, as fuzzywuzzy's ``fuzz.ratio`` gives it.

That library computes one of two things, depending on whether python-Levenshtein is installed. Here each has a name.
"""

from collections.abc import Callable
from difflib import SequenceMatcher

from .subsequence import lengths

_COMMENTS = ("`", "#", "//")


def code_sim(prediction: str, gold: str) -> float:
    """The first line without a comment or a fence, compared by difflib: the published score."""
    return _similarity(_first_code_line(prediction, skip_blank=False), gold, difflib_ratio)


def code_sim_skip_blank(prediction: str, gold: str) -> float:
    """The same, but blank lines are passed over, as in lm-evaluation-harness."""
    return _similarity(_first_code_line(prediction, skip_blank=True), gold, difflib_ratio)


def code_sim_levenshtein(prediction: str, gold: str) -> float:
    """The same line as ``code_sim``, compared as python-Levenshtein does."""
    return _similarity(_first_code_line(prediction, skip_blank=False), gold, levenshtein_ratio)


def difflib_ratio(first: str, second: str) -> float:
    """Twice the matching characters over all; beyond 200 characters difflib ignores frequent ones."""
    return SequenceMatcher(None, first, second).ratio()


def levenshtein_ratio(first: str, second: str) -> float:
    """Twice the longest common subsequence over all characters: an edit is an insertion or a deletion."""
    both = len(first) + len(second)
    return 2 * int(lengths(first, second)[-1, -1]) / both if both else 1.0


def _similarity(line: str, gold: str, ratio: Callable[[str, str], float]) -> float:
    # to whole percent, halves to the even one
    return round(100 * ratio(line, gold)) / 100


def _first_code_line(prediction: str, *, skip_blank: bool) -> str:
    for line in prediction.lstrip("\n").split("\n"):
        if not any(mark in line for mark in _COMMENTS) and not (skip_blank and not line.strip()):
            return line
    return ""
