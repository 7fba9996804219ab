"""Captured inputs: what an operation was given while a model ran, one request a file, in a folder.

A capture is ``NAME.safetensors`` with the tensors of one call and ``NAME.json`` with the rest: the numbers of the call,
where it comes from, and the digest of the tensors. A request lies there by positions, without the addresses that it had
in the model: the judge scatters it over slots of its own, with NaN in everything that nobody may read.
"""

import functools
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from .case import Case

# raised whenever the layout of the files changes
CAPTURE_VERSION = 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# of each operation the tensors with the names of their sizes: q has the last n of T tokens, the caches have all of them
TENSORS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {"q": ("n", "H", "Dq"), "k": ("T", "Hkv", "Dq"), "v": ("T", "Hkv", "Dv")},
    "mla_prefill": {"q": ("n", "H", "Dq"), "kv_c": ("T", "R"), "k_pe": ("T", "Dr"), "kv_b_proj": ("H", "Db", "R")},
}
NUMBERS: dict[str, tuple[str, ...]] = {
    "attention": ("softmax_scale",),
    "mla_prefill": ("softmax_scale", "history_chunk_size"),
}


class CaptureError(ValueError):
    """A capture that cannot be used; the text names its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """One captured call.

    Attributes:
        op: The operation.
        name: ``FILE#SHA256`` of the tensors, as a case names them.
        dtype: Of the tensors, such as ``bfloat16``.
        sizes: By the names in ``TENSORS``.
        numbers: Of ``NUMBERS``.
        largest: The greatest magnitude in any of the tensors.
    """

    op: str
    name: str
    dtype: str
    sizes: Mapping[str, int]
    numbers: Mapping[str, float]
    largest: float


@runtime_checkable
class CapturedOperation(Protocol):
    """An operation that can be judged on captured calls; ``captured_from`` is the operation whose calls they are."""

    captured_from: str

    def captured_cases(self, capture: Capture, dtype: str, seed: int) -> list[Case]:
        """The cases of one captured call, its tensors rounded to ``dtype``."""
        ...


def captured_cases(operation: Any, folder: Path, dtypes: Sequence[str], seed: int) -> list[Case]:
    """The cases of all captures of a folder that an operation can be judged on.

    Args:
        operation: Any; there is none for one that knows nothing of captures.
        folder: As ``read_captures`` takes it.
        dtypes: To which the tensors are rounded; empty for their own dtype.
        seed: Of slots and rows.

    Raises:
        CaptureError: If the folder cannot be read, or a dtype does not hold a captured value.
    """
    captures, cases = read_captures(folder), list[Case]()
    for capture in captures if isinstance(operation, CapturedOperation) else ():
        for dtype in (dtypes or (capture.dtype,)) if capture.op == operation.captured_from else ():
            most = torch.finfo(getattr(torch, dtype)).max
            if capture.largest > most:
                raise CaptureError(f"{dtype} must hold {capture.largest:g} of {capture.name}, and reaches {most:g}")
            cases += operation.captured_cases(capture, dtype, seed)
    return cases


def write_capture(
    folder: Path, name: str, op: str, tensors: Mapping[str, Tensor], numbers: Mapping[str, float], origin: Any
) -> Path:
    """Write a capture; return the path of its JSON file.

    Args:
        folder: Created if need be.
        name: Of both files, without an ending.
        op: The operation.
        tensors: Of ``TENSORS``, dense, one dtype.
        numbers: Of ``NUMBERS``.
        origin: Where it comes from, as plain JSON values.

    Raises:
        CaptureError: If this is no call that ``read_captures`` would take.
    """
    path = folder / f"{name}.json"
    stored = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    _sizes(op, stored, numbers, path)
    content = save(stored)
    folder.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".safetensors").write_bytes(content)
    described = {
        "capture_version": CAPTURE_VERSION,
        "op": op,
        "tensors": f"{name}.safetensors",
        "sha256": hashlib.sha256(content).hexdigest(),
        "numbers": dict(numbers),
        "origin": origin,
    }
    # last, so that a capture that can be read is whole
    path.write_text(json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    return path


def read_captures(folder: Path) -> list[Capture]:
    """The captures of a folder, in the order of their names.

    Raises:
        CaptureError: If there is none, or one of them is damaged or lacks a part; the text names the file.
    """
    if not folder.is_dir():
        raise CaptureError(f"captures must be in a folder, got {folder}")
    found = sorted(folder.glob("*.json"))
    described = {path.with_suffix(".safetensors") for path in found}
    alone = sorted(path for path in folder.glob("*.safetensors") if path not in described)
    if alone:
        raise CaptureError(f"tensors must have their description beside them, {alone[0]} has none")
    if not found:
        raise CaptureError(f"a folder of captures must hold at least one, got none in {folder}")
    return [_read(path) for path in found]


@functools.lru_cache(maxsize=16)
def capture_tensors(file: str, sha256: str) -> dict[str, Tensor]:
    """The tensors of a capture.

    Raises:
        CaptureError: If the file is not there, or not the one of this digest.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise CaptureError(f"captured tensors must be readable, got {file}: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise CaptureError(f"{file} must have the sha256 {sha256}, got {found}: it is damaged, or of another capture")
    try:
        return load(content)
    except SafetensorError as error:
        raise CaptureError(f"captured tensors must be a safetensors file, got {file}: {error}") from error


def _read(path: Path) -> Capture:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CaptureError(f"a capture must be a readable JSON file, got {path}: {error}") from error
    version = content.get("capture_version") if isinstance(content, dict) else None
    if version != CAPTURE_VERSION:
        raise CaptureError(f"capture_version must be {CAPTURE_VERSION}, got {version!r} in {path}")
    missing = [name for name in ("op", "tensors", "sha256", "numbers") if name not in content]
    if missing:
        raise CaptureError(f"a capture must have the entry {missing[0]!r}, {path} has not")
    op, name, numbers = content["op"], content["tensors"], content["numbers"]
    # the description names its own neighbour, and no file elsewhere
    if name != f"{path.stem}.safetensors":
        raise CaptureError(f"tensors must be {path.stem}.safetensors, got {name!r} in {path}")
    if not isinstance(numbers, dict):
        raise CaptureError(f"numbers must be a table, got {numbers!r} in {path}")
    file = str(path.with_suffix(".safetensors"))
    tensors = capture_tensors(file, str(content["sha256"]))
    sizes = _sizes(op, tensors, numbers, path)
    dtype = str(tensors["q"].dtype).removeprefix("torch.")
    largest = max(float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel())
    name = f"{file}#{content['sha256']}"
    return Capture(op=op, name=name, dtype=dtype, sizes=sizes, numbers=numbers, largest=largest)


def _sizes(op: Any, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The sizes of a call by name, all checked against each other."""
    if not isinstance(op, str) or op not in TENSORS:
        raise CaptureError(f"op must be one of {', '.join(TENSORS)}, got {op!r} in {path}")
    forms = TENSORS[op]
    if set(tensors) != set(forms):
        raise CaptureError(
            f"{op} must have the tensors {', '.join(forms)}, got {', '.join(tensors) or 'none'} in {path}"
        )
    sizes: dict[str, int] = {}
    for name, form in forms.items():
        tensor = tensors[name]
        shape = tuple(tensor.shape)
        if len(shape) != len(form) or any(
            sizes.setdefault(axis, size) != size for axis, size in zip(form, shape, strict=True)
        ):
            wanted = ", ".join(f"{axis} {sizes[axis]}" if axis in sizes else axis for axis in form)
            raise CaptureError(f"{name} must have the shape [{wanted}], got {list(shape)} in {path}")
        if tensor.dtype not in DTYPES or tensor.dtype != tensors["q"].dtype:
            raise CaptureError(f"{name} must be float32, float16 or bfloat16 as q is, got {tensor.dtype} in {path}")
        if not tensor.isfinite().all():
            raise CaptureError(f"{name} must be finite, and is not, in {path}")
    _check_relations(op, sizes, path)
    if set(numbers) != set(NUMBERS[op]):
        raise CaptureError(f"{op} must have the numbers {', '.join(NUMBERS[op])}, got {', '.join(numbers)} in {path}")
    for name, value in numbers.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole if name == "history_chunk_size" else whole or isinstance(value, float)
        if not fits or not 0 < value < math.inf:
            kind = "whole number" if name == "history_chunk_size" else "number"
            raise CaptureError(f"{name} must be a positive {kind}, got {value!r} in {path}")
    return sizes


def _check_relations(op: str, sizes: Mapping[str, int], path: Path) -> None:
    relations = {"q must have 1 .. T tokens": 1 <= sizes["n"] <= sizes["T"]}
    if op == "attention":
        relations["H must be a multiple of Hkv"] = sizes["Hkv"] > 0 and sizes["H"] % sizes["Hkv"] == 0
    else:
        d_nope = sizes["Dq"] - sizes["Dr"]
        relations["Dq must be above Dr"] = d_nope > 0
        relations["kv_b_proj must have more rows a head than Dq - Dr"] = sizes["Db"] > d_nope
    broken: Sequence[str] = [text for text, holds in relations.items() if not holds]
    if broken:
        raise CaptureError(f"{broken[0]}, got {dict(sizes)} in {path}")
