"""Plans of the gated delta rule: who serves what, the size of the workspace, and everything that is refused."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from kda_bounds import TOKENS, call, shape_of
from kda_inputs import kda_inputs, offsets
from torch import Tensor

from assay.optimized import _kda_chunks, _kda_plan, _kda_scan
from assay.optimized.kda import (
    IMPLEMENTATIONS,
    KdaBatch,
    KdaShape,
    find_implementation,
    kda,
    plan_kda,
    plan_kda_batch,
)

GIVEN = kda_inputs([3, 0, 4], heads=(1, 2), dims=(16, 20), dtype=torch.float32)
SHAPE = shape_of(GIVEN)


def batch_of(implementation: str = "torch", **options: Any) -> KdaBatch:
    plan = plan_kda(SHAPE, max_tokens=7, max_sequences=3, max_checkpoints=2, implementation=implementation)
    return plan_kda_batch(options.pop("cu_seqlens", GIVEN["cu_seqlens"]), plan=plan, **options)


def called(batch: KdaBatch, **changed: Any) -> tuple[Tensor, Tensor, Tensor]:
    named = {name: GIVEN[name] for name in (*TOKENS, "scale", "A_log", "dt_bias", "initial_state")} | changed
    return kda(**named, batch=batch)


BOUNDS = {"bounded": (-5.0, -0.5), "softplus": (None,), "log": (None,)}
CAPABILITIES = [(7, 5), (8, 0), (9, 0), (10, 0)]


def foreseen(name: str, shape: KdaShape, capability: tuple[int, int]) -> bool:
    """Whether an implementation serves a shape on a GPU, all libraries installed; written down a second time."""
    model = shape.head_dim_k == shape.head_dim_v == 128 and shape.dtype == torch.bfloat16
    return {
        "torch": True,
        "triton": shape.dtype != torch.float64 and capability >= (8, 0) and shape.head_dim_k <= 256,
        "flash": model and shape.gate == "bounded" and capability[0] >= 9,
        "flashkda": model and shape.gate == "bounded" and capability[0] >= 9,
        "fla": shape.dtype in (torch.bfloat16, torch.float16)
        and shape.head_dim_k <= 256
        and capability >= (8, 0)
        and shape.state_dtype == torch.float32,
    }[name]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_table_of_who_serves_what(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Implementation x capability x head dimension x dtype x gate and bound: each cell serves, or gives a reason."""
    pretend(monkeypatch)
    served = 0
    for capability, width, dtype in itertools.product(
        CAPABILITIES, (60, 64, 128, 512), (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, found=capability: found)
        for gate, bound in ((gate, bound) for gate, bounds in BOUNDS.items() for bound in bounds):
            shape = KdaShape(
                device=torch.device("cuda", 0),
                dtype=dtype,
                num_heads=2,
                num_v_heads=2,
                head_dim_k=width,
                head_dim_v=width,
                gate=gate,  # type: ignore[arg-type]
                lower_bound=bound,
                state_dtype=torch.float64 if dtype == torch.float64 else torch.float32,
                state_layout="VK",
            )
            reason = _kda_plan.refusal(name, shape)
            assert (reason is None) == foreseen(name, shape, capability), (name, shape, capability, reason)
            if reason is None:
                served += 1
                continue
            with pytest.raises(NotImplementedError, match=f"implementation '{name}' cannot serve this shape; {name}: "):
                _kda_plan.resolve_implementation(name, shape)
    assert served > 0


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with every library."""
    monkeypatch.setattr(_kda_scan, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for name in ("fla", "flashkda"):
        monkeypatch.setattr(find_implementation(name), "find_library", lambda: None)


def test_auto_takes_the_fastest_and_says_why_others_were_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_kda(SHAPE, max_tokens=1, max_sequences=1).choice == "auto took torch"
    pretend(monkeypatch)
    model = KdaShape(
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        num_heads=2,
        num_v_heads=2,
        head_dim_k=128,
        head_dim_v=128,
        lower_bound=-5.0,
    )
    assert _kda_plan.resolve_implementation("auto", model) == ("flash", "auto took flash")
    unbounded = replace(model, gate="softplus", lower_bound=None)
    name, choice = _kda_plan.resolve_implementation("auto", unbounded)
    assert name == "triton"
    assert choice.startswith("auto took triton; refused: flash: ")
    assert "bounded" in choice
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    name, choice = _kda_plan.resolve_implementation("auto", model)
    assert name == "torch"
    assert "triton: compute capability 8.0 is needed, got 7.5" in choice


def test_a_name_that_nobody_has_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"implementation must be 'auto' or one of torch, triton, flash, .* got 'fast'"
    ):
        plan_kda(SHAPE, max_tokens=1, max_sequences=1, implementation="fast")


@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_the_workspace_is_as_large_as_it_says(implementation: str) -> None:
    plan = plan_kda(SHAPE, max_tokens=70, max_sequences=3, max_checkpoints=1, implementation=implementation)
    assert plan.workspace.numel() == plan.workspace_bytes
    carved = plan.carved()
    spans = sorted((x.data_ptr(), x.data_ptr() + x.numel() * x.element_size()) for x in carved.values() if x.numel())
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= plan.workspace.data_ptr() + plan.workspace_bytes
    again = plan_kda(
        SHAPE,
        max_tokens=70,
        max_sequences=3,
        max_checkpoints=1,
        implementation=implementation,
        workspace=plan.workspace,
    )
    assert again.workspace is plan.workspace
    if implementation == "torch":
        assert plan.workspace_bytes == 0
        return
    # (70 + 31 * 3) // 32 + 1 chunks of 2 heads: three tiles of 32 x 16, two of 32 x 32, 16 decays, float32
    assert plan.workspace_bytes == 6 * 2 * 4 * (3 * 32 * 16 + 2 * 32 * 32 + 16)
    with pytest.raises(ValueError, match=f"workspace must have at least {plan.workspace_bytes} bytes, got"):
        plan_kda(
            SHAPE,
            max_tokens=70,
            max_sequences=3,
            max_checkpoints=1,
            implementation=implementation,
            workspace=plan.workspace[:-1],
        )


def test_a_workspace_is_bytes_in_line_on_the_device() -> None:
    sizes: dict[str, Any] = {"max_tokens": 7, "max_sequences": 3, "implementation": "triton"}
    enough = torch.empty(1 << 20, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"workspace must be uint8, got torch.float32"):
        plan_kda(SHAPE, **sizes, workspace=enough.view(torch.float32))
    with pytest.raises(ValueError, match=r"workspace must be \[bytes\] and contiguous"):
        plan_kda(SHAPE, **sizes, workspace=enough.view(2, -1))
    with pytest.raises(ValueError, match="workspace must start at a multiple of 16 bytes, got 3 past one"):
        plan_kda(SHAPE, **sizes, workspace=enough[3:])
    with pytest.raises(ValueError, match="workspace must be on cpu, got meta"):
        plan_kda(SHAPE, **sizes, workspace=enough.to("meta"))


def test_a_workspace_is_enough_for_any_batch_of_its_size() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        count, kept = (int(torch.randint(least, 6, (), generator=generator)) for least in (1, 0))
        lens = torch.randint(0, 80, (count,), generator=generator).tolist()
        owners = torch.randint(count, (kept,), generator=generator).tolist()
        places = [(n, int(torch.randint(lens[n] + 1, (), generator=generator))) for n in owners]
        rule: dict[str, Any] = {"chunk_size": 32, "width": 2, "processors": 9, "device": torch.device("cpu")}
        chunks = _kda_chunks.lay_out(lens, places, **rule)
        rows = chunks.chunks.tolist()
        covered = [first + t for first, size, _, _ in rows for t in range(size)]
        assert covered == list(range(sum(lens)))
        assert sorted(index for _, _, index, _ in rows if index >= 0) == list(range(kept))
        starts = torch.tensor(lens).cumsum(0) - torch.tensor(lens)
        for first, size, index, _ in rows:
            if index >= 0:
                assert first + size == int(starts[places[index][0]]) + places[index][1]
        assert chunks.num_chunks <= _kda_chunks.most_chunks(sum(lens), count, kept, 32)
        segments = chunks.segments.tolist()
        assert [part[0] for part in segments if part[3]] == list(range(count))
        assert [segments[0][1], *(part[2] for part in segments)] == [*(part[1] for part in segments), len(rows)]
        assert chunks.starts.tolist() == [[*(part[0] for part in segments), count].index(n) for n in range(count + 1)]


def test_long_sequences_of_few_heads_are_cut_and_others_are_not() -> None:
    device = torch.device("cpu")

    def cut(lens: list[int], width: int) -> list[int]:
        made = _kda_chunks.lay_out(lens, (), chunk_size=64, width=width, processors=132, device=device)
        assert made.num_segments - len(lens) <= _kda_chunks.most_cuts(made.num_chunks, width, 132)
        return made.segments[:, 0].bincount(minlength=len(lens)).tolist()

    # heads times two halves of the values
    assert cut([16384], 32) == [4]
    assert cut([65536], 16) == [8]
    assert cut([16384, 100], 32) == [4, 1]
    assert cut([8192], 128) == [1]
    assert cut([2048] * 8, 32) == [1] * 8
    assert cut([1300, 547, 2048, 963, 271, 3063], 64) == [1] * 6
    assert cut([1024], 2) == [1]
    assert cut([0], 2) == [1]


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"lower_bound": -5.5}, ValueError, r"lower_bound must be in \[-5, 0\), got -5.5"),
        ({"lower_bound": 0.0}, ValueError, r"lower_bound must be in \[-5, 0\), got 0.0"),
        ({"lower_bound": float("nan")}, ValueError, r"lower_bound must be in \[-5, 0\), got nan"),
        ({"lower_bound": None}, TypeError, "lower_bound must be a number for a bounded gate, got NoneType"),
        ({"gate": "softplus"}, ValueError, "lower_bound must be None for the gate softplus, got -5.0"),
        ({"gate": "hard"}, ValueError, "gate must be one of bounded, softplus, log, got 'hard'"),
        ({"state_layout": "K"}, ValueError, "state_layout must be one of KV, VK, got 'K'"),
        ({"state_dtype": torch.float16}, TypeError, "state_dtype must be float32 or bfloat16 for torch.float32 inputs"),
        ({"state_dtype": torch.float64}, TypeError, "state_dtype must be float32 or bfloat16"),
        ({"dtype": torch.float64}, TypeError, "state_dtype must be float64 for torch.float64 inputs"),
        ({"dtype": torch.int32}, TypeError, "dtype must be bfloat16, float16, float32 or float64"),
        ({"num_v_heads": 3, "num_heads": 2}, ValueError, "num_v_heads must be a multiple of num_heads 2, got 3"),
        ({"head_dim_k": 0}, ValueError, "head_dim_k must be at least 1, got 0"),
        ({"head_dim_v": 2.0}, TypeError, "head_dim_v must be an int, got float 2.0"),
    ],
)
def test_shapes_that_are_refused(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        replace(SHAPE, **changed)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"cu_seqlens": torch.tensor([1, 3])}, ValueError, "cu_seqlens must start at 0, got 1"),
        ({"cu_seqlens": torch.tensor([0, 3, 2])}, ValueError, "cu_seqlens must not decrease"),
        ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens must have shape \[N \+ 1\]"),
        ({"cu_seqlens": torch.tensor([0, 8])}, ValueError, "a batch must have at most 7 tokens as planned, got 8"),
        ({"cu_seqlens": offsets([1] * 4)}, ValueError, "a batch must have at most 3 sequences as planned, got 4"),
        ({"checkpoints": torch.tensor([[0, 1]] * 3)}, ValueError, "at most 2 checkpoints as planned, got 3"),
        ({"checkpoints": torch.tensor([[3, 0]])}, ValueError, "checkpoints must name sequences 0 .. 2, got 3"),
        ({"checkpoints": torch.tensor([[0, 4]])}, ValueError, "must be after 0 .. 3 tokens of sequence 0, got 4"),
        ({"checkpoints": torch.tensor([[0, -1]])}, ValueError, "must be after 0 .. 3 tokens of sequence 0, got -1"),
        ({"checkpoints": torch.tensor([0, 1])}, ValueError, r"checkpoints must have shape \[M, 2\], got \(2,\)"),
        ({"checkpoints": torch.tensor([[0.0, 1.0]])}, TypeError, "checkpoints must be int32 or int64"),
    ],
)
def test_batches_that_are_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        batch_of(**options)


def test_counts_of_a_plan_that_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 0, got -1"):
        plan_kda(SHAPE, max_tokens=-1, max_sequences=1)
    with pytest.raises(ValueError, match="max_sequences must be at least 1, got 0"):
        plan_kda(SHAPE, max_tokens=1, max_sequences=0)
    with pytest.raises(TypeError, match="max_checkpoints must be an int, got bool True"):
        plan_kda(SHAPE, max_tokens=1, max_sequences=1, max_checkpoints=True)


def refused(batch: KdaBatch, changed: dict[str, Any], error: type[Exception], text: str) -> None:
    """The call raises, and neither results nor inputs have changed."""
    tensors = [x for x in (*GIVEN.values(), *changed.values()) if isinstance(x, Tensor) and x.device.type == "cpu"]
    before = [x.clone() for x in tensors]
    with pytest.raises(error, match=text):
        called(batch, **changed)
    for old, now in zip(before, tensors, strict=True):
        torch.testing.assert_close(now, old, rtol=0, atol=0, equal_nan=True)


STATE = GIVEN["initial_state"]
OUT = torch.full((7, 2, 20), torch.nan)
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"q": GIVEN["q"].half()}, TypeError, r"q must be float32, got torch.float16"),
    ({"g": GIVEN["g"].half()}, TypeError, r"g must be float32, got torch.float16"),
    ({"A_log": GIVEN["A_log"].half()}, TypeError, r"A_log must be float32, got torch.float16"),
    ({"q": GIVEN["q"][:6]}, ValueError, r"q must have shape \[T, H, K\] with T >= 7 as planned, got \(6, 1, 16\)"),
    ({"k": GIVEN["k"][:6]}, ValueError, r"k must have shape \(7, 1, 16\), got \(6, 1, 16\)"),
    ({"v": GIVEN["v"][:, :1]}, ValueError, r"v must have shape \(7, 2, 20\), got \(7, 1, 20\)"),
    ({"beta": GIVEN["beta"][:, :1]}, ValueError, r"beta must have shape \(7, 2\), got \(7, 1\)"),
    ({"dt_bias": GIVEN["dt_bias"].flatten()}, ValueError, r"dt_bias must have shape \(2, 16\), got \(32,\)"),
    ({"v": GIVEN["v"].to("meta")}, ValueError, "v must be on cpu, got meta"),
    ({"scale": float("inf")}, ValueError, "scale must be finite, got inf"),
    ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number of the host, got Tensor"),
    ({"initial_state": STATE[:2]}, ValueError, r"initial_state must have shape \(3, 2, 16, 20\), got \(2, 2, 16, 20\)"),
    ({"initial_state": STATE.mT}, ValueError, r"initial_state must have shape \(3, 2, 16, 20\), got \(3, 2, 20, 16\)"),
    ({"initial_state": STATE.bfloat16()}, TypeError, r"initial_state must be float32, got torch.bfloat16"),
    ({"final_state": STATE.bfloat16()}, TypeError, r"final_state must be float32, got torch.bfloat16"),
    ({"final_state": STATE[:1].expand(3, -1, -1, -1)}, ValueError, "final_state must not overlap itself"),
    ({"out": OUT.half()}, TypeError, r"out must be float32, got torch.float16"),
    ({"out": OUT[:, :, :1].expand(-1, -1, 20)}, ValueError, "out must not overlap itself"),
    ({"out": GIVEN["v"]}, ValueError, "out must not share memory with v"),
    ({"checkpoint_states": STATE[:1]}, ValueError, r"checkpoint_states must have shape \(2, 2, 16, 20\)"),
    ({"checkpoint_states": STATE[:2]}, ValueError, "checkpoint_states must not share memory with initial_state"),
]


@pytest.mark.parametrize(("changed", "error", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_calls_that_are_refused_write_nothing(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    batch = batch_of(checkpoints=torch.tensor([[0, 1], [2, 4]]))
    refused(batch, {"out": OUT} | changed, error, text)


def test_states_are_the_same_or_apart() -> None:
    pool = torch.zeros(4, 2, 16, 20)
    text = "final_state must be initial_state itself or share no memory with it"
    refused(batch_of(), {"initial_state": pool[:3], "final_state": pool[1:]}, ValueError, text)
    expected = called(batch_of())[1]
    state = STATE.clone()
    assert torch.equal(called(batch_of(), initial_state=state, final_state=state)[1], expected)
    assert torch.equal(state, expected)


def test_a_log_gate_has_no_parameters() -> None:
    given = kda_inputs([3], dtype=torch.float32, gate="log")
    with pytest.raises(ValueError, match="A_log must be None for the gate log"):
        call(given, "torch", A_log=torch.zeros(4))


def test_kernels_read_rows_and_say_so() -> None:
    view = torch.zeros(7, 1, 32)[..., ::2]
    refused(batch_of("triton"), {"k": view}, NotImplementedError, "k must be contiguous in its last dimension, got")
    assert torch.isfinite(called(batch_of(), k=view)[0]).all()


def test_float32_gates_and_strengths_of_half_precision_layers() -> None:
    given = kda_inputs([3], heads=(1, 1), dims=(16, 16), dtype=torch.float16)
    expected = call(given, "torch")
    given |= {"g": given["g"].float(), "beta": given["beta"].float()}
    assert torch.equal(call(given, "torch")[0], expected[0])
