"""The number that a worked answer comes to, as six scorers of GSM8K read it; all are kept so that numbers compare.

``numeric`` is ours and the primary one. The others reproduce published harnesses, with what they get wrong.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

# what ends an answer in any of the forms
STOPS = ("Question:", "Q:", "</s>", "<|im_end|>")
# a sign belongs to a number only where it does not stand between two
_NUMBER = re.compile(r"(?:(?<![\w.,)])[-+])?\$?(\d{1,3}(?:,\d{3})+(?!\d)|\d+)(\.\d+)?", re.ASCII)
_ANNOUNCED = re.compile("answer is", re.ASCII | re.IGNORECASE)
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_HASHES = re.compile(r"#### (\-?[0-9\.\,]+)")
_ANSWER_IS = re.compile(r"The answer is (\-?[0-9\.\,]+).")
_IGNORED = tuple(re.compile(pattern) for pattern in (",", r"\$", r"(?s).*#### ", r"\.$"))


def numeric(text: str) -> str | None:
    """Ours: what is announced, else the last number; signs, ``$``, groups of thousands and decimals are understood.

    The text is cut at the first stop. After ``####`` the first number counts, after the last "answer is" likewise. The
    result is written in its shortest form, so that equal numbers are equal texts.
    """
    text = text[: min((at for stop in STOPS if (at := text.find(stop)) >= 0), default=len(text))]
    if "####" in text:
        found = _NUMBER.search(text, text.index("####") + 4)
    elif announced := list(_ANNOUNCED.finditer(text)):
        found = _NUMBER.search(text, announced[-1].end())
    else:
        found = next(reversed(list(_NUMBER.finditer(text))), None)
    return None if found is None else _shortest(found.group())


def openai(text: str) -> str | None:
    """The dataset's own: the first number behind ``####``, without commas; compared as text."""
    found = _HASHES.search(text)
    return found.group(1).strip().replace(",", "") if found else None


def lm_eval_strict(text: str) -> str | None:
    """lm-evaluation-harness, ``strict-match`` of ``gsm8k``."""
    found = _HASHES.search(text)
    return _stripped(found.group(1)) if found else None


def lm_eval_cot_strict(text: str) -> str | None:
    """lm-evaluation-harness, ``strict-match`` of ``gsm8k_cot``."""
    found = _ANSWER_IS.search(text)
    return _stripped(found.group(1)) if found else None


def lm_eval_flex(text: str) -> str | None:
    """lm-evaluation-harness, ``flexible-extract``: the last number-like text."""
    found = next(reversed(list(_FLEXIBLE.finditer(text))), None)
    return _stripped(found.group().strip()) if found else None


def vllm(text: str) -> str | None:
    """Of vLLM and SGLang: the last digits once commas are gone, read as a Python literal: no sign, no decimals."""
    digits = re.findall(r"\d+", text.replace(",", ""))
    last = digits[-1] if digits else ""
    # a literal has ASCII digits and no leading zero, unless it is zero
    valid = last.isascii() and last.isdigit() and (not last.startswith("0") or not last.strip("0"))
    # without an integer, of which Python makes none from more than 4300 digits
    return (last.lstrip("0") or "0") if valid else None


def opencompass(text: str) -> str | None:
    """OpenCompass: the last number before the next question; commas split numbers."""
    numbers = re.findall(r"\-?\d+\.\d+|\-?\d+", text.split("Question:")[0])
    return numbers[-1] if numbers else None


@dataclass(frozen=True, slots=True)
class NumberScorer:
    """Compares the number of an answer with that of the gold; an answer without one is wrong.

    Attributes:
        extract: Reads an answer.
        read_gold: Reads the gold, which ends in ``#### number``.
        equal: Compares the two.
    """

    extract: Callable[[str], str | None]
    read_gold: Callable[[str], str | None]
    equal: Callable[[str, str], bool]

    def __call__(self, prediction: str, gold: str) -> float:
        """1 if the numbers agree, 0 otherwise."""
        expected = self.read_gold(gold)
        if expected is None:
            raise ValueError(f"the gold answer must end in '#### number', got {gold[-60:]!r}")
        found = self.extract(prediction)
        return float(found is not None and self.equal(found, expected))


def _same_text(found: str, expected: str) -> bool:
    return found == expected


def _same_lowercase(found: str, expected: str) -> bool:
    return found.lower() == expected.lower()


def _nearly(found: str, expected: str) -> bool:
    return found == expected or abs(float(found) - int(expected)) < 1e-6


def _after_hashes(gold: str) -> str | None:
    return gold.split("#### ")[1].replace(",", "") if "#### " in gold else None


SCORERS = {
    "numeric": NumberScorer(numeric, numeric, _same_text),
    "openai": NumberScorer(openai, openai, _same_text),
    "lm_eval_strict": NumberScorer(lm_eval_strict, lambda gold: _stripped(gold), _same_lowercase),
    "lm_eval_cot_strict": NumberScorer(lm_eval_cot_strict, lambda gold: _stripped(gold), _same_lowercase),
    "lm_eval_flex": NumberScorer(lm_eval_flex, lambda gold: _stripped(gold), _same_lowercase),
    "vllm": NumberScorer(vllm, vllm, _same_text),
    "opencompass": NumberScorer(opencompass, _after_hashes, _nearly),
}


def _stripped(text: str) -> str:
    for pattern in _IGNORED:
        text = pattern.sub("", text)
    return text


def _shortest(text: str) -> str:
    number = Decimal(text.replace("$", "").replace(",", "")).normalize()
    # minus zero is zero; a normalised hundred is 1E+2
    return f"{number:f}" if number else "0"
