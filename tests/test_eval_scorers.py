"""Scores of LongBench: values computed with the published scorers, and what must hold for any text."""

import random
import sys

import pytest

from assay.eval.scorers import SCORERS, find_scorer, first_line
from assay.eval.scorers.code import difflib_ratio, levenshtein_ratio
from assay.eval.scorers.subsequence import common, lengths

pytest.importorskip("jieba", reason="the extra `chinese` is not installed")

TREC = ("Description of something", "Definition of something", "Food", "Date")
NESTED = ("number", "number of people", "number of people killed")
GET = " ".join(["value = get_value(key)"] * 10)
SET = " ".join(["value = set_value(key)"] * 10)


def test_the_texts_of_the_ratios_are_longer_than_difflib_looks_at_closely() -> None:
    assert len(GET) == len(SET) == 229


def score(name: str, prediction: str, *answers: str, classes: tuple[str, ...] = ()) -> float:
    return find_scorer(name).score(prediction, answers, classes)


@pytest.mark.parametrize(
    ("name", "prediction", "gold", "expected"),
    [
        ("qa_f1", "The Eiffel Tower", "Eiffel tower", 1.0),
        ("qa_f1", "twenty-one", "twenty one", 0.0),
        ("qa_f1", "U.S.A.", "USA", 1.0),
        ("qa_f1", "naïve", "naive", 0.0),
        ("qa_f1", "the", "a", 0.0),
        ("qa_f1", "Paris\nQuestion: foo", "Paris", 0.5),
        ("qa_f1_zh", "在厦门大学举办", "厦门大学。", 0.5),
        ("qa_f1_zh", "。", "。", 0.0),
        ("qa_f1_zh", "ABC 大学", "abc大学", 1.0),
        ("count", "There are 12 unique out of 30", "12", 0.5),
        ("count", "012", "12", 0.0),
        ("count", "12.0", "12", 0.5),
        ("count", "none", "12", 0.0),
        ("retrieval", "Paragraph 3, because Paragraph 3 says", "Paragraph 3", 1.0),
        ("retrieval", "The 1st: Paragraph 3", "Paragraph 3", 0.5),
        ("retrieval", "Paragraph 30", "Paragraph 3", 0.0),
        ("retrieval_zh", "段落3和段落4", "段落3", 0.5),
        ("retrieval_zh", "段落\uff13", "段落3", 0.0),
        ("code_sim", "```python\nreturn x\n```", "return x", 1.0),
        ("code_sim", "# c\nreturn x", "return x", 1.0),
        ("code_sim", " \n\t\treturn x", "return x", 0.22),
        ("code_sim_skip_blank", " \n\t\treturn x", "return x", 0.89),
        ("code_sim", "x = 5 # five\ny=6", "return x", 0.0),
        ("code_sim", GET, SET, 0.03),
        ("code_sim_levenshtein", GET, SET, 0.96),
        ("code_sim", "A L I E N S", "A S A L", 0.33),
        ("code_sim_levenshtein", "A L I E N S", "A S A L", 0.44),
        ("code_sim", "# only comments", "", 1.0),
        ("rouge_l", "the cat sat", "the cat sat on the mat", 0.7499999953125),
        ("rouge_l", "...", "x y", 0.0),
        ("rouge_l", "", "x", 0.0),
        ("rouge_l", "a.b.c", "a b c", 0.999999995),
        ("rouge_l_zh", "会议讨论了预算和人员安排", "会议讨论预算与人员", 0.6666666618),
        ("rouge_l", "会议讨论了预算和人员安排", "会议讨论预算与人员", 0.0),
    ],
)
def test_a_score_is_the_published_one(name: str, prediction: str, gold: str, expected: float) -> None:
    assert score(name, prediction, gold) == pytest.approx(expected, abs=1e-10)


