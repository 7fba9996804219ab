# ruff: noqa: RUF001  # Chinese punctuation is meant
"""Generated tasks in the shape of LongBench's 21: the same prompts, fields and scorers, with made-up contents.

They exercise templates, truncation and scorers where the published data is not at hand. What they measure is another
matter, so they are labelled synthetic and never averaged with real tasks.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

from ._synthetic_code import code_files
from ._synthetic_text import Writer
from .longbench import longbench_sample, longbench_tasks
from .task import SYNTHETIC, Sample, Task

PREFIX = "synthetic_"
Record = dict[str, Any]
PARAGRAPHS, SHOTS, KEY_SENTENCES, ABSTRACT = 30, 8, 4, 2
CLASSES = ("Number of people", "Number of days", "City", "Country", "Description of a thing", "Name of a person")
CLASSES_ZH = ("体育", "财经", "教育", "科技", "农业", "交通")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How much is generated: the same values give the same samples everywhere.

    Attributes:
        samples: Per task.
        length: Of a context, about, in words or Chinese characters.
        seed: Of the random stream, which also depends on the task and the position of the sample.
    """

    samples: int = 16
    length: int = 800
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that nothing can be made of."""
        if self.samples < 1 or self.length < 1:
            raise ValueError(f"samples and length must be at least 1, got {self.samples} and {self.length}")


@cache
def synthetic_tasks() -> dict[str, Task]:
    """One task for each of LongBench's, by name."""
    real = [task for task in longbench_tasks().values() if task.family == "longbench"]
    return {
        task.name: task
        for task in (
            replace(one, name=PREFIX + one.name, family="synthetic", num_samples=None, origin=SYNTHETIC) for one in real
        )
    }


def synthetic_samples(task: Task, generation: Generation) -> list[Sample]:
    """The samples of a generated task."""
    make = _MAKERS[task.name.removeprefix(PREFIX)]
    samples = []
    for index in range(generation.samples):
        writer = Writer(random.Random(f"{generation.seed} {task.name} {index}"), task.language == "zh")
        record: Record = {"input": "", "all_classes": None, **make(writer, generation.length)}
        record |= {"_id": f"made-{index:04d}", "length": writer.measure(record["context"])}
        samples.append(longbench_sample(task, record, index))
    return samples


def _one_document(writer: Writer, length: int) -> Record:
    """A fact in one document."""
    statement, question, answer = writer.fact()
    context = writer.join(writer.hide(writer.filler(length), [statement]))
    return {"context": context, "input": question, "answers": [answer]}


