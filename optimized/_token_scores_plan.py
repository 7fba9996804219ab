"""The host's part of token scores: every value check, the passes, and which implementation will make them.

Part of ``optimized/token_scores.py``; call it from there.
"""

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, cast

import torch
from torch import Tensor

from ._mla_prefill_plan import MlaPrefillPlan
from ._token_scores_spans import Observation, Span, expanded_spans, latent_spans, observed_rows

Mode = Literal["logits", "probability"]

# what a token scores that no observed query may look at
IDENTITIES: dict[Mode, float] = {"logits": float("-inf"), "probability": 0.0}
_MODULES = {"torch": "._token_scores_torch", "triton": "._token_scores_triton"}
IMPLEMENTATIONS = tuple(_MODULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorePass:
    """The spans over the keys that are at hand at one time, and what the implementation prepared for them."""

    spans: tuple[Span, ...]
    prepared: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScoresPlan:
    """What scoring does in one step; for any layer of the step that wants scores.

    Attributes:
        prefill: The step.
        mode: ``logits`` or ``probability``.
        full: Whether every token up to a query is a candidate, so that the log-sum-exp of attention is the denominator.
        implementation: ``torch`` or ``triton``.
        choice: Its name, or for ``auto`` what was taken and why an earlier one was refused.
        passes: Under ``logits`` over the expanded keys of the current tokens, then of each history chunk; under
            ``probability`` the one pass over the cache, whose keys are ``prefill.slots``.
        observed_rows: ``[w]``, rows of ``q`` of all observed queries, under ``probability``; None else.
        workspace_bytes: Peak of tensors that scoring holds beside its inputs, the score buffer and the prefill's own:
            of the kernels; the torch twin holds float32 copies beside.
    """

    prefill: MlaPrefillPlan
    mode: Mode
    full: bool
    implementation: str
    choice: str
    passes: tuple[ScorePass, ...]
    observed_rows: Tensor | None
    workspace_bytes: int

    @property
    def score_shape(self) -> tuple[int, int]:
        """``(N, max_context)``."""
        return len(self.prefill.context_lens), self.prefill.max_context

    @property
    def score_dtype(self) -> torch.dtype:
        """float32, or float64 for a float64 step."""
        return self.prefill.accumulator_dtype

    @property
    def module(self) -> ModuleType:
        """The functions of the implementation."""
        return find_implementation(self.implementation)


def plan_token_scores(
    plan: MlaPrefillPlan,
    *,
    mode: Mode,
    query_ranges: Tensor,
    candidate_start: int = 0,
    recent_keep_tokens: int = 0,
    candidate_ranges: Tensor | None = None,
    implementation: str = "auto",
) -> TokenScoresPlan:
    """Check what is to be observed and scored in a step, and lay out the passes; made once and passed to every layer.

    Reads the ranges back to the host, so it synchronises; scoring does not.

    Args:
        plan: Of the step.
        mode: ``logits`` or ``probability``.
        query_ranges: ``[N, 2]``, int32 or int64, half-open ranges of positions among the current tokens of each
            request; ``(0, 0)`` for none.
        candidate_start: Tokens at the start of each request that are no candidates, such as attention sinks.
        recent_keep_tokens: Tokens at its end that are none.
        candidate_ranges: ``[N, 2]``, half-open ranges of positions instead of the last two, one a request.
        implementation: ``torch``, ``triton``, or ``auto``: on a CUDA device ``triton`` if it serves, else ``torch``.

    Returns:
        The plan.

    Raises:
        ValueError: If the mode or the implementation is unknown, or a range is out of place.
        TypeError: If an argument has the wrong type or dtype.
        NotImplementedError: If the named implementation does not serve the step.
    """
    if mode not in IDENTITIES:
        raise ValueError(f"mode must be one of {', '.join(IDENTITIES)}, got {mode!r}")
    observations = _observations(plan, query_ranges, candidate_start, recent_keep_tokens, candidate_ranges)
    name, choice = _resolve(implementation, plan)
    module = find_implementation(name)
    latent = mode == "probability"
    spans = [latent_spans(plan, observations)] if latent else expanded_spans(plan, observations)
    passes = tuple(ScorePass(spans=part, prepared=module.prepare(part, plan) if part else None) for part in spans)
    scratch = sum(module.scratch_bytes(part.prepared) for part in passes if part.spans)
    return TokenScoresPlan(
        prefill=plan,
        mode=mode,
        full=candidate_ranges is None and candidate_start == 0 and recent_keep_tokens == 0,
        implementation=name,
        choice=choice,
        passes=passes,
        observed_rows=observed_rows(plan, observations) if latent else None,
        workspace_bytes=_query_bytes(plan, observations) + scratch if latent else 0,
    )


def observation_ranges(plan: MlaPrefillPlan, *, window: int, prompt_lens: Tensor) -> Tensor:
    """The part of each prompt's observation window, its last ``window`` tokens, that lies among the current tokens.

    A prompt that ends in a later step may have none of its window here, or, where the window spans two steps, a part.

    Args:
        plan: Of the step.
        window: Tokens at the end of each prompt; at most the shortest prompt.
        prompt_lens: ``[N]``, int32 or int64, tokens of each whole prompt, at least its context in this step.

    Returns:
        ``[N, 2]``, int64, on the CPU: ``query_ranges`` of ``plan_token_scores``.

    Raises:
        ValueError: If the window is not positive or longer than a prompt, or a prompt is shorter than its context.
        TypeError: If an argument has the wrong type or dtype.
    """
    _check_count("window", window, least=1)
    _check_indices("prompt_lens", prompt_lens, (len(plan.context_lens),))
    ranges = []
    steps = zip(prompt_lens.tolist(), plan.context_lens, plan.current.query_lens, strict=True)
    for request, (prompt, context, count) in enumerate(steps):
        if prompt < context:
            raise ValueError(f"prompt_lens must be at least the context {context}, got {prompt} at request {request}")
        if window > prompt:
            raise ValueError(f"window must be at most the prompt of {prompt} tokens at request {request}, got {window}")
        start = max(prompt - window, context - count)
        ranges.append([start, context] if start < context else [0, 0])
    return torch.tensor(ranges, dtype=torch.int64)


def find_implementation(name: str) -> ModuleType:
    """The module of an implementation, imported when it is first asked for.

    Raises:
        ValueError: If there is no such implementation.
    """
    if name not in _MODULES:
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return importlib.import_module(_MODULES[name], __package__)


def _resolve(name: str, plan: MlaPrefillPlan) -> tuple[str, str]:
    """The implementation that will serve, and the account of the choice."""
    if name != "auto":
        reason = _refusal(name, plan)
        if reason is not None:
            raise NotImplementedError(f"implementation {name!r} cannot score this step; {reason}")
        return name, name
    if plan.device.type != "cuda":
        return "torch", "auto took torch"
    reason = _refusal("triton", plan)
    return ("triton", "auto took triton") if reason is None else ("torch", f"auto took torch; triton refused: {reason}")


def _refusal(name: str, plan: MlaPrefillPlan) -> str | None:
    """Why an implementation cannot serve a step, or None."""
    try:
        return cast("str | None", find_implementation(name).refusal(plan))
    except ModuleNotFoundError as error:
        # triton has no wheel outside Linux
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        return f"{error.name} is not installed"


def _observations(
    plan: MlaPrefillPlan,
    query_ranges: Tensor,
    candidate_start: int,
    recent_keep_tokens: int,
    candidate_ranges: Tensor | None,
) -> list[Observation]:
    """What each request has observed, checked."""
    windows = _windows(plan, query_ranges)
    candidates = _candidates(plan, candidate_start, recent_keep_tokens, candidate_ranges)
    return [
        Observation(request=request, window=window, candidates=those)
        for request, (window, those) in enumerate(zip(windows, candidates, strict=True))
    ]


def _windows(plan: MlaPrefillPlan, query_ranges: Tensor) -> list[tuple[int, int]]:
    """The observed range of each request."""
    _check_indices("query_ranges", query_ranges, (len(plan.context_lens), 2))
    windows = [(start, stop) for start, stop in query_ranges.tolist()]
    for request, (start, stop) in enumerate(windows):
        context = plan.context_lens[request]
        cached = context - plan.current.query_lens[request]
        if (start, stop) != (0, 0) and not cached <= start < stop <= context:
            raise ValueError(
                f"query_ranges must be (0, 0) or a range of the current tokens {cached} .. {context - 1}, got "
                f"({start}, {stop}) at request {request}"
            )
    return windows


def _candidates(
    plan: MlaPrefillPlan, candidate_start: int, recent_keep_tokens: int, candidate_ranges: Tensor | None
) -> list[tuple[int, int]]:
    """The candidates of each request."""
    _check_count("candidate_start", candidate_start, least=0)
    _check_count("recent_keep_tokens", recent_keep_tokens, least=0)
    if candidate_ranges is None:
        return [(candidate_start, max(candidate_start, context - recent_keep_tokens)) for context in plan.context_lens]
    if candidate_start or recent_keep_tokens:
        raise ValueError(
            f"candidate_ranges must come without candidate_start and recent_keep_tokens, got {candidate_start} and "
            f"{recent_keep_tokens}"
        )
    _check_indices("candidate_ranges", candidate_ranges, (len(plan.context_lens), 2))
    candidates = [(start, stop) for start, stop in candidate_ranges.tolist()]
    for request, (start, stop) in enumerate(candidates):
        if not 0 <= start <= stop <= plan.context_lens[request]:
            raise ValueError(
                f"candidate_ranges must be ranges within the {plan.context_lens[request]} tokens of the context, got "
                f"({start}, {stop}) at request {request}"
            )
    return candidates


def _query_bytes(plan: MlaPrefillPlan, observations: list[Observation]) -> int:
    """The observed queries, their absorbed form, and their log-sum-exp."""
    shape, rows = plan.shape, plan.shape.num_heads * sum(seen.num_queries for seen in observations)
    width = shape.d_nope + shape.d_rope + shape.kv_lora_rank
    return rows * (width * plan.dtype.itemsize + plan.accumulator_dtype.itemsize)


def _check_count(name: str, value: int, *, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_indices(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
