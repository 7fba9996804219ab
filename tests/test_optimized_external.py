"""The adapters of external attention libraries, against stand-ins that answer as the libraries do.

The parameters of the stand-ins are those of the libraries' own sources: flash-attn-4 4.0.0b36, and flashinfer-python
0.6.13 and 0.6.18.post1, which agree in them.
"""

import math
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_inputs import INF, State, by_oracle
from library_stand_ins import (
    answer,
    attend_by,
    case,
    check_nothing,
    check_state,
    hide,
    install,
    never_called,
    nothing,
    pretend_gpu,
)
from torch import Tensor

from assay.optimized.attention import AttentionPlan
from assay.optimized.external import fa3, fa4, flashinfer

ADAPTERS: dict[str, Any] = {"fa3": fa3, "fa4": fa4, "flashinfer": flashinfer}

FA4_PARAMETERS = (
    "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k gather_kv_indices "
    "page_table softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod "
    "score_mod_bwd mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata "
    "seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p gather_bwd_token_chunk"
).split()
FLASHINFER_PLAN_PARAMETERS = (
    "qo_indptr kv_indptr num_qo_heads num_kv_heads head_dim_qk head_dim_vo custom_mask packed_custom_mask causal "
    "pos_encoding_mode use_fp16_qk_reduction window_left logits_soft_cap sm_scale rope_scale rope_theta q_data_type "
    "kv_data_type o_data_type non_blocking prefix_len_ptr token_pos_in_items_ptr token_pos_in_items_len "
    "max_item_len_ptr fixed_split_size disable_split_kv"
).split()


