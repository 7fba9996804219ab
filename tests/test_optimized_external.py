"""The adapters of external attention libraries, against stand-ins that answer as the libraries do."""

import math
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import Inputs, by_oracle, make_inputs, make_plan
from torch import Tensor

from assay.optimized.attention import AttentionPlan, attention, find_provider
from assay.optimized.external import fa3, fa4, flashinfer

INF = float("inf")
LENGTHS = (5, 3, 2), (2, 0, 4)
ADAPTERS: dict[str, Any] = {"fa3": fa3, "fa4": fa4, "flashinfer": flashinfer}


class Library:
    """Answers by the oracle in a library's convention, and keeps what it was called with."""

    def __init__(self, plan: AttentionPlan, *, base: float, heads_first: bool, empty_lse: float) -> None:
        self.plan, self.base, self.heads_first, self.empty_lse = plan, base, heads_first, empty_lse
        self.keywords: dict[str, Any] = {}
        self.planned: tuple[Any, ...] = ()

    def answer(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = by_oracle((q, k, v), self.plan, scale)
        # rows without keys hold what the library leaves there
        out[lse == -INF] = float("nan")
        lse = torch.where(lse == -INF, self.empty_lse, lse / math.log(self.base)).float()
        return out.to(q.dtype), lse.t().contiguous() if self.heads_first else lse

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> tuple[Tensor, Tensor]:
        self.keywords = keywords
        return self.answer(q, k, v, keywords["softmax_scale"])

    def wrapper(self, workspace: Tensor, layout: str) -> types.SimpleNamespace:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")

        def plan(*args: Any, **keywords: Any) -> None:
            self.planned, self.keywords = args, keywords

        def forward_return_lse(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Any:
            assert causal == self.plan.causal
            return self.answer(q, k, v, sm_scale)

        return types.SimpleNamespace(plan=plan, forward_return_lse=forward_return_lse)


def case(dtype: torch.dtype = torch.float16) -> tuple[Inputs, AttentionPlan]:
    """A causal batch with rows before the first key and a request without keys."""
    inputs = make_inputs(sum(LENGTHS[0]), sum(LENGTHS[1]), heads=(4, 2), dims=(64, 64), dtype=dtype)
    return inputs, make_plan(*LENGTHS, inputs, causal=True)


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


def attend_by(adapter: str, inputs: Inputs, plan: AttentionPlan, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    """Plan and call an adapter on the CPU, where its own refusal would not let it."""
    plan = replace(plan, provider=find_provider(adapter))
    assert plan.provider.prepare is not None
    return attention(*inputs, softmax_scale=scale, plan=replace(plan, prepared=plan.provider.prepare(plan)))


def check(state: tuple[Tensor, Tensor], inputs: Inputs, plan: AttentionPlan) -> None:
    out, lse = state
    expected, expected_lse = by_oracle(inputs, plan, 0.3)
    assert lse.shape == expected_lse.shape
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    empty = expected_lse == -INF
    assert empty.any()
    assert torch.equal(lse == -INF, empty)
    assert torch.equal(out[empty], torch.zeros_like(out[empty]))
    torch.testing.assert_close(lse[~empty].double(), expected_lse[~empty], rtol=2.0**-22, atol=2.0**-22)
    torch.testing.assert_close(out.double(), expected, rtol=2.0**-10, atol=2.0**-24)


@pytest.mark.parametrize("empty_lse", [INF, -INF, -49993.98, float("nan")])
@pytest.mark.parametrize("home", ["flash_attn_interface", "vllm.vllm_flash_attn"])
def test_fa3(monkeypatch: pytest.MonkeyPatch, home: str, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=empty_lse)
    hide(monkeypatch, "flash_attn_interface", "vllm")
    install(monkeypatch, home, flash_attn_varlen_func=library.flash_attn_varlen_func)
    check(attend_by("fa3", inputs, plan), inputs, plan)
    asks_for_lse = {"return_softmax_lse": True, "fa_version": 3} if "vllm" in home else {"return_attn_probs": True}
    assert library.keywords.items() >= {"max_seqlen_q": 5, "max_seqlen_k": 4, "causal": True, **asks_for_lse}.items()
    assert library.keywords["cu_seqlens_q"].tolist() == [0, 5, 8, 10]
    assert library.keywords["cu_seqlens_k"].tolist() == [0, 2, 2, 6]


@pytest.mark.parametrize("empty_lse", [INF, -INF])
def test_fa4(monkeypatch: pytest.MonkeyPatch, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=empty_lse)
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=library.flash_attn_varlen_func)
    check(attend_by("fa4", inputs, plan), inputs, plan)
    assert (
        library.keywords.items() >= {"max_seqlen_q": 5, "max_seqlen_k": 4, "causal": True, "return_lse": True}.items()
    )


@pytest.mark.parametrize("empty_lse", [-5e4, -5e4 * math.log2(math.e), -INF])
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=2.0, heads_first=False, empty_lse=empty_lse)
    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=library.wrapper)
    check(attend_by("flashinfer", inputs, plan), inputs, plan)
    assert library.planned[2:] == (4, 2, 64)
    assert library.planned[0].tolist() == [0, 5, 8, 10]
    assert library.keywords == {"head_dim_vo": 64, "causal": True, "q_data_type": torch.float16}


