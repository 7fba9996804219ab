"""A case: everything that decides the inputs of one judgement, as plain JSON with an id made from its content."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

# raised whenever the same case would give other tensors
GENERATOR_VERSION = 2
# endings of the names of sizes that have one entry per request: counts of tokens, and what else belongs to it
LENGTHS = "_lens"
PER_REQUEST = (LENGTHS, "_starts", "_seeds", "_holes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One judgement to be made.

    Attributes:
        op: Name of the operation.
        family: What the values look like; see ``harness.families``.
        dtype: Of the floating inputs, such as ``bfloat16``.
        seed: Of the tensors.
        sizes: Lengths, heads, dimensions and layout, JSON values only; their names belong to the operation.
        needs_device: True for a case that is too large for the CPU's time budget.
    """

    op: str
    family: str
    dtype: str
    seed: int
    sizes: dict[str, Any] = field(default_factory=dict)
    needs_device: bool = False

    @property
    def id(self) -> str:
        """Readable name with a digest of the content; equal ids mean equal inputs."""
        content = json.dumps([GENERATOR_VERSION, asdict(self)], sort_keys=True)
        return f"{self.op}-{self.family}-{self.dtype}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def to_json(self) -> dict[str, Any]:
        """The case as a JSON object, the id included for readers."""
        return {"id": self.id, "generator_version": GENERATOR_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Case":
        """Read a case back; refuse one of another generator, whose tensors would differ.

        Raises:
            ValueError: If the version or the id does not fit the content.
        """
        version = content.get("generator_version")
        if version != GENERATOR_VERSION:
            raise ValueError(f"generator_version must be {GENERATOR_VERSION}, got {version!r}")
        names = ("op", "family", "dtype", "seed", "sizes", "needs_device")
        case = cls(**{name: content[name] for name in names})
        if content.get("id", case.id) != case.id:
            raise ValueError(f"id must be {case.id}, the digest of the content, got {content['id']}")
        return case


def plan_digest(cases: list[Case]) -> str:
    """Digest of a list of cases, taken before any kernel is imported, so that no kernel can choose its own exam."""
    return hashlib.sha256("\n".join(case.id for case in cases).encode()).hexdigest()[:12]
