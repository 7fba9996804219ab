"""Who takes part: kernels of ours, and the peers that are installed, with the versions of all that could be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..kernels import find_kernels
from ..operation import Kernel, Operation
from .machine import installed

Role = Literal["ours", "peer"]

# twins that are there to be read: clean torch is never timed against anything
CLEAN = ("torch",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library of other authors: what its provider's kernels are, and the distributions that may hold it."""

    what: str
    distributions: tuple[str, ...]


# by provider, the word in the brackets of a kernel's name
PEERS: dict[str, Peer] = {
    "sdpa": Peer(what="torch SDPA, cuDNN", distributions=("torch",)),
    "flash": Peer(what="torch SDPA, flash (FlashAttention 2)", distributions=("torch",)),
    "flex": Peer(what="torch FlexAttention", distributions=("torch",)),
    "fa3": Peer(what="FlashAttention 3", distributions=("flash-attn-3", "flashattn-hopper", "vllm")),
    "fa4": Peer(what="FlashAttention 4", distributions=("flash-attn-4",)),
    "flashinfer": Peer(what="FlashInfer", distributions=("flashinfer-python",)),
    "flash_mla": Peer(what="FlashMLA", distributions=("tokenspeed-flashmla", "flash-mla")),
    "flash_kda": Peer(what="FlashKDA", distributions=("tokenspeed-flashkda", "flash-kda")),
    "fla": Peer(what="flash-linear-attention", distributions=("fla-core", "flash-linear-attention")),
    "cudnn": Peer(what="cuDNN frontend", distributions=("nvidia-cudnn-frontend",)),
}


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
    for kernel in operation.kernels():
        provider = provider_of(kernel)
        if provider in PEERS:
            found += [Participant(kernel=kernel, role="peer")] if peers else []
        elif provider not in CLEAN and not kernel.by_name:
            found.append(Participant(kernel=kernel, role="ours"))
    unique: dict[str, Participant] = {}
    for one in found:
        unique.setdefault(one.kernel.name, one)
    return list(unique.values())


def provider_of(kernel: Kernel) -> str:
    """The word in the brackets of a kernel's name; empty if it has none."""
    return kernel.name.partition("[")[2].rstrip("]")


def peer_versions() -> dict[str, str | None]:
    """Version of every peer by provider; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name, peer in PEERS.items():
        versions = (installed(distribution) for distribution in peer.distributions)
        found[name] = next((version for version in versions if version is not None), None)
    return found
