"""Instructions are counted where valgrind is installed, those of the cheapest call, and repeat."""

import pytest

from assay.harness.counts._callgrind import environment, instructions_of, why_not
from assay.harness.counts.host_cost import INSTRUCTION_GROWTH


def test_a_machine_without_valgrind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert why_not() == "valgrind is not installed"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/valgrind")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert why_not() == "the request to callgrind is written for x86_64, got aarch64"


COUNTING = """
import itertools
from assay.harness.counts._callgrind import count_instructions
calls = itertools.count()
uneven = lambda: sum(range(1000, 4000 if next(calls) % 3 else 2000))
count_instructions({"short": lambda: sum(range(1000, 2000)), "long": lambda: sum(range(1000, 4000)), "uneven": uneven})
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_callgrind_counts_what_lies_between_start_and_end() -> None:
    counts = instructions_of(["-c", COUNTING])
    assert set(counts) == {"short", "long", "uneven"}
    # a hundred or so instructions a number, and no more than a few thousand around them
    assert 2.7 < counts["long"] / counts["short"] < 3.1
    # a call that costs more now and then, as when a table grows, counts as it does the other times
    assert counts["uneven"] < 1.1 * counts["short"]
    again = instructions_of(["-c", COUNTING])
    assert again["long"] == pytest.approx(counts["long"], rel=INSTRUCTION_GROWTH)
    assert "valgrind-" in environment()
    with pytest.raises(RuntimeError, match="callgrind must count something, got exit 3"):
        instructions_of(["-c", "raise SystemExit(3)"])
