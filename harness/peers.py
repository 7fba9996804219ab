"""The libraries of other authors that this project measures itself against: which are here, and what each serves.

A peer is timed through the kernel that is judged; there is no other way to call it. Nothing is imported here: what is
installed is read off the files and the metadata of packages.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """One library of other authors.

    Attributes:
        name: Under which its authors publish it.
        homes: The modules that hold it, any of which will do, and the distributions that each may come from.
        serves: Operations, by name; some do not exist yet.
        provider: The word for it in the brackets of a kernel's name; None while no operation that it serves exists.
        needs_naming: Whether its kernels are judged only when they are named: such a library comes with torch, so that
            every default run would be longer by it.
    """

    name: str
    homes: dict[str, tuple[str, ...]]
    serves: tuple[str, ...]
    provider: str | None = None
    needs_naming: bool = False

    def home(self) -> str | None:
        """The first of its modules that an import would find; None if there is none."""
        return next((module for module in self.homes if is_importable(module)), None)


_DENSE = ("attention", "mla_prefill")
LIBRARIES = (
    Library(name="torch SDPA (cuDNN)", homes={"torch": ("torch",)}, serves=_DENSE, provider="sdpa"),
    Library(
        name="torch varlen (FlashAttention 2)",
        homes={"torch": ("torch",)},
        serves=_DENSE,
        provider="flash",
        needs_naming=True,
    ),
    Library(
        name="torch FlexAttention",
        homes={"torch.nn.attention.flex_attention": ("torch",)},
        serves=_DENSE,
        provider="flex",
        needs_naming=True,
    ),
    Library(
        name="FlashAttention 3",
        homes={
            "flash_attn_interface": ("flash-attn-3", "flash_attn_3", "flashattn-hopper"),
            # FlashAttention 2 and 3 as vLLM bundles them
            "vllm.vllm_flash_attn": ("vllm",),
        },
        serves=_DENSE,
        provider="fa3",
    ),
    Library(name="FlashAttention 4", homes={"flash_attn.cute": ("flash-attn-4",)}, serves=_DENSE, provider="fa4"),
    Library(name="FlashInfer", homes={"flashinfer": ("flashinfer-python",)}, serves=_DENSE, provider="flashinfer"),
    Library(
        name="FlashMLA",
        homes={"flash_mla": ("tokenspeed-flashmla", "flash-mla")},
        serves=("sparse_mla",),
        provider="flashmla",
    ),
    Library(name="FlashKDA", homes={"flash_kda": ("tokenspeed-flashkda", "flash-kda")}, serves=("kda",)),
    Library(
        name="flash-linear-attention", homes={"fla": ("fla-core", "flash-linear-attention")}, serves=("kda", "kda_step")
    ),
    Library(
        name="cuDNN front end",
        homes={"cudnn": ("nvidia-cudnn-frontend",)},
        serves=(*_DENSE, "kda"),
        provider="cudnn_frontend",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A library as an operation meets it on this machine; of ``kernel`` and ``absent`` exactly one is None.

    Attributes:
        name: Of the library.
        package: The distribution that it came from, or would come from.
        version: Of that distribution; None if it is not installed, ``unknown`` without metadata.
        kernel: Name of the kernel to judge and to time, such as ``attention[flash]``.
        absent: Why there is none.
    """

    name: str
    package: str
    version: str | None
    kernel: str | None
    absent: str | None


def for_operation(name: str) -> list[Peer]:
    """Every library, in the order of the table, as the operation of that name meets it.

    Raises:
        ValueError: If there is no such operation.
    """
    # the operations import torch, and what is installed must be told without it too
    from .operations import NAMES

    if name not in NAMES:
        raise ValueError(f"op must be one of {', '.join(NAMES)}, got {name!r}")
    return [_meet(library, name, existing=NAMES) for library in LIBRARIES]


def _meet(library: Library, operation: str, *, existing: tuple[str, ...]) -> Peer:
    home = library.home()
    # where no module is found, the first home is the one to install
    package, version = distribution(library.homes[home or next(iter(library.homes))])
    absent = None
    if operation not in library.serves:
        later = not set(library.serves) & set(existing)
        absent = f"{'no operation yet' if later else 'serves'}: {', '.join(library.serves)}"
    elif home is None:
        absent = f"not installed: no module {' or '.join(library.homes)}"
    return Peer(
        name=library.name,
        package=package,
        version=None if home is None else version or "unknown",
        kernel=None if absent else f"{operation}[{library.provider}]",
        absent=absent,
    )


def distribution(candidates: tuple[str, ...]) -> tuple[str, str | None]:
    """The first of these distributions that is installed and its version, or the first of all and None."""
    for name in candidates:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return candidates[0], None


def is_importable(name: str) -> bool:
    """Whether ``import name`` would find a module, without importing it or, for ``a.b``, its parent ``a``."""
    top, *parts = name.split(".")
    spec = importlib.util.find_spec(top)
    for part in parts:
        # find_spec("a.b") would import a, which loads compiled extensions
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = importlib.machinery.PathFinder.find_spec(part, list(spec.submodule_search_locations))
    return spec is not None
