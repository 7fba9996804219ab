"""ROUGE-L as LongBench uses it: that of the package ``rouge`` 1.0.1, which is neither ROUGE-1.5.5 nor rouge-score.

It compares sets: a word that the longest common subsequences share counts once, however often it occurs. The package
recurses and fails on long texts without a full stop, which LongBench takes for a score of 0; here they get their score.
"""

from .segmentation import segment
from .subsequence import common


def rouge_l(prediction: str, gold: str) -> float:
    """F of ROUGE-L at the level of the summary, over sets of words; 0 where either side has no sentence."""
    hypothesis, reference = _sentences(prediction), _sentences(gold)
    if not hypothesis or not reference:
        return 0.0
    union: set[object] = set()
    for sentence in reference:
        for other in hypothesis:
            union.update(common(sentence, other))
    recall = len(union) / len({word for sentence in reference for word in sentence})
    precision = len(union) / len({word for sentence in hypothesis for word in sentence})
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, gold: str) -> float:
    """The same over the words of a Chinese text."""
    return rouge_l(" ".join(segment(prediction)), " ".join(segment(gold)))


def _sentences(text: str) -> list[list[str]]:
    """What stands between full stops, as words; one of blanks alone is one empty word, as in the package."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]
