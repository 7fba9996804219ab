"""What a comparison found, as plain values for every report."""

from dataclasses import dataclass, field
from typing import Any

from .divergence import Divergence, ProbeDifference
from .exit_code import ExitCode
from .statistics import Estimate, Verdict
from .suite import Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """A gate on one pair of runs.

    Attributes:
        gate: The question.
        tasks: Whose mean of means is judged.
        estimate: The answer; None where it was not measured.
        verdict: What it allows to say.
        p_adjusted: After Holm over all pairs; equal to the estimate's with a single pair.
        first: Mean of the first run, in the unit of the gate.
        second: Mean of the second run.
        note: What a reader must know, such as why nothing was measured.
    """

    gate: Gate
    tasks: tuple[str, ...]
    estimate: Estimate | None
    verdict: Verdict
    p_adjusted: float = 1.0
    first: float | None = None
    second: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """The scores of one task, which inform and do not decide.

    Attributes:
        task: Name.
        category: Of the macro average.
        language: Of the task.
        synthetic: Whether its contents are made up.
        scorer: Whose scores these are.
        n: Pairs.
        first: Score of the first run, of 100.
        second: Score of the second run.
        estimate: Of the difference, in scores between 0 and 1.
        p_holm: After Holm over the tasks.
        p_fdr: After Benjamini and Hochberg over the tasks.
        strata: Parts of the task: pairs and both scores by their label.
        worst: The samples that lost most: id and both scores.
    """

    task: str
    category: str
    language: str
    synthetic: bool
    scorer: str
    n: int
    first: float
    second: float
    estimate: Estimate
    p_holm: float = 1.0
    p_fdr: float = 1.0
    strata: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    worst: list[tuple[str, float, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Samples that were not answered by both runs.

    Attributes:
        table: Count by task, status of the first run and status of the second.
        one_sided: Samples that one run answered and the other did not.
        sensitivity: By gate, the difference of scores if every failure counted as wrong, with its interval.
    """

    table: dict[tuple[str, str, str], int] = field(default_factory=dict)
    one_sided: int = 0
    sensitivity: dict[str, tuple[float, float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Latencies over the same prompts; ``tokens_differ`` counts prompts whose answers are not of one length."""

    n: int
    first_latency: float
    second_latency: float
    first_ttft: float | None
    second_ttft: float | None
    first_rate: float
    second_rate: float
    tokens_differ: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """A sample whose score changed, with both answers."""

    task: str
    id: str
    first: float
    second: float
    first_text: str
    second_text: str
    differs_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What repeating the first run changed, beside what the second run changed.

    Attributes:
        label: The repeated run.
        n: Samples that both runs and the repetition answered, on which all is measured.
        changed: Share of samples whose score changed, A/A and A/B.
        identical: Share of samples with identical tokens, A/A and A/B.
        nll: Mean absolute difference of gold log-probabilities, nats per token, A/A and A/B; None if not measured.
        probes: Of prompt tokens by context length, A/A.
    """

    label: str
    n: int
    changed: tuple[float, float] | None
    identical: tuple[float, float] | None
    nll: tuple[float, float] | None
    probes: list[ProbeDifference]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two runs.

    Attributes:
        first: Label of the run that is the measure.
        second: Label of the run that is judged.
        differs_in: Named factors in which they differ, with both levels.
        gates: Answers to the suite's questions.
        tasks: Scores by task.
        failures: What was not answered.
        divergence: Of the tokens.
        probes: Of the log-probabilities of prompt tokens.
        flips: Samples whose score changed, the largest losses first.
        speed: None where no latencies were measured.
        kernels: Kernel calls of both runs by name.
        noise: Against a repetition of the first run; None if none was given.
    """

    first: str
    second: str
    differs_in: dict[str, tuple[str, str]]
    gates: list[GateResult]
    tasks: list[TaskResult]
    failures: Failures
    divergence: Divergence
    probes: list[ProbeDifference]
    flips: list[Flip]
    speed: Speed | None
    kernels: dict[str, tuple[int, int]]
    noise: Noise | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FactorEffect:
    """A named factor over a full design: the mean over all levels of the others, second level minus first."""

    factor: str
    levels: tuple[str, str]
    gates: list[GateResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs against each other.

    Attributes:
        suite: Name of the suite.
        arms: By label: folder, model, counts by status.
        pairs: Every pair, in the order of the command line.
        effects: Of named factors.
        notes: What a reader must know about the data.
    """

    suite: str
    arms: dict[str, dict[str, Any]]
    pairs: list[Pair]
    effects: list[FactorEffect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The gravest finding over all pairs and gates."""
        verdicts = {result.verdict for pair in self.pairs for result in pair.gates}
        if Verdict.REGRESSED in verdicts:
            return ExitCode.REGRESSED
        if any(pair.failures.one_sided for pair in self.pairs):
            return ExitCode.FAILURES
        return ExitCode.INCONCLUSIVE if Verdict.INCONCLUSIVE in verdicts else ExitCode.PASSED

    @property
    def headline(self) -> str:
        """The verdict in a line."""
        code = self.exit_code
        if code == ExitCode.REGRESSED:
            return "REGRESSED"
        if code == ExitCode.FAILURES:
            return "FAILED: one run failed where the other answered"
        if code == ExitCode.INCONCLUSIVE:
            return "INCONCLUSIVE: not enough to say either"
        verdicts = [result.verdict for pair in self.pairs for result in pair.gates]
        return (
            "EQUIVALENT" if all(one is Verdict.EQUIVALENT for one in verdicts) else "NOT WORSE than the margins accept"
        )
