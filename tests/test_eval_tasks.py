"""Tasks and prompts: the published templates and lengths, truncation, chat templates, made-up tasks."""

import hashlib
from collections.abc import Sequence
from typing import Any

import pytest

from assay.eval.prompts import PromptPolicy, build_prompt
from assay.eval.tasks import Generation, Grid, Loading, Sample, all_tasks, find_task, load_task
from assay.eval.tasks.gsm8k import examples, gsm8k_sample
from assay.eval.tasks.longbench import longbench_sample

# beginning of the sha256 of each prompt with CONTEXT and INPUT in it
RENDERED = {
    "narrativeqa": "ca9f07fdf9f532e1",
    "qasper": "2348612ac9bae220",
    "multifieldqa_en": "c19398b7471faa00",
    "multifieldqa_zh": "39c14d7ae023c244",
    "hotpotqa": "d31e73b501d5c9db",
    "2wikimqa": "d31e73b501d5c9db",
    "musique": "d31e73b501d5c9db",
    "dureader": "66de4f9799dce491",
    "gov_report": "e64c669fb47c1fb6",
    "qmsum": "1ba55beaab0774e0",
    "multi_news": "2fa37178a851e562",
    "vcsum": "333ce30a208ff7d1",
    "trec": "a31ea386ec87ceb0",
    "triviaqa": "0ef1603d346d3bfe",
    "samsum": "b184d51d1f91b5e1",
    "lsht": "e414415003646b77",
    "passage_count": "fa3f78681dd457ea",
    "passage_retrieval_en": "8f1eab757de59e2c",
    "passage_retrieval_zh": "4632499f641fe741",
    "lcc": "c3d427e651b3b7cc",
    "repobench-p": "91686225aaaba008",
}
MAX_NEW = {
    32: "hotpotqa 2wikimqa musique triviaqa passage_count passage_retrieval_en passage_retrieval_zh",
    64: "multifieldqa_en multifieldqa_zh trec lsht lcc repobench-p",
    128: "narrativeqa qasper dureader samsum",
    512: "gov_report qmsum multi_news vcsum",
}
SCORED_BY = {
    "qa_f1": "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa",
    "qa_f1_zh": "multifieldqa_zh",
    "rouge_l": "gov_report qmsum multi_news samsum",
    "rouge_l_zh": "dureader vcsum",
    "classification": "trec lsht",
    "count": "passage_count",
    "retrieval": "passage_retrieval_en",
    "retrieval_zh": "passage_retrieval_zh",
    "code_sim": "lcc repobench-p",
}
NEVER_WRAPPED = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


class Letters:
    """A token per character, a start token that decodes to nothing, and a chat template if wanted."""

    def __init__(self, *, chat: bool = False) -> None:
        self.has_chat_template = chat

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [1] * special + [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(one) for one in ids if one != 1)

    def chat(self, text: str) -> str:
        return f"<user>{text}<bot>"


def record(**fields: Any) -> dict[str, Any]:
    return {
        "input": "INPUT",
        "context": "CONTEXT",
        "answers": ["ANSWER"],
        "length": 5,
        "dataset": "x",
        "language": "en",
        "all_classes": ["ANSWER", "OTHER"],
        "_id": "one",
    } | fields


def sample(prompt: str, target: str = "yes") -> Sample:
    return Sample(task="t", id="one", index=0, prompt=prompt, answers=(target,), target=target, cluster="c")


@pytest.mark.parametrize("name", RENDERED)
def test_a_prompt_is_the_published_one_to_the_byte(name: str) -> None:
    prompt = longbench_sample(find_task(name), record(), 0).prompt
    assert hashlib.sha256(prompt.encode()).hexdigest()[:16] == RENDERED[name]


