"""Suites: which tasks are asked, how, and what loss is accepted; in TOML, so that margins are declared before a run."""

import dataclasses
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from .prompts import PromptPolicy
from .tasks import REAL, DataSource, Generation, Grid, Loading, find_task

SCORE, NLL, AGREEMENT = "score", "nll", "agreement"
METRICS = (SCORE, NLL, AGREEMENT)
Kind = TypeVar("Kind")


class SuiteError(ValueError):
    """A suite that is not understood; the text names the file and the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One question that a comparison must answer.

    Attributes:
        name: As reports call it.
        metric: ``score`` (the tasks' own), ``nll`` (of the gold answers, nats per token) or ``agreement`` (share of the
            generated tokens before the first that differs).
        margin: The loss that is accepted: points of 100 for ``score`` and ``agreement``, nats for ``nll``.
        tasks: Whose mean of means is judged; empty for all tasks of the suite.
        scale: The most that ``nll`` of one sample is taken to change by, in nats, where none or few show a change.
        tie: Of ``agreement``: where the likelier of two tokens leads by at most so many nats in both runs, rounding
            chooses between them, and a first difference there costs nothing. 0 excuses none.
    """

    name: str
    metric: str
    margin: float
    tasks: tuple[str, ...] = ()
    scale: float = 1.0
    tie: float = 0.0

    def __post_init__(self) -> None:
        """Refuse unknown metrics, and margins that accept nothing."""
        if self.metric not in METRICS:
            raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {self.metric!r}")
        if not self.margin > 0 or not self.scale > 0:
            raise ValueError(f"margin and scale must be positive, got {self.margin} and {self.scale}")
        if self.tie and (self.metric != AGREEMENT or not self.tie > 0):
            raise ValueError(f"tie must be positive, and of {AGREEMENT}, got {self.tie} of {self.metric}")

    @property
    def loss(self) -> float:
        """The margin in the unit of the values: scores and agreement lie between 0 and 1."""
        return self.margin if self.metric == NLL else self.margin / 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """How a model is asked.

    Attributes:
        batch_size: Samples asked at once.
        batch_tokens: Tokens asked at once, prompts and what may follow, each sample counted as long as the longest of
            its batch; a longer sample is asked alone. None for no limit.
        limit: Samples of each task, drawn over its lengths and parts; None for all.
        seed: Of that draw, and of the order among samples of one length.
        generate: Whether answers are generated and scored.
        score: Whether the log-probabilities of gold answers are measured.
        max_target_tokens: Tokens of a gold answer that are measured.
        probes: Positions of a prompt whose log-probabilities are kept, evenly spread.
        max_new_tokens: Shorter answers than the tasks' own; None for theirs. Scores are not the published ones then.
        most_failures: Failed samples in a row after which a run gives up, since nothing seems to answer.
    """

    batch_size: int = 8
    batch_tokens: int | None = None
    limit: int | None = None
    seed: int = 0
    generate: bool = True
    score: bool = True
    max_target_tokens: int = 256
    probes: int = 64
    max_new_tokens: int | None = None
    most_failures: int = 25

    def __post_init__(self) -> None:
        """Refuse what asks nothing."""
        counts = {
            name: getattr(self, name)
            for name in ("batch_size", "batch_tokens", "limit", "max_target_tokens", "max_new_tokens", "most_failures")
            if getattr(self, name) is not None
        }
        small = [f"{name} = {count}" for name, count in counts.items() if count < 1]
        if small or self.probes < 0:
            raise ValueError(
                f"sizes, limits and lengths must be at least 1, got {', '.join(small) or 'probes below 0'}"
            )
        if not (self.generate or self.score):
            raise ValueError("generate or score must be true, got neither")


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite.

    Attributes:
        name: Name.
        description: What it is for.
        tasks: Names of tasks, in the order of reports.
        gates: What a comparison of two runs is judged by.
        loading: Where samples come from.
        prompt: How prompts are cut and wrapped.
        asking: How the model is asked.
    """

    name: str
    description: str
    tasks: tuple[str, ...]
    gates: tuple[Gate, ...]
    loading: Loading = field(default_factory=Loading)
    prompt: PromptPolicy = field(default_factory=PromptPolicy)
    asking: Asking = field(default_factory=Asking)

    def __post_init__(self) -> None:
        """Refuse unknown tasks and gates, and means over real and synthetic tasks together."""
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks must be one or more, each once, got {list(self.tasks)}")
        for name in self.tasks:
            find_task(name)
        names = [gate.name for gate in self.gates]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"gates must be one or more, each name once, got {names}")
        for gate in self.gates:
            self._check(gate)

    def tasks_of(self, gate: Gate) -> tuple[str, ...]:
        """The tasks whose mean a gate judges."""
        return gate.tasks or self.tasks

    def _check(self, gate: Gate) -> None:
        outside = [name for name in gate.tasks if name not in self.tasks]
        if outside:
            raise ValueError(f"gate {gate.name}: tasks must be of the suite, got {', '.join(outside)}")
        origins = {find_task(name).origin for name in self.tasks_of(gate)}
        if len(origins) > 1:
            raise ValueError(f"gate {gate.name} must average real tasks or synthetic ones, got both")
        if gate.metric == NLL and not self.asking.score:
            raise ValueError(f"gate {gate.name} needs asking.score = true, got false")
        if gate.metric != NLL and not self.asking.generate:
            raise ValueError(f"gate {gate.name} needs asking.generate = true, got false")

    @property
    def needs_data(self) -> bool:
        """Whether any task reads published data."""
        return any(find_task(name).origin == REAL for name in self.tasks)


def suite_content(suite: Suite) -> dict[str, Any]:
    """The tables of a suite's file: ``parse_suite`` makes the same suite of them."""
    loading = suite.loading
    tables = {
        "data": _content(loading.source, leave_out=("place", "offline")),
        "generated": _content(loading.generation),
        "needle": _content(loading.grid),
        "prompt": _content(suite.prompt),
        "asking": _content(suite.asking),
    }
    head = {"name": suite.name, "description": suite.description, "tasks": list(suite.tasks)}
    return {**head, **tables, "gates": [_content(gate) for gate in suite.gates]}