class Library:
    """Answers by the oracle in a library's convention, and keeps what it was called with."""

    def __init__(self, plan: AttentionPlan, *, base: float, heads_first: bool, empty_lse: float) -> None:
        self.plan, self.convention = plan, {"base": base, "heads_first": heads_first, "empty_lse": empty_lse}
        self.keywords: dict[str, Any] = {}

    def answer(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> State:
        return answer((q, k, v), self.plan, scale, **self.convention)  # type: ignore[arg-type]

    def flash_attn_varlen_func(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> State:
        self.keywords = keywords
        return self.answer(q, k, v, keywords["softmax_scale"])

    def flash_attention_4(self, *args: Tensor, **keywords: Any) -> State:
        self.keywords = named(FA4_PARAMETERS, args, keywords)
        state = self.flash_attn_varlen_func(**self.keywords)
        # without the request there is a None in its place
        return state if self.keywords.get("return_lse") else (state[0], None)  # type: ignore[return-value]

    def wrapper(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> types.SimpleNamespace:
        assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")

        def plan(*args: Any, **keywords: Any) -> None:
            self.keywords = named(FLASHINFER_PLAN_PARAMETERS, args, keywords)

        def forward_return_lse(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            causal: bool = False,
            pos_encoding_mode: str = "NONE",
            use_fp16_qk_reduction: bool = False,
            window_left: int = -1,
            logits_soft_cap: float | None = None,
            sm_scale: float | None = None,
            rope_scale: float | None = None,
            rope_theta: float | None = None,
        ) -> State:
            # each of these replaces what was planned
            assert (causal, window_left, logits_soft_cap) == (self.plan.causal, -1, None)
            assert sm_scale is not None
            return self.answer(q, k, v, sm_scale)

        return types.SimpleNamespace(plan=plan, forward_return_lse=forward_return_lse)


def named(parameters: list[str], args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names that a library gives them; a name that it does not know is an error, as there."""
    assert set(keywords) <= set(parameters[len(args) :])
    return dict(zip(parameters, args, strict=False)) | keywords


@pytest.mark.parametrize("empty_lse", [INF, -INF, -49993.98, float("nan")])
@pytest.mark.parametrize("home", ["flash_attn_interface", "vllm.vllm_flash_attn"])
def test_fa3(monkeypatch: pytest.MonkeyPatch, home: str, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=empty_lse)
    hide(monkeypatch, "flash_attn_interface", "vllm")
    install(monkeypatch, home, flash_attn_varlen_func=library.flash_attn_varlen_func)
    check_state(attend_by("fa3", inputs, plan), inputs, plan)
    asks_for_lse = {"return_softmax_lse": True, "fa_version": 3} if "vllm" in home else {"return_attn_probs": True}
    assert library.keywords.items() >= {"max_seqlen_q": 5, "max_seqlen_k": 4, "causal": True, **asks_for_lse}.items()
    assert library.keywords["cu_seqlens_q"].tolist() == [0, 5, 8, 8, 10]
    assert library.keywords["cu_seqlens_k"].tolist() == [0, 2, 2, 5, 9]


@pytest.mark.parametrize("empty_lse", [INF, -INF])
def test_fa4(monkeypatch: pytest.MonkeyPatch, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=math.e, heads_first=True, empty_lse=empty_lse)
    install(monkeypatch, "flash_attn.cute", flash_attn_varlen_func=library.flash_attention_4)
    check_state(attend_by("fa4", inputs, plan), inputs, plan)
    assert library.keywords.items() >= {"max_seqlen_q": 5, "max_seqlen_k": 4, "causal": True}.items()
    assert library.keywords["cu_seqlens_k"].dtype == torch.int32


@pytest.mark.parametrize("empty_lse", [-5e4, -5e4 * math.log2(math.e), -INF])
def test_flashinfer(monkeypatch: pytest.MonkeyPatch, empty_lse: float) -> None:
    inputs, plan = case()
    library = Library(plan, base=2.0, heads_first=False, empty_lse=empty_lse)
    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=library.wrapper)
    check_state(attend_by("flashinfer", inputs, plan), inputs, plan)
    assert library.keywords.pop("qo_indptr").tolist() == [0, 5, 8, 8, 10]
    assert library.keywords.pop("kv_indptr").tolist() == [0, 2, 2, 5, 9]
    assert library.keywords == {
        "num_qo_heads": 4,
        "num_kv_heads": 2,
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "causal": True,
        "q_data_type": torch.float16,
    }


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
    shifted = torch.zeros(9, 2, 65, dtype=torch.float16)[..., 1:]
    with pytest.raises(NotImplementedError, match="v must start at a multiple of 16 bytes"):
        attend_by(adapter, (q, k, shifted), plan)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_library_that_is_broken_says_how(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    hide(monkeypatch, "vllm")
    for home in ("flash_attn_interface", "flash_attn.cute", "flashinfer"):
        # an older release, without what is asked for
        install(monkeypatch, home)
    pretend_gpu(monkeypatch)
    shape = replace(case()[1].shape, device=torch.device("cuda:0"))
    assert "AttributeError: module" in str(ADAPTERS[adapter].refusal(shape, False, (3,), (5,)))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("tokens", [(3, 0), (0, 3), (0, 0)])
def test_a_library_is_not_called_for_nothing(
    monkeypatch: pytest.MonkeyPatch, adapter: str, tokens: tuple[int, int]
) -> None:
    for home in ("flash_attn_interface", "flash_attn.cute"):
        install(monkeypatch, home, flash_attn_varlen_func=never_called)
    install(monkeypatch, "flashinfer", BatchPrefillWithRaggedKVCacheWrapper=never_called)
    inputs, plan = nothing(tokens)
    check_nothing(attend_by(adapter, inputs, plan), tokens[0])


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
    pretend_gpu(monkeypatch, capability)
    for home in ("flash_attn_interface", "flash_attn.cute", "flashinfer"):
        install(monkeypatch, home, flash_attn_varlen_func=None, BatchPrefillWithRaggedKVCacheWrapper=None)
    shape = replace(case()[1].shape, device=torch.device("cuda:0"), head_dim_qk=dims[0], head_dim_v=dims[1])
    refusal = ADAPTERS[adapter].refusal(shape, False, (3,), (5,))
    assert refusal is None if reason is None else reason in str(refusal)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_only_16_bit_inputs_are_served(monkeypatch: pytest.MonkeyPatch, adapter: str) -> None:
    pretend_gpu(monkeypatch)
    shape = replace(case()[1].shape, device=torch.device("cuda:0"), dtype=torch.float32)
    refusal = ADAPTERS[adapter].refusal(shape, False, (3,), (5,))
    assert "serves bfloat16 and float16, got torch.float32" in str(refusal)
