"""The smallest case that still shows a fault: fewer requests first, then shorter, fewer heads, narrower, plainer.

Every step is kept only while the judge gives the same verdict for the same kind of reason, so that the search does not
slip from one fault to another. Nothing is drawn: the same kernel gives the same smallest case.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from .case import LENGTHS, PER_REQUEST, Case
from .record import GateResult, Record, Verdict

# verdicts that blame no kernel: there is nothing to make smaller
NO_FAULT = frozenset({Verdict.PASS, Verdict.UNSUPPORTED, Verdict.INVALID_CASE, Verdict.WAIVED, Verdict.HARNESS_ERROR})
# a kernel that fails now and then only must fail this often on a smaller case before that counts
NONDETERMINISTIC_RUNS = 3
# what a later operation adds to these lines is shrunk as well
DIMENSIONS = {"d_qk": 1, "d_v": 1, "kv_lora_rank": 1, "d_nope": 1, "d_rope": 0, "head_dim": 1, "topk": 1}
DIMENSIONS |= {"head_dim_k": 1, "head_dim_v": 1}
PLAIN_LAYOUT = {
    "attention": "packed",
    "mla_prefill": "split",
    "masked_mha": "packed",
    "topk_mask": "packed",
    "indexer": "packed",
    "sparse_mla": "packed",
    "kda": "apart",
    "kda_step": "apart",
}
PLAIN_FAMILY = "diffuse"
# products of tokens, heads and dimensions below which a case is no burden for a CPU
CPU_ELEMENTS = 1 << 24


def fault_kind(verdict: Verdict, worst: GateResult | None, text: str) -> tuple[Verdict, str]:
    """What must stay the same while a case shrinks: the verdict, and the number of the gate that decided it.

    Where no gate did, a crash is known by its exception and its line, and all else by its text without the numbers.
    """
    if worst is not None and not worst.passed:
        return verdict, worst.gate.split()[0]
    crash = re.match(r"(\w+): .*\(([^()]*:\d+)\)$", text, flags=re.DOTALL)
    if verdict is Verdict.CRASH and crash:
        return verdict, " ".join(crash.groups())
    if verdict in (Verdict.OUT_OF_MEMORY, Verdict.TIMEOUT):
        return verdict, ""
    return verdict, re.sub(r"\d+", "#", text.split(", got ")[0])


def shrink(
    case: Case,
    verdict: Verdict,
    run_case: Callable[[Case], Record],
    *,
    max_runs: int = 200,
    max_seconds: float = 60.0,
    on_step: Callable[[Case, Record], None] | None = None,
) -> Case:
    """The smallest case found on which a kernel still fails as it does on ``case``; no size ever grows.

    The case itself is judged first. If it does not fail with ``verdict`` then, as that of a flaky kernel may not, it
    comes back unchanged. Of a captured case only the requests and the lengths shrink.

    Args:
        case: A case on which the kernel failed.
        verdict: How it failed.
        run_case: Judges the kernel on a case, in this process or in another one.
        max_runs: Most judgements, the first one included.
        max_seconds: No judgement is started later than this.
        on_step: Called with each smaller case and its record. An interruption calls it once more with the smallest
            one found so far, if any was judged, and is then raised again.

    Raises:
        ValueError: If ``verdict`` is no fault of a kernel, or no run is allowed.
    """
    if verdict in NO_FAULT:
        raise ValueError(f"verdict must be a failure of the kernel, got {verdict.value}")
    if max_runs < 1:
        raise ValueError(f"max_runs must be at least 1, got {max_runs}")
    end = time.monotonic() + max_seconds
    search = _Search(best=case, run_case=run_case, on_step=on_step, runs_left=max_runs, end=end)
    try:
        if search.confirm(verdict):
            _until_nothing_changes(search)
    except _SpentError:
        pass
    except KeyboardInterrupt:
        search.report()
        raise
    return search.best


def shrunk_text(before: Case, after: Case) -> str:
    """One line that says what became smaller, such as ``query_lens [9, 5] -> [1], num_heads 4 -> 2``."""
    old, new = ({"family": case.family, **case.sizes} for case in (before, after))
    changed = (f"{name} {_short(old[name])} -> {_short(new[name])}" for name in old if old[name] != new[name])
    return ", ".join(changed) or "nothing could be left out"


class _SpentError(Exception):
    """No run or no time is left."""


@dataclass(slots=True, kw_only=True)
class _Search:
    """The best case so far, and the judge that a smaller one must convince."""

    best: Case
    run_case: Callable[[Case], Record]
    on_step: Callable[[Case, Record], None] | None
    runs_left: int
    end: float
    record: Record | None = None
    kind: tuple[Verdict, str] | None = None
    repeats: int = 1
    tried: set[str] = field(default_factory=set)

    def confirm(self, verdict: Verdict) -> bool:
        """Judge the case itself, to learn what kind of fault it shows; False if it is another verdict now."""
        record = self._run(self.best)
        if record.verdict is not verdict:
            return False
        self.record, self.kind = record, fault_kind(record.verdict, record.worst, record.text)
        self.repeats = NONDETERMINISTIC_RUNS if verdict is Verdict.NONDETERMINISTIC else 1
        return True

    def keeps(self, candidate: Case) -> bool:
        """Whether the candidate shows the same fault; if so it is the best one from now on."""
        if candidate.id in self.tried:
            return False
        for _ in range(self.repeats):
            record = self._run(candidate)
            if fault_kind(record.verdict, record.worst, record.text) != self.kind:
                return False
        self.best, self.record = candidate, record
        self.report()
        return True

    def report(self) -> None:
        """Hand the best case and its record to whoever waits for it."""
        if self.on_step is not None and self.record is not None:
            self.on_step(self.best, self.record)

    def _run(self, candidate: Case) -> Record:
        if self.runs_left == 0 or time.monotonic() > self.end:
            raise _SpentError
        self.runs_left -= 1
        self.tried.add(candidate.id)
        return self.run_case(candidate)


def _until_nothing_changes(search: _Search) -> None:
    steps = [_drop_requests, _halve_lengths, _shorten_requests]
    if "captured" not in search.best.sizes:
        steps += [_narrow_chunks, _fewer_heads, _fewer_dimensions, _plainer]
    before = None
    while search.best is not before:
        before = search.best
        for step in steps:
            step(search)
    _fit_for_a_cpu(search)


def _with(case: Case, **sizes: Any) -> Case:
    return replace(case, sizes=case.sizes | sizes)


def _lengths(case: Case) -> dict[str, list[int]]:
    """The sizes that count tokens of each request."""
    return {name: value for name, value in case.sizes.items() if name.endswith(LENGTHS)}


def _of_requests(case: Case) -> dict[str, list[int]]:
    """The sizes that have one entry per request."""
    return {name: value for name, value in case.sizes.items() if name.endswith(PER_REQUEST)}


def _requests(case: Case) -> int:
    return max((len(lens) for lens in _lengths(case).values()), default=0)


def _lower(search: _Search, value: int, floor: int, build: Callable[[int], Case]) -> None:
    """Try the floor, then bisect between it and the value; each value that keeps the fault is taken."""
    if value <= floor or search.keeps(build(floor)):
        return
    low, high = floor, value
    while high - low > 1:
        middle = (low + high) // 2
        if search.keeps(build(middle)):
            high = middle
        else:
            low = middle


def _drop_requests(search: _Search) -> None:
    """Leave out half of the requests at a time, then a quarter, and at last single ones."""
    stretch = _requests(search.best) // 2
    while stretch >= 1:
        start = 0
        while start < _requests(search.best):
            left = {name: own[:start] + own[start + stretch :] for name, own in _of_requests(search.best).items()}
            # what follows moves up into the gap, so the place stays
            if not all(left.values()) or not search.keeps(_with(search.best, **left)):
                start += stretch
        stretch //= 2


def _halve_lengths(search: _Search) -> None:
    """All requests at once, as long as that works: the runs after it cost less."""
    while search.keeps(_halved(search.best)):
        pass


def _halved(case: Case) -> Case:
    halves = {name: [-(-length // 2) for length in lens] for name, lens in _lengths(case).items()}
    if "context_lens" in halves:
        # half of the history before half of the queries
        pairs = zip(case.sizes["query_lens"], case.sizes["context_lens"], strict=True)
        halves["context_lens"] = [-(-n // 2) - (-(c - n) // 2) for n, c in pairs]
    return _with(case, **halves)


def _shorten_requests(search: _Search) -> None:
    """Each request: queries and keys together, which keeps their distance, then the keys alone, then the queries."""
    for request in range(_requests(search.best)):
        _shorten(search, request, tuple(_lengths(search.best)))
        for name in sorted(_lengths(search.best), key=lambda name: name == "query_lens"):
            _shorten(search, request, (name,))


def _shorten(search: _Search, request: int, names: tuple[str, ...]) -> None:
    base, lens = search.best, _lengths(search.best)
    # a context holds the queries, and a request that has none of a kind keeps having none
    least = dict.fromkeys(lens, 1) | (
        {"context_lens": lens["query_lens"][request]} if names == ("context_lens",) else {}
    )
    spare = min(max(0, lens[name][request] - least[name]) for name in names)

    def build(kept: int) -> Case:
        cut = spare - kept
        return _with(base, **{name: [n - cut * (at == request) for at, n in enumerate(lens[name])] for name in names})

    _lower(search, spare, 0, build)


def _narrow_chunks(search: _Search) -> None:
    """Narrower chunks of the history, as many as before, so that a fault between two chunks keeps its two chunks."""
    base = search.best
    chunk = base.sizes.get("history_chunk_size")
    if chunk is None:
        return
    pairs = list(zip(base.sizes["query_lens"], base.sizes["context_lens"], strict=True))

    def build(narrow: int) -> Case:
        contexts = [n + _narrowed(c - n, chunk, narrow) for n, c in pairs]
        return _with(base, history_chunk_size=narrow, context_lens=contexts)

    _lower(search, chunk, 1, build)


def _narrowed(history: int, chunk: int, narrow: int) -> int:
    """Length of a history of as many chunks when each is at most ``narrow`` tokens."""
    whole = max(0, history - 1) // chunk
    return whole * narrow + min(history - whole * chunk, narrow)


def _fewer_heads(search: _Search) -> None:
    """Fewer key heads with their groups of query heads, then smaller groups."""
    base = search.best
    heads = base.sizes.get("num_heads", 1)
    if "num_kv_heads" not in base.sizes:
        _lower(search, heads, 1, lambda count: _with(base, num_heads=count))
        return
    kv_heads = base.sizes["num_kv_heads"]
    group = heads // kv_heads
    _lower(search, kv_heads, 1, lambda count: _with(base, num_heads=count * group, num_kv_heads=count))
    fewer = search.best
    _lower(search, group, 1, lambda size: _with(fewer, num_heads=size * fewer.sizes["num_kv_heads"]))


def _fewer_dimensions(search: _Search) -> None:
    for name, least in DIMENSIONS.items():
        _lower(search, search.best.sizes.get(name, least), least, partial(_resized, search.best, name))


def _resized(case: Case, name: str, size: int) -> Case:
    return _with(case, **{name: size})


def _plainer(search: _Search) -> None:
    """The layout and the family that need the least explaining."""
    layout = PLAIN_LAYOUT.get(search.best.op)
    if layout is not None and "layout" in search.best.sizes:
        search.keeps(_with(search.best, layout=layout))
    search.keeps(replace(search.best, family=PLAIN_FAMILY))


def _fit_for_a_cpu(search: _Search) -> None:
    """A case that only its former size kept off a CPU may be replayed there now."""
    case = search.best
    tokens = sum(sum(lens) for lens in _lengths(case).values())
    dims = sum(case.sizes.get(name, 0) for name in DIMENSIONS)
    if case.needs_device and tokens * tokens * case.sizes.get("num_heads", 1) * dims <= CPU_ELEMENTS:
        search.keeps(replace(case, needs_device=False))


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"[{len(value)} values, largest {max(value)}]"
    return str(value)
