"""Adapters of libraries for the gated delta rule, against stand-ins that answer as the libraries do.

The parameters of the stand-ins are those of the libraries' own sources: fla-core 0.6.0, tokenspeed-flashkda
0.0.1.post20260901.
"""

from typing import Any

import pytest
import torch
from kda_bounds import TOKENS, shape_of
from kda_inputs import kda_inputs
from library_stand_ins import hide, install, pretend_gpu
from torch import Tensor

from assay.optimized import _kda_plan
from assay.optimized.external import fla, flashkda
from assay.optimized.kda import kda, plan_kda, plan_kda_batch
from assay.reference.kda import kda as oracle

MODEL: dict[str, Any] = {"heads": (2, 2), "dims": (128, 128), "dtype": torch.bfloat16, "tail": 2}


class Library:
    """Answers by the oracle in float64, rounded, in the conventions of the libraries; keeps what it was called with."""

    def __init__(self) -> None:
        self.keywords: dict[str, Any] = {}

    def answer(self, tensors: list[Tensor], state: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        assert all(x.is_contiguous() and len(x) == 1 for x in tensors)
        wide: dict[str, Any] = {
            key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in options.items()
        }
        initial = None if state is None else state.double()
        out, final, _ = oracle(*(x[0].double() for x in tensors), initial_state=initial, **wide)
        return out[None].to(tensors[0].dtype), final

    def chunk_kda(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        use_gate_in_kernel: bool = False,
        use_beta_sigmoid_in_kernel: bool = False,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        disable_recompute: bool = False,
        return_intermediate_states: bool = False,
        state_v_first: bool = False,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
        cp_context: object = None,
        use_graph: bool = False,
        max_num_seqs: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        assert cu_seqlens is not None
        assert scale is not None
        assert initial_state is None or initial_state.dtype == torch.float32
        self.keywords = {"state_v_first": state_v_first, "safe_gate": safe_gate, "cu_seqlens": cu_seqlens, **kwargs}
        gate = ("bounded" if safe_gate else "softplus") if use_gate_in_kernel else "log"
        bias = kwargs.get("dt_bias")
        out, state = self.answer(
            [q, k, v, g, beta],
            initial_state,
            scale=scale,
            cu_seqlens=cu_seqlens,
            gate=gate,
            A_log=kwargs.get("A_log"),
            dt_bias=None if bias is None else bias.view(v.shape[2], -1),
            lower_bound=lower_bound,
            beta_is_logits=use_beta_sigmoid_in_kernel,
            qk_l2norm=use_qk_l2norm_in_kernel,
        )
        return out, state.float() if output_final_state else None

    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float,
        out: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float,
        initial_state: Tensor | None = None,
        final_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        assert cu_seqlens is not None
        assert cu_seqlens.dtype == torch.int64
        assert out.is_contiguous()
        assert final_state is not None
        assert final_state.is_contiguous()
        assert initial_state is None or initial_state.data_ptr() != final_state.data_ptr()
        self.keywords = {"out": out, "A_log": A_log, "dt_bias": dt_bias}
        answer, state = self.answer(
            [q, k, v, g, beta],
            None if initial_state is None else initial_state.transpose(2, 3),
            scale=scale,
            cu_seqlens=cu_seqlens,
            A_log=A_log,
            dt_bias=dt_bias,
            lower_bound=lower_bound,
        )
        out.copy_(answer)
        final_state.copy_(state.transpose(2, 3))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    install(monkeypatch, "fla.ops.kda", chunk_kda=made.chunk_kda)
    install(monkeypatch, "flash_kda", fwd=made.fwd)
    # on the CPU their own refusal would not let them
    for module in (fla, flashkda):
        monkeypatch.setattr(module, "refusal", lambda shape: None)
    return made


def call(given: dict[str, Any], name: str, layout: str = "KV", **options: Any) -> tuple[Tensor, Tensor]:
    plan = plan_kda(shape_of(given, state_layout=layout), max_tokens=60, max_sequences=4, implementation=name)
    assert plan.workspace_bytes == 0
    batch = plan_kda_batch(given["cu_seqlens"], plan=plan)
    named: dict[str, Any] = {key: given.get(key) for key in ("A_log", "dt_bias", "initial_state")} | options
    return kda(*(given[key] for key in TOKENS), scale=given["scale"], batch=batch, **named)[:2]


def check(given: dict[str, Any], out: Tensor, final: Tensor) -> None:
    """The answer of the stand-in, rounded once."""
    wide: dict[str, Any] = {
        key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in given.items()
    }
    expected, state, _ = oracle(**wide)
    assert torch.equal(out, expected.to(out.dtype))
    assert torch.equal(final, state.to(final.dtype))


@pytest.mark.parametrize("gate", ["bounded", "softplus", "log"])
def test_fla(library: Library, gate: str) -> None:
    given = kda_inputs([3, 0, 5], gate=gate, **MODEL)
    check(given, *call(given, "fla"))
    # value columns first, it would call another library
    assert library.keywords["state_v_first"] is False
    assert library.keywords["safe_gate"] == (gate == "bounded")
    assert library.keywords["cu_seqlens"].tolist() == [0, 3, 3, 8]
    state = given["initial_state"].mT.contiguous()
    out, final = call(given, "fla", "VK", initial_state=state, final_state=state)
    check(given, out, final.mT)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_flashkda(library: Library, state_dtype: torch.dtype) -> None:
    given = kda_inputs([3, 0, 5], state_dtype=state_dtype, **MODEL)
    check(given, *call(given, "flashkda"))
    buffer = torch.full((10, 2, 128), torch.nan, dtype=torch.bfloat16)
    state = given["initial_state"].mT.contiguous()
    out, final = call(given, "flashkda", "VK", initial_state=state, final_state=state, out=buffer)
    check(given, out, final.mT)
    assert library.keywords["out"].data_ptr() == buffer.data_ptr()
    wide = torch.full((10, 2, 200), torch.nan, dtype=torch.bfloat16)
    out, final = call(given, "flashkda", out=wide[..., 8:136])
    check(given, out, final)
    assert wide[..., 136:].isnan().all()


def test_layers_without_parameters_or_tokens(library: Library) -> None:
    given = kda_inputs([4], **MODEL)
    given |= {"A_log": None, "dt_bias": None}
    check(given, *call(given, "flashkda"))
    check(given, *call(given, "fla"))
    given = kda_inputs([0, 0], **MODEL)
    library.keywords = {}
    for name in ("fla", "flashkda"):
        out, final = call(given, name)
        assert torch.equal(final, given["initial_state"])
        assert not out.any()
        assert not call(given, name, initial_state=None)[1].any()
    assert library.keywords == {}


def test_what_libraries_do_not_serve(library: Library) -> None:
    given = kda_inputs([4], **MODEL)
    with pytest.raises(
        NotImplementedError, match="'flashkda' does not serve these tensors; g and beta must be bfloat16"
    ):
        call(given | {"g": given["g"].float()}, "flashkda")
    plan = plan_kda(shape_of(given), max_tokens=9, max_sequences=4, max_checkpoints=1, implementation="fla")
    with pytest.raises(NotImplementedError, match="implementation 'fla' keeps no states on the way"):
        plan_kda_batch(given["cu_seqlens"], plan=plan, checkpoints=torch.tensor([[0, 1]]))


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpu(monkeypatch)
    hide(monkeypatch, "fla.ops.kda", "fla", "flash_kda")
    shape = shape_of(kda_inputs([4], **MODEL) | {"q": torch.zeros(1, 2, 128, dtype=torch.bfloat16)})
    on_gpu = shape_of(kda_inputs([4], **MODEL), device=torch.device("cuda", 0))
    assert "needs a CUDA device" in str(_kda_plan.refusal("fla", shape))
    assert "flash-linear-attention is not importable" in str(_kda_plan.refusal("fla", on_gpu))
    assert "FlashKDA is not importable" in str(_kda_plan.refusal("flashkda", on_gpu))
    grouped = shape_of(kda_inputs([4], **MODEL | {"heads": (1, 2)}), device=torch.device("cuda", 0))
    assert "as many key heads as value heads, got 1 and 2" in str(_kda_plan.refusal("flashkda", grouped))
