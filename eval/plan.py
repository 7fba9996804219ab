"""The plan of a run: every sample with its prompt, in batches, the longest first."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from .models.interface import Model
from .prompts import Prompt, build_prompt
from .run_folder import Item
from .settings import fingerprint, text_digest
from .suite import Suite
from .tasks import DataError, Loaded, Sample, Task, find_task, load_task


class PlanError(ValueError):
    """Nothing can be asked; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A sample that is to be asked; ``tokens`` are those of its prompt and of the most that may follow."""

    task: Task
    sample: Sample
    item: Item
    prompt: Prompt
    max_new_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples that are asked together; the number is the same in every run of the plan."""

    number: int
    members: tuple[Planned, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run asks.

    Attributes:
        planned: Samples to be asked, in the order of the suite.
        items: All samples, also those that cannot be asked.
        loaded: What was read, by task.
        unloaded: Tasks whose data could not be read, with the reason.
        wrapped: Tasks whose prompts are in a chat template.
    """

    planned: list[Planned]
    items: list[Item]
    loaded: dict[str, Loaded]
    unloaded: dict[str, str] = field(default_factory=dict)
    wrapped: tuple[str, ...] = ()


def make_plan(suite: Suite, model: Model, ids: Mapping[str, Sequence[str]] | None = None) -> Plan:
    """Load the tasks of a suite and build their prompts.

    Args:
        suite: The suite.
        model: Whose tokenizer makes the prompts.
        ids: Samples of an earlier run by task, which are asked instead of a draw.

    Raises:
        PlanError: If no task can be loaded, or an earlier sample is not there.
        ValueError: If a chat template is required and the model has none.
    """
    planned: list[Planned] = []
    items: list[Item] = []
    loaded: dict[str, Loaded] = {}
    unloaded: dict[str, str] = {}
    for name in suite.tasks:
        try:
            loaded[name] = load_task(name, suite.loading)
        except DataError as error:
            unloaded[name] = str(error)
            continue
        chosen = _chosen(loaded[name], suite, None if ids is None else ids.get(name, ()))
        mine = [_planned(find_task(name), sample, suite, model) for sample in chosen]
        planned += [one for one in mine if not one.item.broken]
        items += [one.item for one in mine]
        wanted = None if ids is None else set(ids.get(name, ()))
        items += [
            Item(task=name, id=one.id, index=one.index, broken=one.reason)
            for one in loaded[name].broken
            if wanted is None or one.id in wanted
        ]
    if not planned:
        reasons = "; ".join(dict.fromkeys(unloaded.values())) or (items[0].broken if items else "no samples")
        raise PlanError(f"suite {suite.name} must have a sample that can be asked, got none: {reasons}")
    wrapped = tuple(name for name in loaded if suite.prompt.wraps(find_task(name), model.tokenizer))
    return Plan(planned=planned, items=items, loaded=loaded, unloaded=unloaded, wrapped=wrapped)


def _chosen(loaded: Loaded, suite: Suite, ids: Sequence[str] | None) -> list[Sample]:
    if ids is not None:
        known = {sample.id: sample for sample in loaded.samples} | {one.id: None for one in loaded.broken}
        missing = [one for one in ids if one not in known]
        if missing:
            raise PlanError(f"{loaded.task.name} must have the samples of the earlier run, got no {missing[0]!r}")
        return [sample for one in dict.fromkeys(ids) if (sample := known[one]) is not None]
    limit = suite.asking.limit
    if limit is None or limit >= len(loaded.samples):
        return loaded.samples
    return draw(loaded.samples, limit, seed=f"{suite.asking.seed} {loaded.task.name}")


def draw(samples: Sequence[Sample], count: int, *, seed: str) -> list[Sample]:
    """Samples spread over parts and lengths: one from each of ``count`` equal stretches of their order by both."""
    rng = random.Random(seed)
    ordered = sorted(samples, key=lambda one: (one.stratum, one.length or len(one.prompt), one.index))
    # whole stretches, of which no two share a sample
    ends = [at * len(ordered) // count for at in range(count + 1)]
    places = [start + int(rng.random() * (end - start)) for start, end in itertools.pairwise(ends)]
    return sorted((ordered[place] for place in places), key=lambda one: one.index)


def _planned(task: Task, sample: Sample, suite: Suite, model: Model) -> Planned:
    prompt = build_prompt(task, sample, model.tokenizer, suite.prompt, max_target=suite.asking.max_target_tokens)
    new = min(task.max_new_tokens, suite.asking.max_new_tokens or task.max_new_tokens)
    item = Item(
        task=task.name,
        id=sample.id,
        index=sample.index,
        answers=sample.answers,
        classes=sample.classes,
        cluster=sample.cluster,
        length=sample.length,
        stratum=sample.stratum,
        prompt_sha256=text_digest(prompt.text),
        gold_sha256=fingerprint([sample.answers, sample.classes]),
        prompt_tokens=len(prompt.ids),
        tokens_before=prompt.tokens_before,
        truncated=prompt.truncated,
    )
    behind = max(new if suite.asking.generate else 0, len(prompt.target_ids) if suite.asking.score else 0)
    tokens = len(prompt.ids) + behind
    if tokens > model.context_length:
        sizes = f"{len(prompt.ids)} tokens and {behind} behind them"
        item = replace(item, broken=f"the prompt must fit the model's {model.context_length} tokens, got {sizes}")
    return Planned(task=task, sample=sample, item=item, prompt=prompt, max_new_tokens=new, tokens=tokens)


def make_batches(planned: Sequence[Planned], size: int, *, seed: int, most_tokens: float = math.inf) -> list[Batch]:
    """Batches of one task each, of like lengths; the longest come first, so that what does not fit shows at once.

    Args:
        planned: What is to be asked.
        size: Samples of a batch at most.
        seed: Of the order among samples of one length.
        most_tokens: As in ``cut``.
    """
    rng = random.Random(seed)
    # drawn for all samples in the order of the suite, so that the order of equals is that of the seed alone
    ties = {(one.item.task, one.item.id): rng.random() for one in planned}
    groups: list[list[Planned]] = []
    for task in dict.fromkeys(one.item.task for one in planned):
        mine = sorted(
            (one for one in planned if one.item.task == task),
            key=lambda one: (-len(one.prompt.ids), ties[one.item.task, one.item.id]),
        )
        groups += cut(mine, size, most_tokens)
    groups.sort(key=lambda group: -len(group[0].prompt.ids))
    return [Batch(number=number, members=tuple(group)) for number, group in enumerate(groups)]


def cut(members: Sequence[Planned], size: int, most_tokens: float) -> list[list[Planned]]:
    """Groups of neighbours: ``size`` of them at most, of ``most_tokens`` at most once all are as long as the longest.

    A sample that is longer than that stands alone.
    """
    groups: list[list[Planned]] = []
    longest = 0
    for one in members:
        longest = max(longest, one.tokens)
        if groups and len(groups[-1]) < size and (len(groups[-1]) + 1) * longest <= most_tokens:
            groups[-1].append(one)
        else:
            groups.append([one])
            longest = one.tokens
    return groups
