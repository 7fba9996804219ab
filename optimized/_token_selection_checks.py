"""What ``token_selection`` and its scores refuse. Part of ``optimized/token_selection.py``; call it from there."""

import torch
from torch import Tensor


def check_counts(**counts: int) -> None:
    """Refuse numbers of tokens that are no int or negative."""
    for name, value in counts.items():
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def check_kernel_size(kernel_size: int) -> None:
    """Refuse a kernel without a middle."""
    if type(kernel_size) is not int:
        raise TypeError(f"kernel_size must be an int, got {type(kernel_size).__name__} {kernel_size!r}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(
            f"kernel_size must be odd and positive, got {kernel_size}; an even one has no middle, and would give one "
            f"score too many"
        )


def check_weights(weights: Tensor) -> None:
    """Refuse what are not the weights of a window over at least its own keys."""
    if weights.dim() != 3 or not 1 <= weights.shape[1] <= weights.shape[2]:
        raise ValueError(f"weights must have shape [H, w, S] with 1 <= w <= S, got {tuple(weights.shape)}")


def check_same(total: Tensor, step: Tensor) -> None:
    """Refuse a step of another shape than the total."""
    if total.shape != step.shape:
        raise ValueError(f"step must have the shape {tuple(total.shape)} of total, got {tuple(step.shape)}")


def check_rows(scores: Tensor, lens: Tensor, *, name: str = "context_lens") -> None:
    """Refuse scores that are no rows of numbers, and lengths that are not one a row."""
    if scores.dim() != 2:
        raise ValueError(f"scores must have shape [N, S], got {tuple(scores.shape)}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating, got {scores.dtype}")
    if lens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {lens.dtype}")
    if tuple(lens.shape) != (len(scores),):
        raise ValueError(f"{name} must have shape {(len(scores),)}, got {tuple(lens.shape)}")


def check_finite(scores: Tensor, chosen_from: Tensor, *, needed: bool) -> None:
    """Refuse NaN and ``+inf`` among the scores that are looked at; with ``needed``, a row of ``-inf`` alone as well.

    Args:
        scores: ``[N, S]``.
        chosen_from: ``[N, S]``, bool.
        needed: Whether each row that is looked at must hold a finite score.
    """
    bad = chosen_from & ~(scores < float("inf"))
    if bool(bad.any()):
        request, token = bad.nonzero()[0].tolist()
        raise ValueError(
            f"scores must be finite or -inf, got {scores[request, token].item()} for token {token} of row {request}"
        )
    if needed:
        blind = chosen_from.any(1) & ~(chosen_from & scores.isfinite()).any(1)
        if bool(blind.any()):
            raise ValueError(f"scores must hold a finite one in each row, got none in row {int(blind.nonzero()[0])}")


def check_choice(
    scores: Tensor, context_lens: Tensor, budgets: Tensor, sink: int, recent: int
) -> tuple[list[int], int]:
    """Check the numbers of a choice; return the contexts, and the largest budget."""
    check_rows(scores, context_lens)
    check_rows(scores, budgets, name="budgets")
    check_counts(sink=sink, recent=recent)
    contexts, capacities = context_lens.tolist(), budgets.tolist()
    for row, (context, budget) in enumerate(zip(contexts, capacities, strict=True)):
        if context < 0:
            raise ValueError(f"context_lens must be at least 0, got {context} at row {row}")
        if context - recent > scores.shape[1]:
            raise ValueError(
                f"scores must be as wide as the {context - recent} tokens of row {row} before the recent ones, got "
                f"{scores.shape[1]}"
            )
        if budget < sink + recent:
            raise ValueError(
                f"budgets must be at least the {sink} + {recent} tokens that always stay, got {budget} at row {row}"
            )
    return contexts, max(capacities, default=0)
