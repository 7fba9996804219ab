"""The operation ``token_selection``: which tokens of each request stay within its budget."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...optimized.token_selection import token_selection
from ..answers import Answer
from ..batches import MANY, log_uniform
from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..metamorphic.rearranged import Rearranged
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..poison import Ledger
from ._reversed_requests import ask_permuted, moved_rows, reversed_rows
from ._token_selection_gates import SelectionOracle, judge_selection, selection_oracle

# values of their own; few values, so that many are equal; -inf among numbers of all magnitudes; all below 0; all a few
# units in the last place above 1
FAMILIES = ("diffuse", "ties", "deep", "negative", "near")
POOLINGS = (("max", 1), ("max", 5), ("avg", 5), ("avg", 3), ("max", 7))
# another order of requests is about layout, not values: one family is asked for it
REARRANGED = ("diffuse",)
NIGHTLY_CASES = 40
# sink, recent, and the part of a context that its budget holds
WINDOWS = ((0, 0, 0.5), (4, 8, 0.25), (1, 0, 0.7), (0, 3, 0.1))


class TokenSelection:
    """See ``harness.operation.Operation``; the oracle is ``reference.token_selection.token_selection``."""

    name = "token_selection"
    arguments = ("scores", "context_lens", "budgets", "sink", "recent", "kernel_size", "pooling")
    optional_arguments: tuple[str, ...] = ()
    results = ("kept",)

    def cases(self, request: CaseRequest) -> list[Case]:
        """Smoke: every family, pooling and window on short contexts. Full: long ones, all dtypes. Nightly: drawn."""
        rng, cases = np.random.default_rng([request.seed, 4]), list[Case]()

        def add(
            family: str, turn: int, lens: list[int], window: tuple[int, int, float], pooling: tuple[str, int]
        ) -> None:
            sizes = {
                "context_lens": lens,
                "sink": window[0],
                "recent": window[1],
                "part": window[2],
                "pooling": pooling[0],
                "kernel_size": pooling[1],
            }
            seed, dtype = int(rng.integers(2**31)), request.dtypes[turn % len(request.dtypes)]
            cases.append(Case(op=self.name, family=family, dtype=dtype, seed=seed, sizes=sizes))

        for at, family in enumerate(FAMILIES):
            for turn, pooling in enumerate(POOLINGS):
                # longer than a tile, and short ones, whose edges matter
                lens = [300, *(log_uniform(rng, 1, 130) for _ in range(6))]
                if turn == at:
                    # and many of them
                    lens += list(range(1, MANY - 6))
                add(family, turn + at, lens, WINDOWS[(turn + 2 * at) % len(WINDOWS)], pooling)
        if request.tier != "smoke":
            for turn in range(3 * len(FAMILIES)):
                for pooling in POOLINGS:
                    lens = [log_uniform(rng, 1, 20000), *(log_uniform(rng, 1, 700) for _ in range(20))]
                    add(FAMILIES[turn // 3], turn, lens, WINDOWS[turn % len(WINDOWS)], pooling)
        if request.tier == "nightly":
            for turn in range(NIGHTLY_CASES):
                window = int(rng.integers(9)), int(rng.integers(65)), float(f"{rng.uniform(0.01, 0.99):.3g}")
                lens = [log_uniform(rng, 1, 4000) for _ in range(log_uniform(rng, 1, 40))]
                drawn = ("max", "avg")[int(rng.integers(2))], 1 + 2 * int(rng.integers(8))
                add(FAMILIES[int(rng.integers(len(FAMILIES)))], turn, lens, window, drawn)
        return cases

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Scores in rows wider than any context; NaN wherever no candidate lies, which nobody may look at."""
        sizes, ledger = case.sizes, Ledger()
        lens, dtype = sizes["context_lens"], getattr(torch, case.dtype)
        generator = torch.Generator().manual_seed(case.seed)
        scores = torch.full((len(lens), max(lens) + 3), math.nan)
        for row, context in zip(scores, lens, strict=True):
            candidates = slice(sizes["sink"], max(sizes["sink"], context - sizes["recent"]))
            row[candidates] = _values(case.family, len(row[candidates]), dtype, generator)
        integers = {"context_lens": torch.tensor(lens, dtype=torch.int32), "budgets": torch.tensor(budgets_of(case))}
        integers["budgets"] = integers["budgets"].int()
        # a view of wider rows: whoever takes them for contiguous reads NaN
        width = scores.shape[1]
        view = ledger.guarded_view("scores", scores.to(dtype), device, lambda b: b[..., :width], width=width + 5)
        arguments: dict[str, Any] = {"scores": view}
        arguments |= {name: ledger.guarded(name, tensor, device) for name, tensor in integers.items()}
        arguments |= {name: sizes[name] for name in ("sink", "recent", "kernel_size", "pooling")}
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """A row per request, as wide as the largest budget."""
        budgets = budgets_of(case)
        result = Result(name="kept", shape=(len(budgets), max(budgets)), axes=("request", "position"), dtype="int32")
        # with the signs changed the others are the best: where any is chosen among at least two
        always = case.sizes["sink"] + case.sizes["recent"]
        pairs = zip(case.sizes["context_lens"], budgets, strict=True)
        chosen = any(context > budget > always for context, budget in pairs)
        return Outline(results=(result,), follows_contents=chosen and case.family == "diffuse")

    def oracle(self, case: Case, arguments: dict[str, Any]) -> SelectionOracle:
        """The reference's choice with the scores that it chose by."""
        return selection_oracle(arguments)

    def judge(self, case: Case, oracle: SelectionOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_token_selection_gates``."""
        # sums of few small multiples of 1/2 are exact in every dtype, and their means as different as they are
        return judge_selection(oracle, answer[0], contract, exact=case.family == "ties")

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> Rearranged | None:
        """The requests in reverse order, with their lengths and budgets; see ``_reversed_requests``."""
        if case.family not in REARRANGED or len(case.sizes["context_lens"]) == 1:
            return None
        return ask_permuted(lambda: _permuted(case, arguments, ask), first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Pooled in the dtype of the scores; nothing else is rounded."""
        return Contract(p="fp32", out="fp32", logits=PRECISION_OF_DTYPE[case.dtype])

    def kernels(self) -> list[Kernel]:
        """The twin, which is of torch alone."""

        def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
            return lambda: token_selection(**arguments)

        return [Kernel(name="token_selection[torch]", contract=self.default_contract, bind=bind)]


def reversed_requests(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the last request first."""
    scores = arguments["scores"]
    turned = {name: arguments[name].flip(0) for name in ("context_lens", "budgets")}
    return arguments | turned | {"scores": moved_rows(scores, reversed_rows([1] * len(scores), scores.device))}


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the requests in reverse order, put back."""
    # budgets go by the number of a request: of a case in that order they would be others
    return tuple(part.flip(0) for part in ask(case, reversed_requests(arguments)))


def budgets_of(case: Case) -> list[int]:
    """Of each request a part of its context, never less than what always stays; of every third more than all of it."""
    sizes = case.sizes
    always = max(1, sizes["sink"] + sizes["recent"])
    parts = [max(always, int(context * sizes["part"])) for context in sizes["context_lens"]]
    return [
        max(context + 2, always) if request % 3 == 2 else part
        for request, (context, part) in enumerate(zip(sizes["context_lens"], parts, strict=True))
    ]


def _values(family: str, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    drawn = torch.randn(count, generator=generator)
    if family == "negative":
        return drawn - 8
    if family == "near":
        return 1 + torch.randint(count + 1, (count,), generator=generator) * torch.finfo(dtype).eps
    if family == "diffuse":
        return drawn
    if family == "ties":
        return (2 * drawn).round() / 2
    if family == "deep":
        # raw logits get that large; float16 holds no more
        highest = 12 if dtype == torch.float16 else 18
        magnitude = torch.exp2(torch.randint(-10, highest + 1, (count,), generator=generator).float())
        return torch.where(torch.rand(count, generator=generator) < 0.3, -math.inf, drawn * magnitude)
    raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {family!r}")


OPERATION = TokenSelection()
