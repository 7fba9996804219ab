"""Ceilings, the gather that measures one of them, clocks as nvidia-smi prints them, and counted compilations."""

import sys
from typing import Any

import pytest
import torch
from bench_clock import CPU, FakeClock

from assay.harness.bench.ceilings import Gemm, copy_rate, measure_ceilings
from assay.harness.bench.compilations import counted_compilations
from assay.harness.bench.machine import Clocks, describe_device, parse_clocks, read_clocks, versions

pytest.importorskip("triton", reason="the gather is a Triton kernel")

from assay.harness.bench import ceilings
from assay.harness.bench._gather_kernel import gather_sum


def test_the_gather_sums_the_rows_that_the_indices_name() -> None:
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(40, 8, generator=generator)
    indices = torch.randint(40, (3, 32), generator=generator, dtype=torch.int32)
    out = torch.full((3, 8), torch.nan)
    gather_sum(table, indices, out)
    assert torch.allclose(out, table[indices.long()].sum(1), atol=1e-5)


@pytest.mark.parametrize(("keys", "width"), [(17, 8), (16, 12)])
def test_shapes_that_the_gather_does_not_take_are_refused(keys: int, width: int) -> None:
    with pytest.raises(ValueError, match="keys must be a multiple of 16 and width a power of two"):
        gather_sum(torch.ones(4, width), torch.zeros(2, keys, dtype=torch.int32), torch.ones(2, width))
    with pytest.raises(ValueError, match="out must be float32 of shape"):
        gather_sum(torch.ones(4, 8), torch.zeros(2, 16, dtype=torch.int32), torch.ones(3, 8))


class Ticking(FakeClock):
    """Every timed call takes 2 ms."""

    def elapsed(self, start: float, end: float) -> float:
        return 2.0


def test_rates_are_work_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = Gemm(CPU, 32)
    assert gemm.flop == 2 * 32**3
    monkeypatch.setattr(ceilings, "copy_rate", lambda clock, device: copy_rate(clock, device, 1 << 20))
    monkeypatch.setattr(ceilings, "GATHER_TABLES_MIB", ())
    found = measure_ceilings(Ticking(), CPU, gemm, cache_bytes=7)
    assert found.gemm_tflops == pytest.approx(2 * 32**3 / 2e-3 / 1e12)
    # a copy reads and writes
    assert found.copy_tb_s == pytest.approx((2 << 20) / 2e-3 / 1e12)
    assert found.cache_bytes == 7


def test_the_anchor_multiplies() -> None:
    gemm = Gemm(CPU, 16)
    gemm()
    assert torch.isfinite(gemm._c).all()
    assert torch.allclose(gemm._c.float(), (gemm._a @ gemm._b).float())


def test_clocks_as_printed() -> None:
    assert parse_clocks("1980, 3201, 41, 233.51\n") == Clocks(sm_mhz=1980, memory_mhz=3201, celsius=41, watt=233.51)
    assert str(parse_clocks("1980, 3201, 41, 233.51")) == "1980 MHz, 3201 MHz memory, 41 C, 234 W"
    assert parse_clocks("1980, [N/A], 41, [Not Supported]") == Clocks(sm_mhz=1980, celsius=41)
    assert parse_clocks("") == Clocks()
    assert str(Clocks()) == "unknown"


def test_without_a_device_there_are_no_clocks() -> None:
    assert read_clocks(CPU) == Clocks()
    assert describe_device(CPU) == {"name": "cpu"}
    assert versions()["torch"] == torch.__version__


def test_compilations_are_counted_beside_an_earlier_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    seen: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **info: seen.append(info))
    earlier = knobs.runtime.jit_post_compile_hook
    with counted_compilations() as outer:
        knobs.runtime.jit_post_compile_hook(key="a")
        with counted_compilations() as inner:
            knobs.runtime.jit_post_compile_hook(key="b")
    assert (outer.made, inner.made) == (2, 1)
    assert [info["key"] for info in seen] == ["a", "b"]
    assert knobs.runtime.jit_post_compile_hook is earlier


def test_without_triton_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with counted_compilations() as count:
        pass
    assert count.made is None
