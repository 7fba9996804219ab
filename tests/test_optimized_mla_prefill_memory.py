"""Device memory of chunked MLA prefill: the estimate bounds the peak, closely, and history adds only metadata."""

import pytest
import torch

from assay.optimized.mla_prefill import MlaPrefillPlan, MlaShape, mla_prefill, plan_mla_prefill

pytestmark = pytest.mark.gpu

SHAPES = {
    "128/64/128": MlaShape(num_heads=16, kv_lora_rank=512, d_nope=128, d_rope=64, d_v=128),
    "256/0/256": MlaShape(num_heads=16, kv_lora_rank=512, d_nope=256, d_rope=0, d_v=256),
}
TOKENS, CHUNK = 8192, 16384
MIB = 1 << 20


def peak_of(shape: MlaShape, *, history: int, provider: str, chunk: int = CHUNK) -> tuple[int, MlaPrefillPlan]:
    """Peak minus baseline of one forward after warm-up, and its plan."""
    context, device, dtype = TOKENS + history, "cuda", torch.bfloat16
    plan = plan_mla_prefill(
        torch.tensor([0, TOKENS]),
        torch.arange(context, dtype=torch.int32, device=device)[None],
        torch.tensor([0]),
        torch.tensor([context]),
        shape=shape,
        dtype=dtype,
        num_slots=context,
        history_chunk_size=chunk,
        provider=provider,
    )
    d_qk = shape.d_nope + shape.d_rope
    generator = torch.Generator(device=device).manual_seed(0)
    q, kv_c, k_pe, weight = (
        torch.randn(size, dtype=dtype, device=device, generator=generator)
        for size in (
            (TOKENS, shape.num_heads, d_qk),
            (context, shape.kv_lora_rank),
            (context, shape.d_rope),
            (shape.num_heads, shape.d_nope + shape.d_v, shape.kv_lora_rank),
        )
    )

    def run() -> None:
        out, lse = mla_prefill(q, kv_c, k_pe, weight, softmax_scale=d_qk**-0.5, plan=plan)
        del out, lse
        torch.cuda.synchronize()

    run()
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - baseline, plan


@pytest.mark.parametrize("provider", ["sdpa", "triton"])
@pytest.mark.parametrize("geometry", SHAPES)
def test_estimate_bounds_the_peak_closely(geometry: str, provider: str) -> None:
    peak, plan = peak_of(SHAPES[geometry], history=65536, provider=provider)
    print(f"{geometry} {provider}: peak {peak / MIB:.1f} MiB, estimate {plan.workspace_bytes / MIB:.1f} MiB")
    assert peak >= 256 * MIB
    assert peak <= plan.workspace_bytes
    assert plan.workspace_bytes <= 1.15 * peak


@pytest.mark.parametrize("provider", ["sdpa", "triton"])
@pytest.mark.parametrize("chunk", [8192, CHUNK])
def test_history_adds_only_metadata_to_the_peak(chunk: int, provider: str) -> None:
    shape = SHAPES["128/64/128"]
    # the peak of one full chunk is that of any number of them
    short, _ = peak_of(shape, history=chunk, provider=provider, chunk=chunk)
    long, _ = peak_of(shape, history=65536, provider=provider, chunk=chunk)
    print(f"{provider}, W={chunk}: history {chunk} {short / MIB:.2f} MiB, history 65536 {long / MIB:.2f} MiB")
    assert long - short <= MIB


def test_saving_in_cache_tokens() -> None:
    shape = SHAPES["128/64/128"]
    _, plan = peak_of(shape, history=65536, provider="sdpa")
    whole = plan_mla_prefill(
        torch.tensor([0, TOKENS]),
        torch.arange(TOKENS + 65536, dtype=torch.int32, device="cuda")[None],
        torch.tensor([0]),
        torch.tensor([TOKENS + 65536]),
        shape=shape,
        dtype=torch.bfloat16,
        num_slots=TOKENS + 65536,
        history_chunk_size=65536,
        provider="sdpa",
    )
    saved = whole.workspace_bytes - plan.workspace_bytes
    tokens = saved // ((shape.kv_lora_rank + shape.d_rope) * 2)
    print(f"W={CHUNK} instead of 65536 frees {saved / MIB:.0f} MiB: {tokens} cache tokens of one layer")
    # three quarters of the expanded history: 49152 tokens of 16 heads x (192 + 256) bfloat16 values
    assert saved == pytest.approx(49152 * 16 * (192 + 256) * 2, rel=0.02)
