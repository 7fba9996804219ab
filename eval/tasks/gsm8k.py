"""GSM8K: eight worked examples with a chain of thought, or five from the training set.

The worked examples and both forms are those of lm-evaluation-harness (``gsm8k_cot`` and ``gsm8k``), with one change:
the five examples are the first ones of the training set, where that runner draws five anew for each question. Both
forms are completions, so no chat template is put around them.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ..surrogates import check_whole
from .task import Sample, Task

NUM_SAMPLES, NUM_TRAIN = 1319, 7473
MAX_NEW_TOKENS = 256
COMMON_SCORERS = ("openai", "lm_eval_flex", "vllm", "opencompass")
_CALCULATOR = re.compile(r"<<[^>]*>>")
_FINAL = re.compile(r"\s*####\s*(.*)\Z", re.DOTALL)


@cache
def published() -> dict[str, Any]:
    """The published examples and forms."""
    content: dict[str, Any] = json.loads(files(__package__).joinpath("gsm8k_prompts.json").read_text(encoding="utf-8"))
    return content


@cache
def gsm8k_tasks() -> dict[str, Task]:
    """``gsm8k_cot`` with eight examples, ``gsm8k`` with five."""
    return {
        "gsm8k_cot": _task("gsm8k_cot", "cot8", ("numeric", "lm_eval_cot_strict")),
        "gsm8k": _task("gsm8k", "hash5", ("numeric", "lm_eval_strict")),
    }


def _task(name: str, form: str, scorers: tuple[str, ...]) -> Task:
    return Task(
        name=name,
        family="gsm8k",
        category="arithmetic",
        language="en",
        scorers=(*scorers, *COMMON_SCORERS),
        max_new_tokens=MAX_NEW_TOKENS,
        stop=tuple(published()[form]["stop"]),
        chat=False,
        num_samples=NUM_SAMPLES,
    )


def examples(task: Task, train: Sequence[Mapping[str, Any]]) -> str:
    """The worked examples that stand before each question; ``train`` is read by the five-example form alone.

    Raises:
        ValueError: If ``train`` has fewer records than the form needs, or other ones.
    """
    form = _form(task)
    if task.name == "gsm8k_cot":
        worked = [(example["question"], example["target"]) for example in form["fewshot"]]
    else:
        if len(train) < form["num_fewshot"]:
            raise ValueError(f"train must have at least {form['num_fewshot']} records, got {len(train)}")
        worked = [_worked(record, line) for line, record in enumerate(train[: form["num_fewshot"]], start=1)]
    return "".join(f"{form['doc_to_text'].format(question=question)} {answer}\n\n" for question, answer in worked)


def gsm8k_sample(task: Task, record: Mapping[str, Any], index: int, shots: str) -> Sample:
    """One record as a sample; ``shots`` is what ``examples`` gave.

    Raises:
        ValueError: If a field is missing, or the answer does not end in ``#### number``.
    """
    question, answer = _question_and_answer(record)
    if answer.count("####") != 1:
        raise ValueError(f"the answer must hold '####' once, got {answer.count('####')} times")
    return Sample(
        task=task.name,
        id=f"test-{index:04d}",
        index=index,
        prompt=shots + _form(task)["doc_to_text"].format(question=question),
        answers=(answer,),
        target=_target(task, answer),
        cluster=hashlib.sha1(question.encode(), usedforsecurity=False).hexdigest(),
    )


def _worked(record: Mapping[str, Any], number: int) -> tuple[str, str]:
    try:
        return _question_and_answer(record)
    except ValueError as error:
        raise ValueError(f"record {number} of train: {error}") from error


def _question_and_answer(record: Mapping[str, Any]) -> tuple[str, str]:
    for name in ("question", "answer"):
        if not isinstance(record.get(name), str):
            raise ValueError(f"the field {name!r} must be a text, got {record.get(name)!r}")
        check_whole(record[name])
    return record["question"], record["answer"]


def _target(task: Task, answer: str) -> str:
    """The worked answer in the words of the examples before it."""
    if task.name == "gsm8k":
        return answer
    return _FINAL.sub(r" The answer is \1.", _CALCULATOR.sub("", answer))


def _form(task: Task) -> dict[str, Any]:
    form: dict[str, Any] = published()["cot8" if task.name == "gsm8k_cot" else "hash5"]
    return form
