"""Shared fixtures, GPU tests that are counted, and imports for a bare checkout where nothing is installed."""

import atexit
import importlib.util
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

# before numpy and torch: the interpreter makes many small products, and threads only get in each other's way
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

import torch  # noqa: E402  # the lines above come first for a reason

# before triton, which decides when it is imported
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def _import_from_checkout() -> None:
    """Give the checkout its import name, here and, through ``PYTHONPATH``, in every process that a test starts."""
    folder = tempfile.mkdtemp(prefix="assay-checkout-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (Path(folder) / "assay").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


if importlib.util.find_spec("assay") is None:
    _import_from_checkout()

if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    # the same examples in every run; a compiling kernel may be slow the first time
    hypothesis.settings.register_profile("assay", derandomize=True, deadline=None, database=None)
    hypothesis.settings.load_profile("assay")


def why_no_gpu() -> str | None:
    """Why tests marked ``gpu`` cannot run in this process; None if they can."""
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} finds none"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 keeps the kernels off the GPU"
    return None


class GpuTests:
    """Skips the tests marked ``gpu`` where they cannot run, and counts them, so that none running is seen."""

    def __init__(self, *, required: bool, obstacle: str | None) -> None:
        self.required = required
        self.obstacle = obstacle
        self.ran = 0
        self.skipped = 0

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        """Refuse a session that was asked for a GPU and has none."""
        if self.required and self.obstacle is not None:
            raise pytest.UsageError(f"--require-gpu: {self.obstacle}")

    @pytest.hookimpl
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Skip what cannot run, with the reason."""
        if self.obstacle is None:
            return
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason=self.obstacle))

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each GPU test once: when it was skipped, or when its call ended."""
        if "gpu" not in report.keywords:
            return
        self.skipped += report.skipped
        self.ran += report.when == "call" and not report.skipped

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn a session that was asked for a GPU and used none red."""
        is_worker = hasattr(session.config, "workerinput")
        if self.required and self.ran == 0 and session.exitstatus == pytest.ExitCode.OK and not is_worker:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the count, also when it is zero."""
        reason = f" ({self.obstacle})" if self.obstacle else ""
        terminalreporter.write_line(f"GPU tests: {self.ran} ran, {self.skipped} skipped{reason}")
        if self.required and self.ran == 0:
            terminalreporter.write_line("--require-gpu: no GPU test ran, so the run fails", red=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--require-gpu``."""
    text = "fail at once without a CUDA device, and at the end if no test marked gpu ran"
    parser.addoption("--require-gpu", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the GPU rules."""
    required = bool(config.getoption("--require-gpu"))
    config.pluginmanager.register(GpuTests(required=required, obstacle=why_no_gpu()), "assay-gpu-tests")


@pytest.fixture(autouse=True)
def _same_seed_for_every_test() -> None:
    """Make a test that forgets a seed repeatable, and independent of the tests before it."""
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture
def generator() -> torch.Generator:
    """A CPU generator with seed 0, the same in every test."""
    return torch.Generator().manual_seed(0)