def test_a_wrong_infinity_in_a_row_with_keys_stays_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=INF)

    def broken(**keywords: Any) -> tuple[Tensor, Tensor]:
        out, lse = library.flash_attn_varlen_func(**keywords)
        return out, torch.full_like(lse, INF)

    hide(monkeypatch, "vllm")
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=broken)
    _, lse = attend_by("fa3", inputs, plan)
    assert torch.equal(lse == INF, by_oracle(inputs, plan, 0.3)[1] != -INF)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    hide(monkeypatch, "flash_attn_interface", "vllm", "flash_attn", "flashinfer")
    inputs, plan = case()
    with pytest.raises(NotImplementedError, match=r"is not importable \("):
        attend_by(adapter, inputs, plan)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_the_libraries_would_compute_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    q_inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=INF)
    for home in ("flash_attn_interface", "flash_attn.cute"):
        install(monkeypatch, home, flash_attn_varlen_func=library.flash_attn_varlen_func)
    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=library.wrapper)
    q, k, v = q_inputs
    for scale in (0.0, -0.3):
        with pytest.raises(NotImplementedError, match="needs a positive softmax_scale"):
            attend_by(adapter, (q, k, v), plan, scale)
    shifted = torch.zeros(6, 2, 65, dtype=torch.float16)[..., 1:]
    with pytest.raises(NotImplementedError, match="v must start at a multiple of 16 bytes"):
        attend_by(adapter, (q, k, shifted), plan)


def test_a_plan_of_another_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plan = case()
    install(
        monkeypatch, "flash_attn.cute", flash_attn_varlen_func=lambda *args, **keywords: (inputs[0], inputs[0][..., 0])
    )
    with pytest.raises(TypeError, match="must be of this provider, got NoneType"):
        fa4.attend(*inputs, 0.3, plan)


@pytest.mark.parametrize(
    ("adapter", "capability", "dims", "reason"),
    [
        ("fa3", (9, 0), (192, 128), None),
        ("fa3", (9, 0), (256, 256), None),
        ("fa3", (9, 0), (64, 512), None),
        ("fa3", (9, 0), (256, 128), "no kernel for head sizes 256 and 128"),
        ("fa3", (9, 0), (68, 68), "no kernel for head sizes 68 and 68"),
        ("fa3", (10, 0), (128, 128), "needs compute capability 9.x, got 10.0"),
        ("fa4", (9, 0), (256, 128), None),
        ("fa4", (10, 0), (192, 128), None),
        ("fa4", (10, 0), (256, 128), "no kernel for head sizes 256 and 128"),
        ("fa4", (8, 0), (128, 128), "needs compute capability 9.x or 10.x or 11.x, got 8.0"),
        ("flashinfer", (9, 0), (192, 128), None),
        ("flashinfer", (9, 0), (96, 96), "no kernel for head sizes 96 and 96"),
    ],
)
def test_what_each_library_serves(
    monkeypatch: pytest.MonkeyPatch,
    adapter: str,
    capability: tuple[int, int],
    dims: tuple[int, int],
    reason: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    for home in ("flash_attn_interface", "flash_attn.cute", "flashinfer"):
        install(monkeypatch, home, flash_attn_varlen_func=None)
    shape = replace(case()[1].shape, device=torch.device("cuda:0"), head_dim_qk=dims[0], head_dim_v=dims[1])
    refusal = ADAPTERS[adapter].refusal(shape, False, (3,), (5,))
    assert refusal is None if reason is None else reason in str(refusal)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_only_16_bit_inputs_are_served(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    shape = replace(case()[1].shape, device=torch.device("cuda:0"), dtype=torch.float32)
    refusal = ADAPTERS[adapter].refusal(shape, False, (3,), (5,))
    assert "serves bfloat16 and float16, got torch.float32" in str(refusal)
