"""What is timed: named geometries of models, from a TOML file, and grids around one of them."""

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..case import Case
from ..discovery import load_operation, operation_names
from ..operation import CaseRequest
from ..plan import DTYPES, UsageError

PACKAGED = Path(__file__).with_name("shapes.toml")
FAMILY = "diffuse"
_WORDS = ("name", "op", "source", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One geometry.

    Attributes:
        name: Unique in its file.
        op: Name of the operation.
        source: Whose geometry it is.
        dtype: Of the floating inputs.
        sizes: As in a case of the operation.
    """

    name: str
    op: str
    source: str
    dtype: str
    sizes: dict[str, Any]

    @property
    def digest(self) -> str:
        """Of all that decides the work, so that a shape that kept its name alone is not taken for the same."""
        content = json.dumps([self.op, self.dtype, self.sizes], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:8]

    def case(self, seed: int) -> Case:
        """A case of it; other seeds give other contents of the same shape."""
        return Case(op=self.op, family=FAMILY, dtype=self.dtype, seed=seed, sizes=self.sizes)


def packaged_shapes() -> list[Shape]:
    """The shapes that are timed where no file is named."""
    return read_shapes(PACKAGED, option="--shapes")


def read_shapes(path: Path, *, option: str = "--shapes") -> list[Shape]:
    """The shapes of a TOML file: tables ``[[shape]]`` with ``name``, ``op``, ``source`` and the operation's sizes.

    Args:
        path: The file.
        option: Of the command line, for messages.

    Raises:
        UsageError: If it cannot be read or describes no shapes.
    """
    shapes = [_shape(table, path) for table in _tables(path, "shape", option)]
    names = [shape.name for shape in shapes]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise UsageError(f"the name of a shape must be its own, got {doubled[0]!r} twice in {path}")
    return shapes


def read_sweep(path: Path, known: Iterable[Shape]) -> list[Shape]:
    """Every point of the grids of a TOML file.

    A table ``[[sweep]]`` names its ``base``, a known shape; ``[sweep.axes]`` gives the values of each axis. The key of
    an axis is a size, or several with commas between them that take the same value: ``"query_lens, key_lens"``.

    Args:
        path: The file.
        known: Shapes that may be a base.

    Raises:
        UsageError: If it cannot be read, or names what is not there.
    """
    by_name = {shape.name: shape for shape in known}
    shapes = []
    for table in _tables(path, "sweep", "--sweep"):
        base = by_name.get(str(table.get("base")))
        if base is None:
            raise UsageError(f"base must be one of {', '.join(by_name)}, got {table.get('base')!r} in {path}")
        if table.get("op", base.op) != base.op:
            raise UsageError(f"op must be that of {base.name}, {base.op}, got {table['op']!r} in {path}")
        axes = table.get("axes")
        if not isinstance(axes, dict) or not axes or not all(isinstance(v, list) and v for v in axes.values()):
            raise UsageError(f"axes must name sizes with a list of values each, got {axes!r} in {path}")
        shapes += [_point(base, axes, values, path) for values in itertools.product(*axes.values())]
    return shapes


def _point(base: Shape, axes: Iterable[str], values: Sequence[Any], path: Path) -> Shape:
    changes: dict[str, Any] = {}
    for axis, value in zip(axes, values, strict=True):
        names = [name.strip() for name in axis.split(",")]
        for name in names:
            if name not in base.sizes:
                raise UsageError(f"an axis must name sizes among {', '.join(base.sizes)}, got {name!r} in {path}")
            _check_type(name, value, base.sizes[name], path)
        changes |= dict.fromkeys(names, value)
    moved = ", ".join(f"{axis}={_short(value)}" for axis, value in zip(axes, values, strict=True))
    return replace(base, name=f"{base.name}: {moved}", sizes=base.sizes | changes)


def _tables(path: Path, key: str, option: str) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UsageError(f"{option} must be a TOML file, got {path}")
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get(key)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{option} must be valid TOML, got {path}: {error}") from error
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise UsageError(f"{option} must hold tables [[{key}]], got none in {path}")
    return tables


def _shape(table: dict[str, Any], path: Path) -> Shape:
    op, name, dtype = table.get("op"), table.get("name"), table.get("dtype", "bfloat16")
    if op not in operation_names():
        raise UsageError(f"op of a shape must be one of {', '.join(operation_names())}, got {op!r} in {path}")
    if not isinstance(name, str) or not name:
        raise UsageError(f"a shape must have a name, got {name!r} in {path}")
    if dtype not in DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r} of {name} in {path}")
    sizes = {key: value for key, value in table.items() if key not in _WORDS}
    template = load_operation(op).cases(CaseRequest(tier="smoke", seed=0, dtypes=(dtype,)))[0].sizes
    missing, unknown = (
        [size for size in template if size not in sizes],
        [size for size in sizes if size not in template],
    )
    if missing or unknown:
        wrong = f"missing {', '.join(missing) or 'none'}, unknown {', '.join(unknown) or 'none'}"
        raise UsageError(f"{name} must have the sizes {', '.join(template)}; {wrong} in {path}")
    for size, value in sizes.items():
        _check_type(size, value, template[size], path)
    return Shape(name=name, op=op, source=str(table.get("source", "")), dtype=dtype, sizes=sizes)


def _check_type(name: str, value: Any, like: Any, path: Path) -> None:
    if type(value) is not type(like):
        raise UsageError(f"{name} must be a {type(like).__name__}, got {value!r} in {path}")


def _short(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) and len(value) == 1 else str(value)