def _two_documents(writer: Writer, length: int) -> Record:
    """Two facts in two of ten documents, of which the second can only be found by the first."""
    house, founder, answer = writer.name(), writer.name(), writer.number()
    if writer.zh:
        facts = [f"{house}的前身是{founder}。", f"{founder}的门牌号是{answer}。"]
        question, title = f"{house}的前身的门牌号是多少？", "文章{}："
    else:
        facts = [f"{house} was founded by {founder}.", f"{founder} lived at number {answer}."]
        question, title = f"At which number did the founder of {house} live?", "Passage {}:"
    documents = [writer.filler(max(1, length // 10)) for _ in range(10)]
    for fact, at in zip(facts, writer.rng.sample(range(10), 2), strict=True):
        documents[at] = writer.hide(documents[at], [fact])
    numbered = [f"{title.format(at)}\n{writer.join(document)}" for at, document in enumerate(documents, start=1)]
    return {"context": "\n".join(numbered), "input": question, "answers": [answer]}


def _summary(writer: Writer, length: int) -> Record:
    """Key sentences, called so, among filler; the answer repeats them."""
    facts = [writer.fact()[0] for _ in range(KEY_SENTENCES)]
    mark = "要点：" if writer.zh else "Key point: "
    context = writer.hide(writer.filler(length), [mark + fact for fact in facts])
    question = "会议的要点是什么？" if writer.zh else "What are the key points?"
    return {"context": writer.join(context), "input": question, "answers": [writer.join(facts)]}


def _classes(writer: Writer, length: int) -> Record:
    """Examples of classes, and one more text of a class among them."""
    classes = CLASSES_ZH if writer.zh else CLASSES
    text = "新闻：{}\n类别：" if writer.zh else "Question: {}\nType: "
    examples: list[str] = []
    while writer.measure("\n".join(examples)) < length:
        name = writer.rng.choice(classes)
        examples.append(text.format(_of_class(writer, name)) + name)
    answer = writer.rng.choice(classes)
    question = text.format(_of_class(writer, answer)).rstrip()
    return {"context": "\n".join(examples), "input": question, "answers": [answer], "all_classes": list(classes)}


def _of_class(writer: Writer, name: str) -> str:
    return f"{writer.name()}{name}消息" if writer.zh else f"What is the {name.lower()} of {writer.name()} ?"


def _trivia(writer: Writer, length: int) -> Record:
    """Questions on passages with their answers, and one more."""
    shots = []
    for _ in range(SHOTS):
        statement, question, answer = writer.fact()
        passage = writer.join(writer.hide(writer.filler(max(1, length // SHOTS)), [statement]))
        shots.append((f"Passage:\n{passage}\nQuestion:\n{question}\nAnswer:\n", answer))
    context = "\n\n".join(question + answer for question, answer in shots[:-1])
    return {"context": context, "input": shots[-1][0], "answers": [shots[-1][1]]}


def _dialogues(writer: Writer, length: int) -> Record:
    """Dialogues with their summaries, and one more."""
    shots = []
    for _ in range(SHOTS):
        first, second, (statement, question, _) = writer.name(), writer.name(), writer.fact()
        filler = writer.filler(max(1, length // SHOTS))
        lines = [f"{(first, second)[at % 2]}: {sentence}" for at, sentence in enumerate(filler)]
        lines += [f"{first}: {question}", f"{second}: {statement}"]
        shots.append(("Dialogue: " + "\n".join(lines) + "\nSummary: ", f"{second} tells {first}: {statement}"))
    context = "\n".join(dialogue + summary for dialogue, summary in shots[:-1])
    return {"context": context, "input": shots[-1][0], "answers": [shots[-1][1]]}


def _count(writer: Writer, length: int) -> Record:
    """Paragraphs of which some occur twice; the answer counts the different ones."""
    unique = writer.rng.randrange(2, 11)
    different = [writer.join(writer.filler(max(1, length // 12))) for _ in range(unique)]
    paragraphs = different + writer.rng.choices(different, k=writer.rng.randrange(1, 4))
    writer.rng.shuffle(paragraphs)
    numbered = [f"Paragraph {at}: {paragraph}" for at, paragraph in enumerate(paragraphs, start=1)]
    return {"context": "\n\n".join(numbered), "answers": [str(unique)]}


def _retrieval(writer: Writer, length: int) -> Record:
    """Thirty paragraphs, and sentences of one of them."""
    paragraphs = [writer.filler(max(1, length // PARAGRAPHS)) for _ in range(PARAGRAPHS)]
    at = writer.rng.randrange(PARAGRAPHS)
    title, gap = ("段落{}：", "段落{}") if writer.zh else ("Paragraph {}: ", "Paragraph {}")
    numbered = [title.format(one) + writer.join(sentences) for one, sentences in enumerate(paragraphs, start=1)]
    abstract = writer.rng.sample(paragraphs[at], min(ABSTRACT, len(paragraphs[at])))
    return {"context": "\n\n".join(numbered), "input": writer.join(abstract), "answers": [gap.format(at + 1)]}


def _next_line(writer: Writer, length: int) -> Record:
    """A part of a file of code; the answer is its next line."""
    return {"context": "", **_code(writer, length)}


def _next_line_of_many(writer: Writer, length: int) -> Record:
    """Parts of other files, then a part of a file whose next line is the answer."""
    others = [_code(writer, max(1, length // 4)) for _ in range(3)]
    last = _code(writer, max(1, length // 4))
    context = "".join(other["context"] for other in others)
    return {"context": context, "input": last["context"], "answers": last["answers"]}


def _code(writer: Writer, length: int) -> Record:
    """Lines of about ``length`` words in all, ending before one that holds code and no comment."""
    lines = writer.rng.choice(code_files())
    start = writer.rng.randrange(len(lines) // 2)
    ends = [at for at in range(start + 1, len(lines)) if lines[at].strip() and not any(c in lines[at] for c in "`#/")]
    words = 0
    for end, after in pairwise([start, *ends]):
        words += sum(len(line.split()) for line in lines[end:after])
        if words >= length:
            break
    return {"context": "".join(line + "\n" for line in lines[start:after]), "answers": [lines[after]]}


_MAKERS: dict[str, Callable[[Writer, int], Record]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"), _one_document),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "dureader"), _two_documents),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), _summary),
    **dict.fromkeys(("trec", "lsht"), _classes),
    "triviaqa": _trivia,
    "samsum": _dialogues,
    "passage_count": _count,
    **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), _retrieval),
    "lcc": _next_line,
    "repobench-p": _next_line_of_many,
}
