"""Who takes part: kernels of ours, and those of the peers that are here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..kernels import find_kernels
from ..operation import Kernel, Operation
from ..operations import NAMES
from ..peers import Peer, for_operation

Role = Literal["ours", "peer"]

# twins that are there to be read: clean torch is never timed against anything
CLEAN = ("torch",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Participant:
    """A kernel and the side that it runs for."""

    kernel: Kernel
    role: Role


def line_up(operation: Operation, *, named: Sequence[str] = (), peers: bool = False) -> list[Participant]:
    """The kernels to be timed, those named on the command line first; no name twice.

    Args:
        operation: Whose kernels.
        named: As ``assay check --kernel`` takes them; they are ours, whoever wrote them.
        peers: Whether the peers run as well, also those that are judged only by name.

    Raises:
        UsageError: If a name leads to no kernel.
        TypeError: If a function cannot be called with the operation's arguments.
    """
    found = [Participant(kernel=kernel, role="ours") for name in named for kernel in find_kernels(operation, name)]
    theirs = {peer.kernel for peer in peers_of([operation.name]).get(operation.name, ())}
    for kernel in operation.kernels():
        if kernel.name in theirs:
            found += [Participant(kernel=kernel, role="peer")] if peers else []
        elif kernel.name.partition("[")[2].rstrip("]") not in CLEAN and not kernel.by_name:
            found.append(Participant(kernel=kernel, role="ours"))
    unique: dict[str, Participant] = {}
    for one in found:
        unique.setdefault(one.kernel.name, one)
    return list(unique.values())


def peers_of(ops: Iterable[str]) -> dict[str, list[Peer]]:
    """Every library as each operation of the house meets it, the absent ones included."""
    return {op: for_operation(op) for op in dict.fromkeys(ops) if op in NAMES}
