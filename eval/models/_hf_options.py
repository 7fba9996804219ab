"""Options of the command line for transformers models, read into rules; part of ``hf.py``."""

from typing import cast

from ...optimized.token_scores import Mode
from ._hf_exact_scores import TopkRule
from ._hf_selection import SNAPKV, Selection

SCORES = "probability"
WINDOW, SINK, RECENT, POOL = "32", "4", "32", "5"


def count(name: str, text: str, *, least: int) -> int:
    """A number.

    Raises:
        ValueError: If it is none, or less than ``least``.
    """
    if not str(text).isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be a number of at least {least}, got {text!r}")
    return int(text)


def read_rules(
    selection: str, topk: str, scores: str, *, step: int, **sizes: str
) -> tuple[Selection | None, TopkRule | None]:
    """What stays of a prompt, and what each query looks at.

    Args:
        selection: Its method, or empty for everything.
        topk: How many tokens, or empty for all.
        scores: ``logits`` or ``probability``, or empty for the latter.
        step: Most tokens of a prompt that are read at once, 0 for all.
        sizes: ``budget``, ``sink``, ``recent``, ``window`` and ``pool`` of the selection, or empty.

    Raises:
        ValueError: If a number is out of range, or given where nothing follows it.
    """
    given = [name for name, text in (sizes | {"scores": scores if not topk else ""}).items() if text]
    if selection and topk:
        raise ValueError(f"selection and topk must not come together, got {selection} and {topk}")
    if given and not selection:
        raise ValueError(f"{', '.join(given)} must come with a selection, and got none")
    mode = cast("Mode", scores or SCORES)
    if topk:
        return None, TopkRule(topk=count("topk", topk, least=1), scores=mode)
    return (_selection(selection, mode, step, **sizes) if selection else None), None


def _selection(
    method: str, mode: Mode, step: int, *, budget: str, sink: str, recent: str, window: str, pool: str
) -> Selection:
    snapkv = method == SNAPKV
    rule = Selection(
        method=method,
        scores=mode,
        budget=count("budget", budget, least=1),
        sink=count("sink", sink or SINK, least=0),
        recent=count("recent", recent or (window if snapkv else "") or RECENT, least=0),
        window=count("window", window or (WINDOW if snapkv else "0"), least=0),
        pool=count("pool", pool or (POOL if snapkv else "1"), least=1),
    )
    if step and rule.window > step:
        raise ValueError(f"window must be at most step, since the last step is observed, got {rule.window} and {step}")
    return rule