def test_every_task_has_its_published_length_scorer_and_exceptions() -> None:
    tasks = {name: task for name, task in all_tasks().items() if task.family == "longbench"}
    assert {name: task.max_new_tokens for name, task in tasks.items()} == {
        name: length for length, names in MAX_NEW.items() for name in names.split()
    }
    assert {name: task.scored_by for name, task in tasks.items()} == {
        name: scorer for scorer, names in SCORED_BY.items() for name in names.split()
    }
    assert {name for name, task in tasks.items() if not task.chat} == NEVER_WRAPPED
    assert {name for name, task in tasks.items() if task.first_line} == {"trec", "triviaqa", "samsum", "lsht"}
    assert {name for name, task in tasks.items() if task.stop or task.min_new_tokens} == {"samsum"}
    assert (tasks["samsum"].stop, tasks["samsum"].min_new_tokens) == (("\n",), 1)
    assert sum(task.num_samples or 0 for task in tasks.values()) == 4750
    counts = {name: task.num_samples for name, task in tasks.items() if task.num_samples != 200}
    assert counts == {"multifieldqa_en": 150, "lcc": 500, "repobench-p": 500}


def test_longbench_e_has_thirteen_tasks_in_three_bins() -> None:
    tasks = {name: task for name, task in all_tasks().items() if task.family == "longbench_e"}
    assert len(tasks) == 13
    assert tasks["qasper_e"].num_samples == 100 + 100 + 24
    strata = {
        length: longbench_sample(tasks["qasper_e"], record(length=length), 0).stratum for length in (3999, 4000, 8000)
    }
    assert strata == {3999: "0-4k", 4000: "4-8k", 8000: "8k+"}
    assert longbench_sample(find_task("qasper"), record(), 0).stratum == ""
    assert tasks["qasper_e"].scorers == find_task("qasper").scorers


def test_braces_in_a_record_are_text() -> None:
    prompt = longbench_sample(find_task("lcc"), record(context="f(x) = {x: {0}}"), 0).prompt
    assert prompt == "Please complete the code given below. \nf(x) = {x: {0}}Next line of code:\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"_id": None}, "the field '_id' must be a text, got nothing"),
        ({"context": 5}, "the field 'context' must be a text, got 5"),
        ({"answers": []}, "the field 'answers' must hold at least one text"),
        ({"answers": [None]}, "the field 'answers' must hold at least one text"),
        ({"length": "5"}, "the field 'length' must be a whole number, got '5'"),
        ({"all_classes": None}, "the field 'all_classes' must list the classes, got nothing"),
    ],
)
def test_a_record_that_lacks_a_field_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        longbench_sample(find_task("trec"), record(**fields), 0)


def test_an_unknown_task_is_refused_with_those_that_come_close() -> None:
    with pytest.raises(ValueError, match=r"such as .*hotpotqa.*, got 'hotpot_qa'"):
        find_task("hotpot_qa")


def test_samples_that_share_a_context_are_of_one_cluster() -> None:
    task = find_task("multifieldqa_zh")
    first, second, other = (
        longbench_sample(task, record(_id=name, context=context), 0)
        for name, context in (("one", "CONTEXT"), ("two", "CONTEXT"), ("three", "OTHER"))
    )
    assert first.cluster == second.cluster == hashlib.sha1(b"CONTEXT", usedforsecurity=False).hexdigest()
    assert other.cluster != first.cluster


def test_eight_worked_examples_stand_before_a_question() -> None:
    task = find_task("gsm8k_cot")
    shots = examples(task, [])
    assert shots.startswith("Q: There are 15 trees in the grove.")
    assert shots.count("Q: ") == shots.count("\nA: ") == shots.count("The answer is ") == 8
    one = gsm8k_sample(task, {"question": "2 + 3?", "answer": "2 + 3 = <<2+3=5>>5.\n#### 5"}, 7, shots)
    assert one.prompt.endswith("The answer is 8.\n\nQ: 2 + 3?\nA:")
    assert (one.id, one.target) == ("test-0007", "2 + 3 = 5. The answer is 5.")
    assert task.stop == ("Q:", "</s>", "<|im_end|>")
    assert (task.scored_by, task.max_new_tokens, task.chat) == ("numeric", 256, False)


def test_five_examples_are_the_first_of_the_training_set() -> None:
    task = find_task("gsm8k")
    train = [{"question": f"{i} + {i}?", "answer": f"#### {2 * i}"} for i in range(9)]
    one = gsm8k_sample(task, {"question": "q?", "answer": "a\n#### 1"}, 0, examples(task, train))
    assert one.prompt.startswith("Question: 0 + 0?\nAnswer: #### 0\n\nQuestion: 1 + 1?")
    assert one.prompt.endswith("Question: 4 + 4?\nAnswer: #### 8\n\nQuestion: q?\nAnswer:")
    assert one.target == "a\n#### 1"
    with pytest.raises(ValueError, match="train must have at least 5 records, got 4"):
        examples(task, train[:4])
    with pytest.raises(ValueError, match="record 2 of train: the field 'answer' must be a text, got None"):
        examples(task, [train[0], {"question": "?"}, *train[2:]])


