"""Settings as plain JSON: their fingerprint, and what differs between two of them."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any


def canonical(value: Any) -> str:
    """One text for equal values; a number that JSON lacks is refused."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


def fingerprint(value: Any) -> str:
    """Digest of the canonical text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()


def text_digest(text: str) -> str:
    """Digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def differences(first: Any, second: Any) -> list[str]:
    """Each value that differs, with its path."""
    before, after = dict(_leaves(first)), dict(_leaves(second))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        f"{path}: {_short(before, path)} against {_short(after, path)}"
        for path in paths
        if before.get(path, _NOTHING) != after.get(path, _NOTHING)
    ]


_NOTHING = object()


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key in sorted(value):
            yield from _leaves(value[key], f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple) and any(isinstance(one, Mapping) for one in value):
        for at, one in enumerate(value):
            yield from _leaves(one, f"{path}[{at}]")
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def _short(values: Mapping[str, Any], path: str) -> str:
    if path not in values:
        return "nothing"
    text = json.dumps(values[path], ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"