def _content(value: Any, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.name not in leave_out}
    # a file of TOML has no word for nothing
    return {name: list(one) if isinstance(one, tuple) else one for name, one in fields.items() if one is not None}


def suite_names() -> list[str]:
    """The suites that come with the project."""
    folder = files(__package__).joinpath("suites")
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_suite(name: str) -> Suite:
    """A suite of the project by name, or one of yours by the path of its file.

    Raises:
        SuiteError: If there is none, or it is not understood.
    """
    if name in suite_names():
        text, place = files(__package__).joinpath("suites", f"{name}.toml").read_text(encoding="utf-8"), name
    elif Path(name).suffix == ".toml" and Path(name).is_file():
        text, place = Path(name).read_text(encoding="utf-8"), name
    else:
        raise SuiteError(f"a suite must be one of {', '.join(suite_names())}, or a TOML file, got {name!r}")
    try:
        return parse_suite(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValueError) as error:
        raise SuiteError(f"suite {place}: {error}") from error


def parse_suite(content: dict[str, Any]) -> Suite:
    """A suite from the tables of its file.

    Raises:
        ValueError: If a key is unknown or a value is not what it must be.
    """
    known = {"name", "description", "tasks", "data", "generated", "needle", "prompt", "asking", "gates"}
    if set(content) - known:
        raise ValueError(
            f"keys must be among {', '.join(sorted(known))}, got {', '.join(sorted(set(content) - known))}"
        )
    gates = content.get("gates", [])
    if not isinstance(gates, list):
        raise ValueError("gates must be tables [[gates]]")
    return Suite(
        name=_text(content, "name"),
        description=_text(content, "description"),
        tasks=_texts(content.get("tasks"), "tasks"),
        gates=tuple(_table(Gate, gate, "gates") for gate in gates),
        loading=Loading(
            source=_table(DataSource, content.get("data", {}), "data", leave_out=("place", "offline")),
            generation=_table(Generation, content.get("generated", {}), "generated"),
            grid=_table(Grid, content.get("needle", {}), "needle"),
        ),
        prompt=_table(PromptPolicy, content.get("prompt", {}), "prompt"),
        asking=_table(Asking, content.get("asking", {}), "asking"),
    )


def _text(content: dict[str, Any], key: str) -> str:
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key} must be a text, got {value!r}")
    return value


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{key} must be a list of texts, got {value!r}")
    return tuple(value)


def _table(kind: type[Kind], content: Any, name: str, leave_out: tuple[str, ...] = ()) -> Kind:
    """A dataclass from a table: known keys alone, values of the field's type."""
    if not isinstance(content, dict):
        raise ValueError(f"{name} must be a table, got {content!r}")
    # every field of these has a plain type
    types = {one.name: str(one.type) for one in dataclasses.fields(kind) if one.name not in leave_out}  # type: ignore[arg-type]
    unknown = sorted(set(content) - set(types))
    if unknown:
        raise ValueError(f"{name}: keys must be among {', '.join(types)}, got {', '.join(unknown)}")
    values = {key: _value(value, types[key], f"{name}.{key}") for key, value in content.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def _value(value: Any, kind: str, key: str) -> Any:
    if "tuple[str" in kind:
        return _texts(value, key)
    if "tuple[int" in kind:
        if not isinstance(value, list) or not all(type(one) is int for one in value):
            raise ValueError(f"{key} must be a list of whole numbers, got {value!r}")
        return tuple(value)
    wanted = next(one for one in (bool, int, float, str) if one.__name__ in kind)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise ValueError(f"{key} must be a {wanted.__name__}, got {value!r}")
    return value
