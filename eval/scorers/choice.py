"""Scores of answers that name a class, a number or a paragraph, as LongBench defines them."""

import re
from collections.abc import Callable, Sequence


def classification(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """One over the number of classes named, if the right one is among them; case counts.

    The published scorer takes a class out of the list while it walks along it, so the class after it is passed over:
    with nested names, some that should go stay. That is part of the published scores, and kept.
    """
    named = [name for name in classes if name in prediction]
    at = 0
    while at < len(named):
        if _inside(named[at], gold):
            named.remove(named[at])
        at += 1
    return 1 / len(named) if gold in named else 0.0


def classification_every_match(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """The same with every class gone whose name is a part of the right one's."""
    named = [name for name in classes if name in prediction and not _inside(name, gold)]
    return 1 / len(named) if gold in named else 0.0


def _inside(name: str, gold: str) -> bool:
    return name in gold and name != gold


def count(prediction: str, gold: str) -> float:
    """Share of the numbers in the answer that are written as the right one."""
    return _share(prediction, gold)


def retrieval_by(pattern: str) -> Callable[[str, str], float]:
    """A scorer: share of the numbers in the answer that are the paragraph's, which ``pattern`` finds in the gold."""
    paragraph = re.compile(pattern)

    def retrieval(prediction: str, gold: str) -> float:
        found = paragraph.search(gold)
        if found is None:
            raise ValueError(f"the gold answer must name a paragraph as {pattern}, got {gold[:60]!r}")
        return _share(prediction, found.group(1))

    return retrieval


retrieval = retrieval_by(r"Paragraph (\d+)")
retrieval_zh = retrieval_by(r"段落(\d+)")


def _share(prediction: str, gold: str) -> float:
    # full-width digits are digits to the pattern, and never equal to the gold's
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the prediction, whatever their case; RULER's score."""
    text = prediction.lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)
