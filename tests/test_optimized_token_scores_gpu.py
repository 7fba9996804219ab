"""Token scores on a CUDA device: bfloat16 at model sizes, equal bits, capture, memory, compilations."""

import itertools
from typing import Any

import pytest
import torch
from builders import MLA_TENSORS, forward, operation_of, planned
from score_inputs import alone, check, fused, plans, score_case
from torch import Tensor

from assay.harness.case import Case
from assay.optimized import _token_scores_triton_kernel as kernels
from assay.optimized.mla_prefill import MlaShape, mla_prefill, plan_mla_prefill
from assay.optimized.token_scores import plan_token_scores, token_scores

pytestmark = pytest.mark.gpu

MODES = ("logits", "probability")
GEOMETRIES: dict[str, dict[str, int]] = {
    "GLM-4.7-Flash": {"num_heads": 20, "kv_lora_rank": 512, "d_nope": 192, "d_rope": 64, "d_v": 256},
    "DeepSeek-V3.2": {"num_heads": 16, "kv_lora_rank": 512, "d_nope": 128, "d_rope": 64, "d_v": 128},
    "GLM-5.3-Flash": {"num_heads": 8, "kv_lora_rank": 512, "d_nope": 256, "d_rope": 0, "d_v": 256},
    "odd": {"num_heads": 3, "kv_lora_rank": 72, "d_nope": 20, "d_rope": 24, "d_v": 12},
}
LENGTHS = {"query_lens": [130, 5, 33, 1], "context_lens": [1500, 5, 300, 1], "history_chunk_size": 512}
# several tiles of queries, a whole prompt, fewer than a tile, one
WINDOWS = torch.tensor([[1400, 1500], [0, 5], [270, 300], [0, 1]])
REQUESTS: dict[str, dict[str, Any]] = {
    "full": {"query_ranges": WINDOWS},
    "sink and recent": {"query_ranges": WINDOWS, "candidate_start": 4, "recent_keep_tokens": 9},
    "ranges": {"query_ranges": WINDOWS, "candidate_ranges": torch.tensor([[77, 1480], [2, 5], [9, 9], [0, 1]])},
}


def on_gpu(case: Case) -> dict[str, Any]:
    return operation_of(case).inputs(case, torch.device("cuda")).arguments


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("geometry", "dtype"),
    [
        *itertools.product(GEOMETRIES, ["bfloat16"]),
        *itertools.product(["GLM-4.7-Flash", "odd"], ["float16", "float32"]),
    ],
)
def test_kernels_are_within_their_bounds_alone_and_fused(geometry: str, dtype: str, mode: str, name: str) -> None:
    case, request = score_case(dtype=dtype, seed=1, **GEOMETRIES[geometry] | LENGTHS), REQUESTS[name]
    given = on_gpu(case)
    plan, score_plan = plans(case, given, mode, request, implementation="auto", provider="auto")
    assert score_plan.choice == "auto took triton"
    out, lse, scores = fused(given, plan, score_plan)
    check(scores, given, mode, request)
    full = mode == "probability" and score_plan.full
    for _ in range(5):
        assert torch.equal(alone(given, score_plan, lse=lse if full else None), scores)
    if full:
        check(alone(given, score_plan), given, mode, request)
    plain = forward(given, plan)
    assert plain[1] is not None
    assert torch.equal(out, plain[0])
    assert torch.equal(lse, plain[1])


@pytest.mark.parametrize("mode", MODES)
def test_the_torch_twin_on_the_device(mode: str) -> None:
    case = score_case(dtype="bfloat16", seed=2, **GEOMETRIES["GLM-4.7-Flash"] | LENGTHS)
    given = on_gpu(case)
    for request in REQUESTS.values():
        plan, score_plan = plans(case, given, mode, request, provider="triton")
        check(fused(given, plan, score_plan)[2], given, mode, request)


