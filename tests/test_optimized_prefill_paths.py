"""The paths of a prefill say the same about the same question; the warm-up runs them all."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from assay.optimized import (
    _attention_triton_kernel,
    _masked_mha_triton_kernel,
    _sparse_mla_lists_kernel,
    _sparse_mla_triton_kernel,
    _topk_mask_triton_kernel,
    prefill_paths,
)
from assay.optimized.prefill_paths import Prefill, dense_call, masked_call, random_prefill, sparse_call, warmup
from assay.optimized.routing import MlaGeometry, find_geometry

CPU = torch.device("cpu")
SMALL = MlaGeometry(name="small", num_heads=2, kv_lora_rank=32, d_nope=12, d_rope=8, d_v=16, topk=20)
NOPE = replace(SMALL, name="nope", d_nope=20, d_rope=0)
UNIFIED = replace(SMALL, name="unified", d_nope=24, d_rope=8, d_v=32)


def prefill(
    geometry: MlaGeometry, query_len: int = 7, seq_len: int = 40, dtype: torch.dtype = torch.float64
) -> Prefill:
    return random_prefill(geometry, num_heads=2, query_len=query_len, seq_len=seq_len, device=CPU, dtype=dtype)


def each_once(indices: Tensor) -> Tensor:
    """The lists with every repeat of a row turned into padding."""
    ordered, order = indices.sort(dim=1, stable=True)
    repeated = torch.zeros_like(indices, dtype=torch.bool)
    repeated.scatter_(1, order[:, 1:], ordered[:, 1:] == ordered[:, :-1])
    return indices.masked_fill(repeated, -1)


@pytest.mark.parametrize("geometry", [SMALL, NOPE], ids=lambda geometry: str(geometry.name))
def test_masked_and_sparse_agree_where_no_row_is_listed_twice(geometry: MlaGeometry) -> None:
    given = prefill(geometry)
    assert all(0 <= int(row.min()) and int(row.max()) <= 33 + at for at, row in enumerate(given.indices))
    once = replace(given, indices=each_once(given.indices))
    masked, sparse = masked_call(once)(), sparse_call(once)()
    assert masked.shape == (7, 2, 16)
    torch.testing.assert_close(masked, sparse, rtol=1e-10, atol=1e-12)
    # a set and a multiset differ where a row is listed twice
    torch.testing.assert_close(masked_call(given)(), masked, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(sparse_call(given)(), sparse, rtol=1e-3)


@pytest.mark.parametrize("geometry", [SMALL, NOPE], ids=lambda geometry: str(geometry.name))
def test_all_paths_agree_where_everything_is_selected(geometry: MlaGeometry) -> None:
    given = prefill(replace(geometry, topk=40))
    everything = torch.arange(40, dtype=torch.int32).repeat(7, 1)
    everything[everything > torch.arange(33, 40)[:, None]] = -1
    given = replace(given, indices=everything)
    dense = dense_call(given)()
    for other in (masked_call(given), sparse_call(given), sparse_call(given, lengths=True, sinks=True)):
        torch.testing.assert_close(other(), dense, rtol=1e-10, atol=1e-12)


def test_keys_without_a_rope_part_are_not_copied() -> None:
    given = prefill(NOPE)
    k, v = prefill_paths._expanded(given)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert k.stride() == v.stride() == (2 * 36, 36, 1)


def test_a_unified_head_attends_its_rows_as_they_are() -> None:
    given = prefill(UNIFIED)
    assert given.kv_b_proj is None
    assert sparse_call(given)().shape == (7, 2, 32)
    for call in (dense_call, masked_call):
        with pytest.raises(NotImplementedError, match="the heads of unified are unified: there is nothing to expand"):
            call(given)


def test_the_warm_up_runs_every_path_that_serves() -> None:
    variants = ["", ", lengths", ", sinks", ", lengths, sinks"]
    expanded = [f"{path} {lengths}" for lengths in ("3 of 9", "8 of 8") for path in ("dense_mha", "masked_mha")]
    # bfloat16 is multiplied by torch alone where Triton is interpreted
    sparse = [f"sparse {name}{variant}" for name in ("torch",) for variant in variants]
    assert warmup(SMALL, [(3, 9), (8, 8)], num_heads=2, device=CPU) == [*expanded, *sparse]
    sparse = [f"sparse {name}{variant}" for name in ("torch", "triton", "padded") for variant in variants]
    assert warmup(UNIFIED, [(2, 4)], num_heads=2, device=CPU, dtype=torch.float16) == sparse


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: warmup(SMALL, [], num_heads=2, device=CPU), "lengths must hold at least one pair, got none"),
        (lambda: prefill(replace(SMALL, topk=None)), "geometry must be one that selects rows, got small"),
        (lambda: prefill(SMALL, 9, 8), "query_len must be 1 to seq_len = 8, got 9"),
    ],
)
def test_bad_input(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def compiled() -> int:
    """Variants of all kernels that a path may launch, which this process has compiled."""
    from assay.optimized._sparse_mla_gluon_split import split_kernel
    from assay.optimized._sparse_mla_gluon_swap import swap_kernel
    from assay.optimized._sparse_mla_gluon_union import union_kernel

    modules = (_attention_triton_kernel, _masked_mha_triton_kernel, _sparse_mla_lists_kernel)
    kernels = [split_kernel, swap_kernel, union_kernel]
    for module in (*modules, _sparse_mla_triton_kernel, _topk_mask_triton_kernel):
        kernels += [kernel for name, kernel in vars(module).items() if name.endswith("_kernel")]
    device = torch.cuda.current_device()
    return sum(len(kernel.device_caches[device][0]) for kernel in kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm5", "glm5.3-flash", "deepseek-v4-flash"])
def test_nothing_is_compiled_after_the_warm_up(name: str) -> None:
    geometry, device = find_geometry(name), torch.device("cuda", torch.cuda.current_device())
    heads = geometry.num_heads // 8
    done = warmup(geometry, [(100, 100), (300, 5000), (2000, 2000)], num_heads=heads, device=device)
    print(f"{name}: {len(done)} calls, {compiled()} variants")
    before = compiled()
    assert before > 0
    for query_len, seq_len in ((1, 1), (37, 37), (130, 4001), (777, 9000), (3001, 3001)):
        given = random_prefill(geometry, num_heads=heads, query_len=query_len, seq_len=seq_len, device=device)
        calls = []
        if not geometry.unified:
            calls.append(dense_call(given) if seq_len <= 2048 else masked_call(given))
        for implementation in ("auto", "triton", "padded"):
            calls += [sparse_call(given, implementation=implementation, lengths=True, sinks=True)]
        for call in calls:
            assert call().isfinite().all()
    torch.cuda.synchronize()
    assert compiled() == before