def test_a_class_named_inside_another_is_passed_over_as_published() -> None:
    both = "Description of something or Definition of something"
    assert score("classification", both, "Description of something", classes=TREC) == 0.5
    assert score("classification", "food", "Food", classes=TREC) == 0.0
    killed = "number of people killed"
    assert score("classification", killed, killed, classes=NESTED) == 0.5
    assert score("classification_every_match", killed, killed, classes=NESTED) == 1.0
    assert score("classification", "a date", "Food", classes=TREC) == 0.0
    # the published scorer compares a list with 0, which is always unequal: no class named is still no score
    assert score("classification", "nothing of the kind", "Food", classes=TREC) == 0.0


def test_only_the_first_line_of_a_worked_example_is_scored() -> None:
    answer = "\nParis\n\nPassage: Berlin is big.\nQuestion: where?\nAnswer: Berlin"
    assert score("qa_f1", first_line(answer), "Paris") == 1.0
    assert score("qa_f1", answer, "Paris") == pytest.approx(0.2)
    answer = "Type: Food\nQuestion: What is X ?\nType: Date"
    assert score("classification", first_line(answer), "Food", classes=TREC) == 1.0
    assert score("classification", answer, "Food", classes=TREC) == 0.5


def test_the_best_of_all_answers_counts() -> None:
    assert score("qa_f1", "NYC", "New York City", "NYC") == 1.0
    assert score("qa_f1", "NYC", "New York City") == 0.0


def test_ruler_counts_the_answers_that_are_found() -> None:
    assert score("string_match_all", "it is 12345", "1234") == 1.0
    assert score("string_match_all", "Seven and 12", "seven", "9") == 0.5


def test_rouge_of_a_long_text_without_a_full_stop_does_not_depend_on_the_stack() -> None:
    hypothesis = " ".join([f"c{i}" for i in range(600)] + [f"a{i}" for i in range(600)])
    reference = " ".join([f"b{i}" for i in range(600)] + [f"c{i}" for i in range(600)])
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(250)
    try:
        assert score("rouge_l", hypothesis, reference) == pytest.approx(0.499999995, abs=1e-11)
    finally:
        sys.setrecursionlimit(limit)


def test_blanks_after_the_last_full_stop_are_a_word_of_their_own() -> None:
    # of two words and the empty one, two are shared: P = 2/3, R = 1
    assert score("rouge_l", "a b. ", "a b") == pytest.approx(0.8, abs=1e-8)


def test_a_subsequence_is_the_longest_and_found_in_both() -> None:
    rng = random.Random(3)
    for _ in range(200):
        first, second = (rng.choices("abc", k=rng.randrange(12)) for _ in range(2))
        # a double loop, entry by entry
        table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
        for i, left in enumerate(first):
            for j, right in enumerate(second):
                table[i + 1][j + 1] = table[i][j] + 1 if left == right else max(table[i][j + 1], table[i + 1][j])
        assert lengths(first, second).tolist() == table
        shared = common(first, second)
        assert len(shared) == table[-1][-1]
        for side in (first, second):
            walk = iter(side)
            assert all(str(item) in walk for item in shared)


def test_which_of_equally_long_subsequences_is_taken_is_fixed() -> None:
    assert common(list("ab"), list("ba")) == ["b"]
    assert common(list("ba"), list("ab")) == ["a"]


def test_ratios_of_nothing_are_one() -> None:
    assert difflib_ratio("", "") == levenshtein_ratio("", "") == 1.0


def test_an_unknown_scorer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"a scorer must be one of qa_f1, .*, got 'bleu'"):
        find_scorer("bleu")


def test_a_gold_that_names_no_paragraph_is_refused() -> None:
    with pytest.raises(ValueError, match="the gold answer must name a paragraph"):
        score("retrieval", "Paragraph 3", "third")


def test_every_scorer_has_an_id_with_its_version() -> None:
    assert SCORERS["qa_f1"].id == "qa_f1@1"
    assert {name for name, scorer in SCORERS.items() if scorer.binary} == {
        *("numeric", "openai", "lm_eval_strict", "lm_eval_cot_strict", "lm_eval_flex", "vllm", "opencompass"),
    }


def test_a_missing_segmenter_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from assay.eval.scorers import segmentation

    segmentation._tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ModuleNotFoundError, match=r"jieba must be installed .*kernel-assay\[chinese\]"):
        score("qa_f1_zh", "大学", "大学")
