"""pytest plugin: judge kernels from tests, replay one case, and never call green what was not judged.

It is loaded in every pytest run of an environment that has assay installed, so it imports nothing heavy until a test
asks for a judgement, and says nothing where none does. It asserts nothing, hence PYTEST_DONT_REWRITE.
"""

import functools
import inspect
import json
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .outcome import Summary

MARKER = "assay"
MARKER_ARGUMENTS = ("op", "tier", "device", "dtypes", "seed", "families", "max_seconds", "waivers")
# names of the properties that reach the terminal, also from the workers of pytest-xdist
JUDGED, MARKED = "assay", "assay-op"
JUDGEMENTS = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options ``--assay-*``."""
    group = parser.getgroup("assay", "judging attention kernels")
    group.addoption("--assay-seed", type=int, metavar="N", help="seed of the cases, instead of the tests' own")
    group.addoption("--assay-replay", metavar="ID", help="judge only the case whose id ends with ID")
    group.addoption("--assay-kernels", metavar="GLOB", help="judge only kernels whose name fits the pattern")
    group.addoption("--assay-waivers", metavar="FILE", help="TOML file of known faults")
    group.addoption("--assay-strict-skips", action="store_true", help="fail where a kernel does not serve a case")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker and the report."""
    text = f"{MARKER}(op, tier='smoke', ...): judge the kernel that the test returns, or gives to assay_check"
    config.addinivalue_line("markers", text)
    config.pluginmanager.register(_Report(config), "assay-report")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse markers that could not be served, before anything runs."""
    for item in items:
        marker = item.get_closest_marker(MARKER)
        if marker is None:
            continue
        unknown = [name for name in marker.kwargs if name not in MARKER_ARGUMENTS]
        if marker.args or unknown:
            got = ", ".join([*map(repr, marker.args), *unknown])
            known = ", ".join(MARKER_ARGUMENTS)
            raise pytest.UsageError(f"{item.nodeid}: the marker assay must have keywords among {known}, got {got}")
        item.user_properties.append((MARKED, str(marker.kwargs.get("op", "as declared"))))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Judge what a marked test returns; fail one that neither returned nor judged a kernel."""
    if item.get_closest_marker(MARKER) is not None and isinstance(item, pytest.Function):
        item.obj = _judging(item, item.obj)


@pytest.fixture
def assay_check(request: pytest.FixtureRequest) -> "Callable[..., Summary]":
    """A function that judges a kernel as the test's ``assay`` marker and the command line say.

    It takes a function, or a name as ``assay check --kernel`` does, and the keywords of ``assay.harness.check``, which
    win over the marker's. It returns the summary, or raises with the report.
    """
    return functools.partial(_judge, request.node)


def _judging(item: pytest.Function, test: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(test):
        return test

    @functools.wraps(test)
    def judged(*args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        kernel = test(*args, **kwargs)
        if kernel is not None:
            _judge(item, kernel)
        elif not item.stash.get(JUDGEMENTS, 0):
            pytest.fail("a test marked assay must return a kernel or call assay_check, it did neither", pytrace=False)

    return judged


def _judge(item: pytest.Item, kernel: "Callable[..., Any] | str", **options: Any) -> "Summary":
    __tracebackhide__ = True
    from .checking import check
    from .outcome import CaseNotInPlanError, KernelRejected, NothingJudged

    config, marker = item.config, item.get_closest_marker(MARKER)
    _skip_unwanted(config, kernel)
    chosen: dict[str, Any] = {**(marker.kwargs if marker else {}), **options}
    replay = config.getoption("--assay-replay")
    for name, value in (
        ("seed", config.getoption("--assay-seed")),
        ("case", replay),
        ("waivers", config.getoption("--assay-waivers")),
        ("strict_skips", config.getoption("--assay-strict-skips") or None),
    ):
        if value is not None:
            chosen[name] = value
    item.stash[JUDGEMENTS] = item.stash.get(JUDGEMENTS, 0) + 1
    try:
        summary = check(kernel, **chosen)
    except CaseNotInPlanError as error:
        if replay is None:
            raise
        pytest.skip(f"--assay-replay: {error}")
    except (KernelRejected, NothingJudged) as error:
        _note(item, error.summary)
        raise
    _note(item, summary)
    return summary


def _skip_unwanted(config: pytest.Config, kernel: "Callable[..., Any] | str") -> None:
    from .discovery import name_matches
    from .plugin import declaration_of

    pattern = config.getoption("--assay-kernels")
    name = kernel if isinstance(kernel, str) else declaration_of(kernel).name
    if pattern is not None and not name_matches(name, pattern):
        pytest.skip(f"--assay-kernels {pattern} leaves out {name}")


def _note(item: pytest.Item, summary: "Summary") -> None:
    """Leave the counts where the report of the test carries them to the terminal."""
    content = {
        "line": str(summary),
        "verdicts": summary.verdicts,
        "not_judged": [
            f"{summary.kernel}: {_times(count, 'case')}: {text}" for text, count in summary.not_judged.items()
        ],
    }
    item.user_properties.append((JUDGED, json.dumps(content)))


def _times(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Report:
    """Collects the judgements of a session, prints them, and turns one red that was to judge something and did not."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._judged: list[dict[str, Any]] = []
        self._idle: Counter[str] = Counter()

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the counts off the report of a test's call, or the reason why a marked test had none."""
        judged = [json.loads(str(text)) for name, text in report.user_properties if name == JUDGED]
        if report.when == "call":
            self._judged += judged
        if report.skipped and not judged and any(name == MARKED for name, _ in report.user_properties):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self._idle[reason.removeprefix("Skipped: ")] += 1

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a session that was asked for one case or some kernels and judged nothing."""
        is_worker = hasattr(session.config, "workerinput")
        if self._missed() and session.exitstatus == pytest.ExitCode.OK and not is_worker:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Verdicts of each judgement, their sum, and what was not judged."""
        missed = self._missed()
        if not (self._judged or self._idle or missed):
            return
        terminalreporter.section("assay")
        for judged in self._judged:
            terminalreporter.write_line(judged["line"])
        total = sum((Counter(judged["verdicts"]) for judged in self._judged), Counter[str]())
        if len(self._judged) > 1:
            terminalreporter.write_line("all: " + ", ".join(f"{total[name]} {name}" for name in sorted(total)))
        reasons = [line for judged in self._judged for line in judged["not_judged"]]
        reasons += [f"{_times(count, 'test')}: {reason}" for reason, count in self._idle.items()]
        if reasons:
            terminalreporter.write_line("not judged:")
        for reason in reasons:
            terminalreporter.write_line(f"  {reason}")
        if missed:
            terminalreporter.write_line(f"{missed}, so the run fails", red=True)

    def _missed(self) -> str | None:
        """What was asked for on the command line and led to no judgement."""
        if self._judged or self._config.option.collectonly:
            return None
        for option in ("--assay-replay", "--assay-kernels"):
            value = self._config.getoption(option)
            if value is not None:
                return f"{option} {value}: nothing was judged"
        return None
