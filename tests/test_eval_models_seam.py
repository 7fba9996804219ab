"""A kernel of one's own in the place of an operation of the house, and what is seen there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.eval.models._hf_packed import PackedStep, check_plain
from assay.eval.models.seam import Seam
from assay.reference.attention import attention as oracle

KERNELS = """
import torch

from assay.reference.attention import attention
from assay.reference.mla_prefill import mla_prefill


def exact(**arguments):
    return attention(**arguments)


def doubled(q, k, v, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k):
    out, lse = exact(
        q=q, k=k, v=v, softmax_scale=softmax_scale, causal=causal, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    return 2 * out, lse


def flat(**arguments):
    out, lse = attention(**arguments)
    return out.flatten(1), lse


def paged(q, k_cache):
    return q
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(KERNELS, encoding="utf-8")
    return path


def batch(pads: list[int], start: int, stop: int) -> tuple[PackedStep, tuple[Tensor, Tensor, Tensor]]:
    """A step of a left-padded batch with two key heads; columns without a token hold 1e4."""
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(len(pads), heads, columns, width, generator=generator, dtype=torch.float64)
        for heads, columns, width in ((4, stop - start, 6), (2, stop, 6), (2, stop, 3))
    )
    for row, pad in enumerate(pads):
        query[row, :, : max(0, pad - start)], key[row, :, :pad], value[row, :, :pad] = 1e4, 1e4, 1e4
    step = PackedStep.of(pads, start, stop, torch.device("cpu"), "torch")
    return step, (query, key, value)


def expected(pads: list[int], start: int, stop: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Row by row and query by query."""
    out = torch.zeros(len(pads), stop - start, 4, 3, dtype=torch.float64)
    for row, pad in enumerate(pads):
        for column in range(max(start, pad), stop):
            for head in range(4):
                keys, values = key[row, head // 2, pad : column + 1], value[row, head // 2, pad : column + 1]
                weights = (0.3 * keys @ query[row, head, column - start]).softmax(dim=0)
                out[row, column - start, head] = weights @ values
    return out


@pytest.mark.parametrize(("start", "stop"), [(0, 7), (3, 7), (6, 7)])
def test_a_step_of_a_padded_batch_is_attention_of_its_own_tokens(start: int, stop: int) -> None:
    pads = [0, 5, 2, 7]
    step, tensors = batch(pads, start, stop)
    out = step.attend(Seam("attention"), 0, *tensors, scale=0.3)
    torch.testing.assert_close(out, expected(pads, start, stop, *tensors), rtol=0, atol=1e-12)


def test_layers_of_one_shape_share_a_plan() -> None:
    step, tensors = batch([0, 2], 0, 4)
    for layer in range(3):
        step.attend(Seam("attention"), layer, *tensors, scale=0.3)
    assert len(step.plans) == 1


def test_a_kernel_of_yours_serves_and_is_told_by_its_file(file: Path) -> None:
    step, tensors = batch([0, 2], 0, 4)
    house, mine = Seam("attention"), Seam("attention", f"{file}:doubled")
    twice = step.attend(mine, 0, *tensors, scale=0.3)
    torch.testing.assert_close(twice, 2 * step.attend(house, 0, *tensors, scale=0.3), rtol=0, atol=1e-12)
    assert (mine.name, house.name) == ("doubled", "attention")
    described = mine.describe()
    assert described["kernel"].endswith("mine.py:doubled")
    assert house.describe() == {}
    file.write_text(KERNELS + "\n# changed\n", encoding="utf-8")
    assert Seam("attention", f"{file}:doubled").describe()["kernel_sha256"] != described["kernel_sha256"]


def test_a_kernel_of_a_module_has_a_digest() -> None:
    described = Seam("attention", "assay.reference.attention:attention").describe()
    assert len(described["kernel_sha256"]) == 64


def test_every_call_is_seen_with_the_arguments_of_the_operation() -> None:
    step, tensors = batch([0, 2, 4], 1, 4)
    seen: list[tuple[int, dict[str, Any]]] = []
    seam = Seam("attention")
    seam.watch = lambda layer, arguments: seen.append((layer, arguments))
    out = step.attend(seam, 7, *tensors, scale=0.3)
    ((layer, arguments),) = seen
    assert layer == 7
    assert arguments["cu_seqlens_q"].tolist() == [0, 3, 5, 5]
    assert arguments["cu_seqlens_k"].tolist() == [0, 4, 6, 6]
    assert arguments["cu_seqlens_q"].dtype == torch.int32
    torch.testing.assert_close(oracle(**arguments)[0], out[step.current], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("paged", TypeError, "must take q, k, v"),
        ("absent", ValueError, "must name a function"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(file: Path, function: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Seam("attention", f"{file}:{function}")


def test_a_name_for_several_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel must name one kernel, got 'attention\[\*\]' for"):
        Seam("attention", "attention[*]")


def test_an_answer_of_another_form_is_named(file: Path) -> None:
    step, tensors = batch([0, 2], 0, 4)
    with pytest.raises(TypeError, match=r"flat must return out \[6, 4, Dv\] and lse, got \(6, 12\)"):
        step.attend(Seam("attention", f"{file}:flat"), 0, *tensors, scale=0.3)


@pytest.mark.parametrize("option", ["sliding_window", "softcap", "s_aux"])
def test_what_attention_does_not_compute_is_refused(option: str) -> None:
    check_plain({option: None, "scaling": 1.0})
    with pytest.raises(NotImplementedError, match=f"attention must be causal and full, got {option} = 3"):
        check_plain({option: 3})


def test_models_take_a_kernel_by_name(file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
    from assay.eval.models._hf_attention import Attention

    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.4,
    )  # fmt: skip
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 8, (1, 9), generator=torch.Generator().manual_seed(1))
    plain = network(ids).logits
    options: dict[str, Any] = {"plain": "eager", "chunk": 4, "provider": "auto"}
    for own, same in (("exact", True), ("doubled", False)):
        attention = Attention(network, "attention", own_kernel=f"{file}:{own}", **options)
        attention.begin_prefill([0], 0, 9, plain)
        difference = (network(ids).logits - plain).abs().max()
        assert (difference < 1e-5) == same
        assert attention.take() == {f"prefill/{own}": 2}
    with pytest.raises(ValueError, match="a kernel of yours needs attention to be attention or mla_prefill, got eager"):
        Attention(network, "eager", own_kernel=f"{file}:exact", **options)
