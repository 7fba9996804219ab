"""The cuDNN front end as a provider, against a stand-in that reads the graph as cuDNN does: by strides and offsets.

The methods and their parameters are those of nvidia-cudnn-frontend 1.32.0, as far as the adapter uses them.
"""

import types
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from attention_inputs import Inputs, make_inputs, make_plan
from library_stand_ins import LENGTHS, attend_by, case, check_nothing, check_state, hide, install, nothing, pretend_gpu
from torch import Tensor

from assay.optimized import attention as optimized
from assay.optimized.attention import attention, find_provider
from assay.optimized.external import cudnn_frontend
from assay.reference import attention as oracle

TYPES = types.SimpleNamespace(BFLOAT16="bfloat16", HALF="float16", FLOAT="float32", INT32="int32", INT64="int64")
ALIGNMENTS = types.SimpleNamespace(TOP_LEFT="top left", BOTTOM_RIGHT="bottom right")
HANDLE, STREAM = "handle", 7


class NotSupportedError(Exception):
    """As ``cudnn.cudnnGraphNotSupportedError``."""


@dataclass(eq=False)
class Symbol:
    """A tensor of a graph: what it will be, not where."""

    dim: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    data_type: str = ""
    ragged_offset: "Symbol | None" = None
    is_output: bool = False

    def set_output(self, value: bool) -> "Symbol":
        self.is_output = value
        return self

    def set_data_type(self, data_type: str) -> "Symbol":
        self.data_type = data_type
        return self

    def set_dim(self, dim: tuple[int, ...]) -> "Symbol":
        self.dim = dim
        return self

    def set_stride(self, stride: tuple[int, ...]) -> "Symbol":
        self.stride = stride
        return self

    def set_ragged_offset(self, ragged_offset: "Symbol") -> "Symbol":
        self.ragged_offset = ragged_offset
        return self

    def request(self, tensors: "dict[Symbol, Tensor]", index: int, tokens: int) -> Tensor:
        """``[tokens, heads, width]`` of one request, read as described, in whatever memory was passed."""
        assert self.ragged_offset is not None
        data, start = tensors[self], tensors[self.ragged_offset][index]
        assert self.data_type == str(data.dtype).removeprefix("torch.")
        _, heads, longest, width = self.dim
        _, head, token, last = self.stride
        assert 0 < tokens <= longest
        return data.as_strided((tokens, heads, width), (token, head, last), data.storage_offset() + int(start))


