"""The judge: decides whether a kernel computes what its oracle says, within what its contract promises."""

from .contract import Contract
from .plugin import kernel

__all__ = ["Contract", "kernel"]