@pytest.mark.parametrize(("length", "kept"), [(8, "^ab" + "hij"), (9, "^abhij"), (6, "^a" + "ij"), (12, "^abcdefghij")])
def test_the_middle_is_taken_out_as_published(length: int, kept: str) -> None:
    # the start token is one of the first half, and gone once decoded: tokenised anew, the text gets another one
    prompt = build_prompt(
        find_task("lcc"), sample("abcdefghij"), Letters(), PromptPolicy(max_tokens=length), max_target=9
    )
    half = length // 2
    text = "abcdefghij" if length >= 11 else "abcdefghij"[: half - 1] + "abcdefghij"[-half:]
    assert prompt.text == text
    assert prompt.ids == (1, *map(ord, text))
    assert (prompt.tokens_before, prompt.truncated) == (11, length < 11)
    assert len(prompt.ids) <= length


def test_an_odd_length_loses_one_token_more() -> None:
    def ids(length: int) -> int:
        policy = PromptPolicy(max_tokens=length)
        return len(build_prompt(find_task("lcc"), sample("a" * 50), Letters(), policy, max_target=1).ids)

    assert ids(21) == ids(20) == 20


def test_nothing_is_cut_without_truncation() -> None:
    policy = PromptPolicy(truncation="none", max_tokens=4)
    prompt = build_prompt(find_task("lcc"), sample("a" * 50), Letters(), policy, max_target=1)
    assert (len(prompt.ids), prompt.truncated) == (51, False)


def test_the_chat_template_comes_after_truncation_and_not_around_worked_examples() -> None:
    policy = PromptPolicy(max_tokens=8)
    wrapped = build_prompt(find_task("qasper"), sample("abcdefghij"), Letters(chat=True), policy, max_target=9)
    assert wrapped.text == "<user>abcghij<bot>"
    # the template writes its special tokens itself
    assert wrapped.ids == tuple(map(ord, wrapped.text))
    assert wrapped.target_ids == tuple(map(ord, "yes"))
    for name in NEVER_WRAPPED:
        assert build_prompt(find_task(name), sample("ab"), Letters(chat=True), policy, max_target=9).text == "ab"
    plain = build_prompt(find_task("qasper"), sample("ab"), Letters(), policy, max_target=9)
    assert plain.text == "ab"
    never = PromptPolicy(chat="never")
    assert build_prompt(find_task("qasper"), sample("ab"), Letters(chat=True), never, max_target=9).text == "ab"


def test_a_required_chat_template_that_is_missing_is_refused() -> None:
    policy = PromptPolicy(chat="required")
    with pytest.raises(ValueError, match="the model must have a chat template for qasper, got none"):
        build_prompt(find_task("qasper"), sample("ab"), Letters(), policy, max_target=9)
    assert build_prompt(find_task("trec"), sample("ab"), Letters(), policy, max_target=9).text == "ab"


@pytest.mark.parametrize(
    ("prompt", "target", "expected"),
    [
        ("Answer:", "yes", " yes"),
        ("is: ", "3", "3"),
        ("code:\n", "    x", "    x"),
        ("回答\uff1a", "大学", "大学"),
        ("ab", "大", "大"),
    ],
)
def test_the_gold_answer_follows_as_the_language_has_it(prompt: str, target: str, expected: str) -> None:
    built = build_prompt(find_task("lcc"), sample(prompt, target), Letters(), PromptPolicy(), max_target=50)
    assert built.target_ids == tuple(map(ord, expected))
    short = build_prompt(find_task("lcc"), sample(prompt, target), Letters(), PromptPolicy(), max_target=1)
    assert short.target_ids == built.target_ids[:1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"truncation": "left"}, "truncation must be"),
        ({"chat": "auto"}, "chat must be"),
        ({"max_tokens": 1}, "at least 2"),
    ],
)
def test_an_unknown_policy_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptPolicy(**fields)


def made(name: str, **fields: Any) -> list[Sample]:
    return load_task(name, Loading(generation=Generation(**fields))).samples