@pytest.mark.parametrize("mode", MODES)
def test_a_nan_is_seen_where_a_query_may_look_and_nowhere_else(mode: str) -> None:
    case = score_case(dtype="bfloat16", seed=3, **GEOMETRIES["GLM-4.7-Flash"] | LENGTHS)
    given = on_gpu(case)
    row = given["slot_table"][given["request_rows"][0]].long()
    _, score_plan = plans(case, given, mode, REQUESTS["sink and recent"], implementation="triton")
    before = alone(given, score_plan)
    assert not before.isnan().any()
    given["kv_c"][row[700]] = torch.nan
    scores = alone(given, score_plan)
    expected = torch.zeros_like(scores, dtype=torch.bool)
    if mode == "logits":
        expected[0, 700] = True
    else:
        expected[0, 4:1491] = True
    assert torch.equal(scores.isnan(), expected)
    assert torch.equal(scores[1:], before[1:])


@pytest.mark.parametrize("name", ["full", "sink and recent"])
@pytest.mark.parametrize("mode", MODES)
def test_a_captured_call_follows_new_contents(mode: str, name: str) -> None:
    case = score_case(dtype="bfloat16", seed=4, **GEOMETRIES["GLM-4.7-Flash"] | LENGTHS)
    given = on_gpu(case)
    plan, score_plan = plans(case, given, mode, REQUESTS[name], implementation="triton", provider="triton")
    scores = torch.empty(score_plan.score_shape, device="cuda")
    fused(given, plan, score_plan, scores)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _, _ = fused(given, plan, score_plan, scores)
    given["q"].mul_(-1.0)
    given["kv_c"].mul_(0.5)
    scores.fill_(1e6)
    graph.replay()
    torch.cuda.synchronize()
    replayed = scores.clone()
    expected = fused(given, plan, score_plan)
    assert torch.equal(replayed, expected[2])
    assert torch.equal(out, expected[0])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_scoring_never_synchronises(implementation: str) -> None:
    case = score_case(dtype="bfloat16", seed=5, **GEOMETRIES["DeepSeek-V3.2"] | LENGTHS)
    given = on_gpu(case)
    for mode, name in itertools.product(MODES, REQUESTS):
        plan, score_plan = plans(case, given, mode, REQUESTS[name], implementation=implementation, provider="triton")
        fused(given, plan, score_plan)
        try:
            torch.cuda.set_sync_debug_mode("error")
            fused(given, plan, score_plan)
            alone(given, score_plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_fifty_prompt_lengths_compile_nothing() -> None:
    def call(context: int, window: int) -> None:
        case = score_case(
            dtype="bfloat16",
            **GEOMETRIES["GLM-4.7-Flash"]
            | {"query_lens": [min(context, 40), 3], "context_lens": [context, 50], "history_chunk_size": 64},
        )
        given = on_gpu(case)
        plan = planned(case, given, provider="triton")
        ranges = torch.tensor([[context - window, context], [47, 50]])
        for mode, start in itertools.product(MODES, (0, 2)):
            scores = plan_token_scores(plan, mode=mode, query_ranges=ranges, candidate_start=start)  # type: ignore[arg-type]
            fused(given, plan, scores)

    def compiled() -> int:
        device = torch.cuda.current_device()
        names = ("logits_kernel", "denominator_kernel", "join_kernel", "probability_kernel")
        return sum(len(getattr(kernels, name).device_caches[device][0]) for name in names)

    call(130, 32)
    before = compiled()
    assert before >= 4
    for index in range(50):
        call(41 + 13 * index + index % 3, 1 + index % 40)
    assert compiled() == before


def test_slots_past_two_to_the_31st_element() -> None:
    """Cache rows 2^30 elements apart; where a 32-bit offset would land there are other values, no fault."""
    rank, rope = 64, 16
    case = score_case(dtype="bfloat16", query_lens=[2], context_lens=[3], kv_lora_rank=rank, d_rope=rope, num_heads=2)
    given = on_gpu(case)
    request = {"query_ranges": torch.tensor([[1, 3]]), "candidate_start": 0}
    used = given["slot_table"][given["request_rows"][0], :3].long()
    near = {name: given[name][used] for name in ("kv_c", "k_pe")}
    table = given["slot_table"].clone()
    table[given["request_rows"][0], :3] = torch.arange(3, device="cuda", dtype=table.dtype)
    memory = torch.full((2**32 + 2**12,), 9.0, dtype=torch.bfloat16, device="cuda")
    far = {
        "kv_c": memory.as_strided((3, rank), (2**30, 1), 2**31),
        "k_pe": memory.as_strided((3, rope), (2**30, 1), 2**31 + rank),
    }
    for name, tensor in far.items():
        tensor.copy_(near[name])
    for mode in MODES:
        answers = []
        for caches in (near, far):
            moved = given | caches | {"slot_table": table}
            _, score_plan = plans(case, moved, mode, request, implementation="triton")
            answers.append(alone(moved, score_plan))
        assert torch.equal(*answers)
        assert answers[0][0, :3].isfinite().all()


GLM = MlaShape(**GEOMETRIES["GLM-4.7-Flash"])
MIB = 1 << 20


def peak_of(history: int, mode: str | None, *, candidate_start: int = 0, alone: bool = False) -> tuple[int, int]:
    """Peak minus baseline of one forward, its score buffer made before; and the bytes foreseen for scoring."""
    tokens, context = 2048, 2048 + history
    generator = torch.Generator(device="cuda").manual_seed(0)
    plan = plan_mla_prefill(
        torch.tensor([0, tokens]),
        torch.arange(context, dtype=torch.int32, device="cuda")[None],
        torch.tensor([0]),
        torch.tensor([context]),
        shape=GLM,
        dtype=torch.bfloat16,
        num_slots=context,
        history_chunk_size=8192,
        provider="triton",
    )
    sizes = (tokens, 20, 256), (context, 512), (context, 64), (20, 448, 512)
    tensors = [torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator) for size in sizes]
    options: dict[str, Any] = {}
    foreseen = 0
    if mode is not None:
        ranges = torch.tensor([[context - 32, context]])
        score_plan = plan_token_scores(plan, mode=mode, query_ranges=ranges, candidate_start=candidate_start)  # type: ignore[arg-type]
        options = {"scores": torch.empty(score_plan.score_shape, device="cuda"), "score_plan": score_plan}
        foreseen = score_plan.workspace_bytes

    def run() -> None:
        if alone:
            token_scores(*tensors, softmax_scale=0.0625, plan=options["score_plan"], scores=options["scores"])
        else:
            mla_prefill(*tensors, softmax_scale=0.0625, plan=plan, **options)
        torch.cuda.synchronize()

    run()
    baseline = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - baseline, foreseen


