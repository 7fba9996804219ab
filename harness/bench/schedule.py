"""In which order things are timed, on which buffers with which contents, and which answers are looked at."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

# contents that each set of buffers holds in turn, so that an address alone never tells the answer
VERSIONS = 2
ROUNDS = 20
# runs of each kernel whose answers are looked at, as many with either contents
CHECKED = 6
# of the cache: whatever a kernel left there of a set of buffers is gone when the ring comes round
CACHES_BETWEEN = 3

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Which set of buffers of the ring, and which of its contents."""

    entry: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A round times everything twice, forwards and then backwards (A B B A), so that a drift hits all alike.

    The next round begins with the next one, so that each in turn runs after each other and after the anchor.

    Attributes:
        rounds: Of two runs each.
        ring: Sets of buffers.
        seed: Of the draw of the runs whose answers are looked at.
        checked: Those runs, out of ``2 * rounds``.
    """

    rounds: int
    ring: int
    seed: int
    checked: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        """Draw what is looked at; refuse a ring that would not come round with all its contents."""
        if self.rounds < 2 or self.ring < 1:
            raise ValueError(f"rounds must be at least 2 and the ring at least 1, got {self.rounds} and {self.ring}")
        if self.iterations < VERSIONS * self.ring:
            raise ValueError(
                f"a kernel must run at least {VERSIONS} times on each of {self.ring} sets of buffers, "
                f"got {self.iterations} runs"
            )
        draw, picked = random.Random(self.seed), set[int]()
        for version in range(VERSIONS):
            runs = [at for at in range(self.iterations) if self.content(at).version == version]
            picked |= set(draw.sample(runs, min(len(runs), CHECKED // VERSIONS)))
        object.__setattr__(self, "checked", frozenset(picked))

    @property
    def iterations(self) -> int:
        """Timed runs of each kernel."""
        return 2 * self.rounds

    def content(self, iteration: int) -> Content:
        """The buffers of an iteration, and their contents: others whenever the ring has come round."""
        return Content(entry=iteration % self.ring, version=iteration // self.ring % VERSIONS)

    @property
    def checked_contents(self) -> list[Content]:
        """What must have been judged before."""
        return sorted({self.content(at) for at in self.checked}, key=lambda one: (one.entry, one.version))

    def order(self, things: Sequence[T], iteration: int) -> list[T]:
        """Forwards in the first half of a round, backwards in the second; each round begins with another one."""
        first = iteration // 2 % max(1, len(things))
        turned = [*things[first:], *things[:first]]
        return turned if iteration % 2 == 0 else turned[::-1]


def ring_size(entry_bytes: int, cache_bytes: int) -> int:
    """Sets of buffers that together are ``CACHES_BETWEEN`` times the cache, two at least.

    Args:
        entry_bytes: What a call touches.
        cache_bytes: Of the last-level cache.
    """
    return max(2, math.ceil(CACHES_BETWEEN * cache_bytes / max(1, entry_bytes)))


def schedule_for(entry_bytes: int, cache_bytes: int, *, seed: int, rounds: int = ROUNDS) -> Schedule:
    """A schedule of at least ``rounds`` rounds in which the whole ring is used with all its contents."""
    ring = ring_size(entry_bytes, cache_bytes)
    return Schedule(rounds=max(rounds, math.ceil(VERSIONS * ring / 2)), ring=ring, seed=seed)
