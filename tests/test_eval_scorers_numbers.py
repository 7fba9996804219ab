"""Numbers of GSM8K answers: what each published harness reads, and ours."""

import pytest

from assay.eval.scorers import find_scorer
from assay.eval.scorers import numbers as of

HARNESSES = ("openai", "lm_eval_strict", "lm_eval_flex", "vllm", "opencompass", "numeric")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 70,000", ("70000", "70000", "70000", "70000", "000", "70000")),
        ("The answer is $29.00.", (None, None, "29.00", "0", "29.00", "29")),
        ("The answer is 18.0", (None, None, "18.0", "0", "18.0", "18")),
        ("#### -10", ("-10", "-10", "-10", "10", "-10", "-10")),
        ("He makes $18 per day (5 days a week).", (None, None, "5", "5", "5", "5")),
        ("#### 18\n\nQuestion: next? #### 7", ("18", "18", "7", "7", "18", "18")),
        ("$1,450,000.", (None, None, "1450000", "1450000", "000", "1450000")),
        ("05", (None, None, "05", None, "05", "5")),
        ("#### 18.", ("18.", "18", "18", "18", "18", "18")),
        ("#### $18", (None, None, "18", "18", "18", "18")),
        ("no number", (None, None, None, None, None, None)),
    ],
)
def test_each_harness_reads_the_number_that_it_is_known_to_read(text: str, expected: tuple[str | None, ...]) -> None:
    assert tuple(getattr(of, name)(text) for name in HARNESSES) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("23-15", "15"),
        ("23 - 15 = -8", "-8"),
        ("it costs -$5.50.", "-5.5"),
        ("the answer is 7, not 8", "7"),
        ("The answer is 3. The answer is 1,234.50 dollars", "1234.5"),
        ("#### nothing, though 5 came before", "5"),
        ("5 apples ####", None),
        ("18 is what the answer is", None),
        ("1,2 and 12,34", "34"),
        ("-0", "0"),
        ("100", "100"),
        ("7\nQ: and 8?", "7"),
        ("9</s> 10", "9"),
        ("\u0661\u0662", None),
        # four letters that become eight in lower case
        ("\u0130\u0130\u0130\u0130 The ANSWER IS 18", "18"),
    ],
)
def test_ours_understands_signs_groups_and_decimals(text: str, expected: str | None) -> None:
    assert of.numeric(text) == expected


@pytest.mark.parametrize("gold", ["2 * 9 = <<2*9=18>>18\n#### 18", "So it is 1,450,000.\n#### 1,450,000", "#### -10"])
def test_a_gold_answer_is_right_for_every_scorer_that_reads_its_form(gold: str) -> None:
    for name in ("numeric", "openai", "lm_eval_strict", "vllm"):
        assert find_scorer(name).score(gold, [gold], []) == 1.0
    if "," not in gold:
        assert find_scorer("opencompass").score(gold, [gold], []) == 1.0
    number = gold.split()[-1]
    assert find_scorer("lm_eval_cot_strict").score(f"The answer is {number}.", [gold], []) == 1.0
    assert find_scorer("lm_eval_flex").score(f"{gold} ", [gold], []) == 1.0
    assert find_scorer("numeric").score("The answer is 3.", [gold], []) == 0.0


def test_digits_without_end_are_a_number_like_any_other() -> None:
    # Python makes no integer of more than 4300 digits
    assert of.vllm("9" * 5000) == "9" * 5000
    assert (of.vllm("so 18"), of.vllm("000"), of.vllm("05")) == ("18", "0", None)
    for name in ("numeric", "lm_eval_flex", "vllm", "opencompass"):
        assert find_scorer(name).score("9" * 5000, ["#### 9"], []) == 0.0


def test_an_amount_with_cents_is_right_by_ours_alone() -> None:
    # lm-evaluation-harness issue 3214: the flexible reading keeps the cents, which the gold lacks
    text, gold = "The total of the order is $29.00.", "#### 29"
    assert find_scorer("numeric").score(text, [gold], []) == 1.0
    assert find_scorer("lm_eval_flex").score(text, [gold], []) == 0.0


def test_a_gold_without_its_number_is_refused() -> None:
    with pytest.raises(ValueError, match="the gold answer must end in '#### number', got 'eighteen'"):
        find_scorer("numeric").score("18", ["eighteen"], [])