SYNTHETIC = [name for name, task in all_tasks().items() if task.family == "synthetic"]


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_made_up_task_is_repeatable_labelled_and_answers_itself(name: str) -> None:
    task = find_task(name)
    samples = made(name, samples=3, length=300)
    assert samples == made(name, samples=3, length=300)
    assert samples != made(name, samples=3, length=300, seed=1)
    # a longer list begins with the shorter one
    assert made(name, samples=5, length=300)[:3] == samples
    assert (task.origin, task.num_samples) == ("synthetic", None)
    assert task.scorers == find_task(name.removeprefix("synthetic_")).scorers
    from assay.eval.scorers import find_scorer

    if task.language == "zh" and task.scored_by in ("qa_f1_zh", "rouge_l_zh"):
        pytest.importorskip("jieba", reason="the extra `chinese` is not installed")
    scores = [
        find_scorer(task.scored_by).score(task.answer(one.answers[0]), one.answers, one.classes) for one in samples
    ]
    assert min(scores) > 0.4
    assert len({one.id for one in samples}) == len({one.prompt for one in samples}) == 3


def test_a_planted_fact_is_in_its_context_once() -> None:
    for one in made("synthetic_qasper", samples=4, length=200):
        assert one.prompt.count(one.answers[0]) == 1


def test_a_made_up_context_has_the_length_that_was_asked_for() -> None:
    assert all(200 <= (one.length or 0) < 230 for one in made("synthetic_qasper", samples=4, length=200))


def test_the_paragraph_of_an_abstract_holds_its_sentences() -> None:
    for one in made("synthetic_passage_retrieval_en", samples=4, length=600):
        paragraphs = one.prompt.split("\n\n")
        paragraph = next(text for text in paragraphs if text.startswith(f"{one.answers[0]}: "))
        abstract = paragraphs[paragraphs.index("The following is an abstract.") + 1]
        assert all(f"{sentence}." in paragraph for sentence in abstract.removesuffix(".").split(". "))


def test_the_count_of_paragraphs_is_that_of_the_different_ones() -> None:
    for one in made("synthetic_passage_count", samples=6, length=300):
        paragraphs = [text.split(": ", 1)[1] for text in one.prompt.split("\n\n") if text.startswith("Paragraph ")]
        assert one.answers == (str(len(set(paragraphs))),)
        assert len(set(paragraphs)) < len(paragraphs)


def test_needles_lie_where_the_grid_puts_them() -> None:
    grid = Grid(lengths=(100, 400), depths=(0, 50, 100), samples=2)
    samples = load_task("needle", Loading(grid=grid)).samples
    assert [one.id for one in samples[:3]] == ["100/0/0", "100/0/1", "100/50/0"]
    assert len(samples) == 12
    for one in samples:
        length, depth, _ = map(int, one.id.split("/"))
        text = one.prompt.split("\n\n")[1]
        place = text.index(one.answers[0]) / len(text)
        assert abs(place - depth / 100) < 0.15
        assert length <= (one.length or 0) < length + 40
        assert one.stratum == f"{length} words, {depth} %"


def test_one_key_among_four_is_asked_for_or_all_four() -> None:
    grid = Grid(lengths=(200,), depths=(50,), samples=3)
    for one in load_task("needle_multikey", Loading(grid=grid)).samples:
        assert (len(one.answers), one.prompt.count("secret number of")) == (1, 5)
    for one in load_task("needle_multivalue", Loading(grid=grid)).samples:
        assert len(set(one.answers)) == 4
        assert all(one.prompt.count(answer) == 1 for answer in one.answers)
    for one in load_task("variable_tracking", Loading(grid=grid)).samples:
        assert all(
            f"Assign {after} = {before}." in one.prompt
            for before, after in zip(one.answers, one.answers[1:], strict=False)
        )


@pytest.mark.parametrize("fields", [{"lengths": ()}, {"depths": (101,)}, {"samples": 0}, {"lengths": (0,)}])
def test_a_grid_without_cells_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a grid must have|depths must be between"):
        Grid(**fields)


@pytest.mark.parametrize("fields", [{"samples": 0}, {"length": 0}])
def test_nothing_cannot_be_generated(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="samples and length must be at least 1"):
        Generation(**fields)
