"""A part of a plan, for one of several machines: every n-th case, so that each gets its share of every kind."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shard:
    """The ``number``-th of ``count`` parts, counted from 1."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Read ``2/8``.

        Raises:
            ValueError: If it is something else, or there is no such part.
        """
        match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", text, flags=re.ASCII)
        if match is None or int(match[1]) > int(match[2]):
            raise ValueError(f"a shard must be i/n with 1 <= i <= n, such as 2/8, got {text!r}")
        return cls(int(match[1]), int(match[2]))

    def of(self, cases: Sequence[Item]) -> list[Item]:
        """Its part of a list; those of all numbers make the whole, without an overlap."""
        return list(cases[self.number - 1 :: self.count])

    def __str__(self) -> str:
        """As it is read."""
        return f"{self.number}/{self.count}"