class Graph:
    """Of one ``sdpa`` node."""

    built: ClassVar["list[Graph]"] = []

    def __init__(self, *, io_data_type: str, intermediate_data_type: str, compute_data_type: str, handle: str) -> None:
        assert (intermediate_data_type, compute_data_type, handle) == ("float32", "float32", HANDLE)
        self.node: dict[str, Any] = {}

    def tensor(
        self,
        dim: tuple[int, ...],
        stride: tuple[int, ...],
        data_type: str,
        ragged_offset: Symbol | None = None,
    ) -> Symbol:
        return Symbol(dim, stride, data_type, ragged_offset)

    def sdpa(
        self,
        q: Symbol,
        k: Symbol,
        v: Symbol,
        *,
        attn_scale: float,
        generate_stats: bool,
        use_padding_mask: bool,
        seq_len_q: Symbol,
        seq_len_kv: Symbol,
        diagonal_alignment: str = "top left",
        diagonal_band_right_bound: int | None = None,
    ) -> list[Symbol]:
        assert generate_stats
        assert use_padding_mask
        self.node = dict(locals()) | {"out": Symbol(), "lse": Symbol()}
        return [self.node["out"], self.node["lse"]]

    def build(self) -> None:
        widths = [self.node[name].dim[3] for name in ("q", "v", "out")]
        if max(widths) > 256:
            raise NotSupportedError("no engine")
        assert self.node["out"].is_output
        assert self.node["lse"].is_output
        Graph.built.append(self)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, tensor_dict: dict[Symbol, Tensor], workspace: Tensor, handle: str) -> None:
        assert (workspace.dtype, handle) == (torch.uint8, HANDLE)
        query_lens, key_lens = (tensor_dict[self.node[name]] for name in ("seq_len_q", "seq_len_kv"))
        assert query_lens.dtype == key_lens.dtype == torch.int32
        causal, bottom = self.node["diagonal_band_right_bound"] == 0, self.node["diagonal_alignment"] == "bottom right"
        for name in ("out", "lse"):
            # what cuDNN does not write is garbage
            tensor_dict[self.node[name]].fill_(float("nan"))
        for index, (n, m) in enumerate(zip(query_lens.tolist(), key_lens.tolist(), strict=True)):
            q, k, v = (self.node[name].request(tensor_dict, index, s) for name, s in (("q", n), ("k", m), ("v", m)))
            last_key = torch.arange(n) + (m - n if bottom else 0) if causal else torch.full((n,), m - 1)
            assert last_key.min() >= 0
            z = oracle.masked_logits(
                q.double(),
                k.double().repeat_interleave(q.shape[1] // k.shape[1], 1),
                last_key,
                softmax_scale=self.node["attn_scale"],
            )
            p = torch.softmax(z, -1)
            out = torch.einsum("ths,shd->thd", p, v.double().repeat_interleave(q.shape[1] // k.shape[1], 1))
            self.node["out"].request(tensor_dict, index, n).copy_(out)
            self.node["lse"].request(tensor_dict, index, n).copy_(torch.logsumexp(z, -1)[..., None])


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Install the stand-in; the streams that its handle was set to."""
    used: list[tuple[str, int]] = []
    install(
        monkeypatch,
        "cudnn",
        pygraph=Graph,
        data_type=TYPES,
        diagonal_alignment=ALIGNMENTS,
        cudnnGraphNotSupportedError=NotSupportedError,
        set_stream=lambda handle, stream: used.append((handle, stream)),
    )
    monkeypatch.setattr(Graph, "built", [])
    monkeypatch.setattr(cudnn_frontend, "_handle", lambda device: HANDLE)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=STREAM))
    return used


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (24, 16)])
def test_values(streams: list[tuple[str, int]], dims: tuple[int, int], causal: bool) -> None:
    inputs, plan = case(dims, causal=causal)
    check_state(attend_by("cudnn_frontend", inputs, plan), inputs, plan)
    assert streams == [(HANDLE, STREAM)]
    # neither the request without keys nor the one without queries
    assert Graph.built[0].node["q"].dim[0] == 2


def test_values_in_the_columns_of_wider_rows(streams: list[tuple[str, int]]) -> None:
    q, k, kv = make_inputs(10, 9, heads=(4, 2), dims=(64, 128), dtype=torch.float16)
    inputs: Inputs = (q, k, kv[..., 64:])
    plan = make_plan(*LENGTHS, inputs, causal=True)
    check_state(attend_by("cudnn_frontend", inputs, plan), inputs, plan)


@pytest.mark.parametrize(
    ("key_lens", "causal", "alignment"),
    [((5, 3), True, "top left"), ((7, 3), True, "bottom right"), ((7, 3), False, None)],
)
def test_the_mask_ends_at_the_last_key(
    streams: list[tuple[str, int]], key_lens: tuple[int, ...], causal: bool, alignment: str | None
) -> None:
    # the last request, without keys, is there for its empty row
    inputs = make_inputs(9, sum(key_lens), heads=(4, 2), dims=(64, 64), dtype=torch.float16)
    plan = make_plan((5, 3, 1), (*key_lens, 0), inputs, causal=causal)
    check_state(attend_by("cudnn_frontend", inputs, plan), inputs, plan)
    node = Graph.built[0].node
    assert (node["diagonal_alignment"] if node["diagonal_band_right_bound"] == 0 else None) == alignment


def test_an_execution_plan_is_made_once_for_each_scale_and_strides(streams: list[tuple[str, int]]) -> None:
    (q, k, v), plan = case()
    provider = find_provider("cudnn_frontend")
    assert provider.prepare is not None
    plan = replace(plan, provider=provider, prepared=provider.prepare(plan))
    wide = torch.zeros(9, 2, 128, dtype=torch.float16)[..., 64:].copy_(v)
    for values, scale, count in ((v, 0.3, 1), (v + 1, 0.3, 1), (v, 0.5, 2), (wide, 0.5, 3), (v, 0.3, 3)):
        state = attention(q, k, values, softmax_scale=scale, plan=plan)
        check_state(state, (q, k, values), plan, scale)
        assert len(Graph.built) == count


def test_offsets_beyond_32_bits_are_wider(streams: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, plan = case()
    check_state(attend_by("cudnn_frontend", inputs, plan), inputs, plan)
    assert Graph.built[0].node["k"].ragged_offset.data_type == "int32"
    # 9 keys of 128 elements end at 1152
    monkeypatch.setattr(torch, "iinfo", lambda dtype: types.SimpleNamespace(max=1151))
    check_state(attend_by("cudnn_frontend", inputs, plan), inputs, plan)
    assert Graph.built[1].node["k"].ragged_offset.data_type == "int64"
    assert Graph.built[1].node["seq_len_kv"].data_type == "int32"


@pytest.mark.parametrize("tokens", [(3, 0), (0, 3), (0, 0)])
def test_the_library_is_not_called_for_nothing(streams: list[tuple[str, int]], tokens: tuple[int, int]) -> None:
    inputs, plan = nothing(tokens)
    check_nothing(attend_by("cudnn_frontend", inputs, plan), tokens[0])
    assert Graph.built == []


def test_what_it_has_no_kernel_for_is_refused(streams: list[tuple[str, int]]) -> None:
    inputs, plan = case((576, 512))
    with pytest.raises(NotImplementedError, match="the cuDNN front end: no engine"):
        attend_by("cudnn_frontend", inputs, plan)


def test_what_it_would_compute_wrongly_is_refused(streams: list[tuple[str, int]]) -> None:
    (q, k, v), plan = case()
    for scale in (0.0, -0.3):
        with pytest.raises(NotImplementedError, match="needs a positive softmax_scale"):
            attend_by("cudnn_frontend", (q, k, v), plan, scale)
    shifted = torch.zeros(9, 2, 65, dtype=torch.float16)[..., 1:]
    with pytest.raises(NotImplementedError, match="v must start at a multiple of 16 bytes"):
        attend_by("cudnn_frontend", (q, k, shifted), plan)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "cudnn")
    inputs, plan = case()
    with pytest.raises(NotImplementedError, match=r"the cuDNN front end is not importable \(cudnn: ModuleNotFound"):
        attend_by("cudnn_frontend", inputs, plan)


def test_a_plan_of_another_provider_is_refused(streams: list[tuple[str, int]]) -> None:
    inputs, plan = case()
    with pytest.raises(TypeError, match="must be of this provider, got NoneType"):
        cudnn_frontend.attend(*inputs, 0.3, plan)


@pytest.mark.parametrize(
    ("change", "capability", "reason"),
    [
        ({}, (9, 0), None),
        ({"head_dim_qk": 256, "head_dim_v": 256}, (10, 0), None),
        ({"head_dim_v": 20}, (9, 0), "multiples of 8, up to 576 and 512, got 192 and 20"),
        ({"head_dim_v": 520}, (9, 0), "multiples of 8, up to 576 and 512, got 192 and 520"),
        ({"dtype": torch.float32}, (9, 0), "serves bfloat16 and float16, got torch.float32"),
        ({}, (8, 0), "needs compute capability 9.x or 10.x, got 8.0"),
    ],
)
def test_what_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], capability: tuple[int, int], reason: str | None
) -> None:
    pretend_gpu(monkeypatch, capability)
    install(monkeypatch, "cudnn", pygraph=Graph)
    shape = optimized.AttentionShape(
        device=torch.device("cuda:0"),
        dtype=torch.bfloat16,
        num_heads=4,
        num_kv_heads=2,
        head_dim_qk=192,
        head_dim_v=128,
    )
    refusal = cudnn_frontend.refusal(replace(shape, **change), True, (3,), (5,))
    assert refusal is None if reason is None else reason in str(refusal)
