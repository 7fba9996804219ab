"""Stand-ins for libraries that are not installed, and what their adapters must make of the answers."""

import math
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import INF, Inputs, State, by_oracle, make_inputs, make_plan
from torch import Tensor

from assay.optimized.attention import AttentionPlan, attention, find_provider

# rows before the first key, a request without keys, one without queries
LENGTHS = (5, 3, 0, 2), (2, 0, 3, 4)


def case(dims: tuple[int, int] = (64, 64), *, causal: bool = True) -> tuple[Inputs, AttentionPlan]:
    """A batch in float16, with a plan of the provider ``torch``."""
    inputs = make_inputs(sum(LENGTHS[0]), sum(LENGTHS[1]), heads=(4, 2), dims=dims, dtype=torch.float16)
    return inputs, make_plan(*LENGTHS, inputs, causal=causal)


def install(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Put a module and its parents in place of whatever is installed."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), types.ModuleType(".".join(parts[:depth])))
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make an import fail, installed or not."""
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
    """Let torch report a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)


def attend_by(adapter: str, inputs: Inputs, plan: AttentionPlan, scale: float = 0.3) -> State:
    """Plan and call an adapter on the CPU, where its own refusal would not let it."""
    plan = replace(plan, provider=find_provider(adapter))
    assert plan.provider.prepare is not None
    return attention(*inputs, softmax_scale=scale, plan=replace(plan, prepared=plan.provider.prepare(plan)))


def answer(
    inputs: Inputs, plan: AttentionPlan, scale: float, *, base: float, heads_first: bool, empty_lse: float
) -> State:
    """By the oracle, in a library's convention; rows without keys hold NaN and ``empty_lse``."""
    out, lse = by_oracle(inputs, plan, scale)
    out[lse == -INF] = float("nan")
    lse = torch.where(lse == -INF, empty_lse, lse / math.log(base)).float()
    return out.to(inputs[0].dtype), lse.t().contiguous() if heads_first else lse


def check_state(state: State, inputs: Inputs, plan: AttentionPlan, scale: float = 0.3) -> None:
    """The oracle's answer, rounded once, with ``(0, -inf)`` in rows without keys."""
    out, lse = state
    expected, expected_lse = by_oracle(inputs, plan, scale)
    assert out.dtype == inputs[0].dtype
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    empty = expected_lse == -INF
    assert empty.any()
    assert torch.equal(lse == -INF, empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], rtol=2.0**-22, atol=2.0**-22)
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-10, atol=2.0**-24)


def nothing(tokens: tuple[int, int]) -> tuple[Inputs, AttentionPlan]:
    """A batch of one request with these numbers of queries and of keys, one of which is 0."""
    inputs = make_inputs(*tokens, heads=(4, 2), dims=(64, 64), dtype=torch.float16)
    return inputs, make_plan((tokens[0],), (tokens[1],), inputs)


def check_nothing(state: State, queries: int) -> None:
    """``(0, -inf)`` throughout."""
    assert torch.equal(state[0], torch.zeros(queries, 4, 64, dtype=torch.float16))
    assert torch.equal(state[1], torch.full((queries, 4), -INF))


def never_called(*args: Tensor, **keywords: Any) -> Any:
    raise AssertionError("the library was called")
