"""The operation ``token_scores``: how much an observation window of MLA prefill looks at each token of its request."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill
from ...optimized.token_scores import TokenScoresPlan, plan_token_scores, token_scores
from ..answers import Answer
from ..captures import Capture
from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..families import EXACT_FAMILIES
from ..metamorphic.rearranged import Rearranged
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..providers import interpreted_tiles_refusal
from ._reversed_requests import ask_permuted, moved_rows, reversed_offsets, reversed_rows
from ._token_scores_cases import RANGES, captured_observations, token_scores_cases
from ._token_scores_gates import INDICES, ScoreOracle, judge_scores, score_oracle
from .mla_prefill import OPERATION as MLA_PREFILL

# of logits at -60000; a power of two, which rounds nothing
RAISED = 2.0**-8
TENSORS = ("q", "kv_c", "k_pe", "kv_b_proj")
# another order of requests is about layout, not values: one family is asked for it
REARRANGED = ("diffuse",)


class TokenScores:
    """See ``harness.operation.Operation``; the oracle is ``reference.token_scores.token_scores``."""

    name = "token_scores"
    arguments = (
        *TENSORS,
        "mode",
        "softmax_scale",
        *INDICES,
        "query_ranges",
        "candidate_start",
        "recent_keep_tokens",
        "candidate_ranges",
        "history_chunk_size",
    )
    optional_arguments = ("history_chunk_size",)
    results = ("scores",)
    captured_from = "mla_prefill"

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_token_scores_cases``."""
        return token_scores_cases(request, self.name)

    def captured_cases(self, capture: Capture, dtype: str, seed: int) -> list[Case]:
        """A captured prefill whose last queries are observed, in both modes; what stands before them is a candidate."""
        (prefill,) = MLA_PREFILL.captured_cases(capture, dtype, seed)
        return [replace(prefill, op=self.name, sizes=prefill.sizes | seen) for seen in captured_observations(capture)]

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Those of a prefill, with the observed ranges, and the candidates by either of the two ways to name them."""
        inputs, sizes = MLA_PREFILL.inputs(case, device), case.sizes
        arguments, ledger = dict(inputs.arguments), inputs.ledger
        if sizes["mode"] == "probability" and case.family == "sunken":
            # below any exponential still, and not so deep that rounding the logits leaves nothing to be judged
            arguments["q"].mul_(RAISED)
            ledger.copies["q"].copy_(ledger.buffers["q"])
        ranges = torch.tensor(observed_ranges(case), dtype=torch.int32)
        arguments |= {"mode": sizes["mode"], "query_ranges": ledger.guarded("query_ranges", ranges, device)}
        arguments |= {"candidate_start": 0, "recent_keep_tokens": 0, "candidate_ranges": None}
        if sizes["ranges"] == "all":
            arguments |= {name: sizes[name] for name in ("candidate_start", "recent_keep_tokens")}
        else:
            own = torch.tensor(candidate_ranges(case), dtype=torch.int32)
            arguments["candidate_ranges"] = ledger.guarded("candidate_ranges", own, device)
        return Inputs(arguments=arguments, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """A row per request, as wide as the slot table; weights that are equal by rule do not depend on values."""
        # as wide as harness.operations._mla_prefill_layout makes the slot table
        shape = len(case.sizes["context_lens"]), max(case.sizes["context_lens"]) + 3
        result = Result(name="scores", shape=shape, axes=("request", "position"), field="out")
        # a softmax over one token is 1, and one over equal logits the same for all
        least, alike = (2, case.family == "sunken") if case.sizes["mode"] == "probability" else (1, False)
        fixed = alike or case.family in EXACT_FAMILIES or _most_candidates(case) < least
        return Outline(results=(result,), follows_contents=not fixed)

    def oracle(self, case: Case, arguments: dict[str, Any]) -> ScoreOracle:
        """The reference's scores with the terms of their errors."""
        return score_oracle(arguments)

    def judge(self, case: Case, oracle: ScoreOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_token_scores_gates``."""
        return judge_scores(oracle, answer[0], contract, exact=case.family in EXACT_FAMILIES)

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> Rearranged | None:
        """The requests in reverse order, with all that describes them; see ``_reversed_requests``."""
        if case.family not in REARRANGED or len(case.sizes["query_lens"]) == 1:
            return None
        return ask_permuted(lambda: _permuted(case, arguments, ask), first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Keys, or absorbed queries, are rounded once to the dtype of the inputs; sums and scores are float32."""
        stored = PRECISION_OF_DTYPE[case.dtype]
        return Contract(p="fp32", out="fp32", projected=stored, absorbed=case.sizes["mode"] == "probability")

    def kernels(self) -> list[Kernel]:
        """Beside any attention with either implementation, and collected on the way of a prefill."""
        return [_alone("torch"), _alone("triton"), _fused()]


def observed_ranges(case: Case) -> list[list[int]]:
    """Half-open ranges of the observed positions of each request, ``[0, 0]`` for none."""
    sizes, ranges = case.sizes, []
    for request, (n, c) in enumerate(zip(sizes["query_lens"], sizes["context_lens"], strict=True)):
        stop = c - min(sizes["behind"], n)
        start = max(c - n, stop - sizes["window"])
        aside = sizes["unobserved"] and request % sizes["unobserved"] == sizes["unobserved"] - 1
        ranges.append([0, 0] if aside or start >= stop else [start, stop])
    return ranges


def candidate_ranges(case: Case) -> list[list[int]]:
    """Half-open ranges of candidates, by the rule of the case.

    Raises:
        ValueError: If there is no such rule.
    """
    rule, lens = case.sizes["ranges"], case.sizes["context_lens"]
    if rule not in RANGES:
        raise ValueError(f"ranges must be one of {', '.join(RANGES)}, got {rule!r}")
    if rule == "middle":
        return [[c // 4, c - c // 4] for c in lens]
    return [[c // 2, c // 2 + 1] if request % 2 == 0 else [c // 2, c // 2] for request, c in enumerate(lens)]


def reversed_requests(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the last request first, and the rows of the slot table one further."""
    a, table = arguments, arguments["slot_table"]
    rows = reversed_rows(a["cu_seqlens"].diff().tolist(), a["q"].device)
    moved = {"q": moved_rows(a["q"], rows), "cu_seqlens": reversed_offsets(a["cu_seqlens"])}
    moved |= {"slot_table": table.roll(1, 0), "request_rows": (a["request_rows"].flip(0) + 1) % len(table)}
    names = ("context_lens", "query_ranges", "candidate_ranges")
    return a | moved | {name: a[name].flip(0) for name in names if a[name] is not None}


def _permuted(case: Case, arguments: dict[str, Any], ask: Ask) -> Answer:
    """The answer to the requests in reverse order, put back."""
    # ranges go by the number of a request: of a case in that order they would be others
    return tuple(part.flip(0) for part in ask(case, reversed_requests(arguments)))


def _most_candidates(case: Case) -> int:
    """How many tokens an observed query may look at, at most."""
    sizes = case.sizes
    if sizes["ranges"] != "all":
        own = candidate_ranges(case)
    else:
        own = [[sizes["candidate_start"], c - sizes["recent_keep_tokens"]] for c in sizes["context_lens"]]
    pairs = zip(observed_ranges(case), own, strict=True)
    return max(max(0, min(stop, seen[1]) - start) if seen[0] < seen[1] else 0 for seen, (start, stop) in pairs)


def _plans(arguments: dict[str, Any], provider: str, implementation: str) -> tuple[MlaPrefillPlan, TokenScoresPlan]:
    q, kv_c, k_pe, weight = (arguments[name] for name in TENSORS)
    d_nope = q.shape[2] - k_pe.shape[1]
    shape = MlaShape(
        num_heads=q.shape[1],
        kv_lora_rank=kv_c.shape[1],
        d_nope=d_nope,
        d_rope=k_pe.shape[1],
        d_v=weight.shape[1] - d_nope,
    )
    plan = plan_mla_prefill(
        *(arguments[name] for name in INDICES),
        shape=shape,
        dtype=q.dtype,
        num_slots=len(kv_c),
        history_chunk_size=arguments["history_chunk_size"],
        provider=provider,
    )
    names = ("mode", "query_ranges", "candidate_start", "recent_keep_tokens", "candidate_ranges")
    asked = {name: arguments[name] for name in names}
    return plan, plan_token_scores(plan, implementation=implementation, **asked)


def _alone(implementation: str) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        # no attention takes part, so any provider plans the step
        _, plan = _plans(arguments, "torch", implementation)
        tensors, scale = [arguments[name] for name in TENSORS], arguments["softmax_scale"]
        return lambda: token_scores(*tensors, softmax_scale=scale, plan=plan)

    def unsupported(case: Case, device: torch.device) -> str | None:
        sizes = case.sizes
        lens = {"query_lens": [sizes["window"]], "key_lens": sizes["context_lens"]}
        return interpreted_tiles_refusal(implementation, device, heads=sizes["num_heads"], **lens)

    return Kernel(name=f"token_scores[{implementation}]", contract=_contract, bind=bind, unsupported=unsupported)


def _fused() -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        plan, score_plan = _plans(arguments, "auto", "auto")
        tensors, scale = [arguments[name] for name in TENSORS], arguments["softmax_scale"]

        def run() -> torch.Tensor:
            scores = torch.empty(score_plan.score_shape, dtype=score_plan.score_dtype, device=plan.device)
            mla_prefill(*tensors, softmax_scale=scale, plan=plan, scores=scores, score_plan=score_plan)
            return scores

        return run

    def contract(case: Case) -> Contract:
        # the denominator may be the log-sum-exp of cuDNN, which now and then differs
        return _contract(case).promising(deterministic=case.sizes["mode"] == "logits")

    return Kernel(name="token_scores[prefill]", contract=contract, bind=bind)


def _contract(case: Case) -> Contract:
    return OPERATION.default_contract(case).promising(capturable=True)


OPERATION = TokenScores()