def test_scoring_adds_no_memory_that_grows_with_the_history() -> None:
    plain = peak_of(65536, None)[0]
    for mode, start in itertools.product(MODES, (0, 64)):
        short, long = (peak_of(history, mode, candidate_start=start) for history in (16384, 65536))
        peaks = " / ".join(f"{peak / MIB:.2f}" for peak in (plain, short[0], long[0]))
        print(f"{mode}, candidates from {start}: {peaks} MiB without scores, at 16384 and at 65536 tokens of history")
        assert long[0] - short[0] <= 4096
        assert long[0] - plain <= long[1] + MIB
        assert short[1] == long[1]


def test_probabilities_alone_hold_what_was_foreseen() -> None:
    for history in (16384, 65536):
        peak, foreseen = peak_of(history, "probability", candidate_start=64, alone=True)
        print(f"history {history}: {peak / MIB:.2f} MiB, foreseen {foreseen / MIB:.2f}")
        assert peak <= foreseen + MIB
        assert peak >= foreseen // 2


def test_a_buffer_of_the_caller_is_written_in_place() -> None:
    case = score_case(dtype="bfloat16", seed=6, **GEOMETRIES["DeepSeek-V3.2"] | LENGTHS)
    given = on_gpu(case)
    for mode in MODES:
        _, score_plan = plans(case, given, mode, REQUESTS["full"], implementation="triton")
        expected = alone(given, score_plan)
        rows, width = score_plan.score_shape
        buffer: Tensor = torch.full((rows, 2 * width + 3), torch.nan, device="cuda")
        view = buffer[:, 1 : 2 * width + 1 : 2]
        token_scores(
            *(given[name] for name in MLA_TENSORS),
            softmax_scale=given["softmax_scale"],
            plan=score_plan,
            scores=view,
        )
        assert torch.equal(view, expected)
        view.fill_(torch.nan)
        assert buffer.isnan().all()
