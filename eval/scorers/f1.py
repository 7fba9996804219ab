"""F1 of words, as LongBench defines it: English answers by whitespace, Chinese ones by segmentation."""

import re
import string
from collections import Counter
from collections.abc import Sequence

from .segmentation import segment

# the published list: it is not all of Unicode's punctuation, and 《 is missing from it
_CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』"  # noqa: RUF001
    "【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."  # noqa: RUF001
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_PUNCTUATION_AT_ALL = str.maketrans("", "", string.punctuation + _CHINESE)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles; a hyphen is deleted, so it joins its words."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def qa_f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words; 0 where nothing overlaps, also when both are empty."""
    return _f1(normalized(prediction).split(), normalized(gold).split())


def qa_f1_zh(prediction: str, gold: str) -> float:
    """The same for Chinese: segmented first, then each token loses punctuation and whitespace."""
    return _f1(_chinese_tokens(prediction), _chinese_tokens(gold))


def _chinese_tokens(text: str) -> list[str]:
    tokens = ["".join(token.lower().translate(_NO_PUNCTUATION_AT_ALL).split()) for token in segment(text)]
    return [token for token in tokens if token]


def _f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    shared = sum((Counter(prediction) & Counter(gold)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(prediction), shared / len(gold)
    return 2 * precision * recall / (precision + recall)
