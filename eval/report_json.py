"""A comparison as JSON, for programs."""

import dataclasses
from typing import Any

from .comparison import Comparison


def json_report(comparison: Comparison) -> dict[str, Any]:
    """Plain values; keys that are not text become text."""
    content = _plain(comparison)
    content |= {"exit_code": comparison.exit_code, "headline": comparison.headline}
    for pair in content["pairs"]:
        # the samples are in a file of their own
        pair["flips"] = len(pair["flips"])
    return dict(content)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: _plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {"/".join(key) if isinstance(key, tuple) else str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
