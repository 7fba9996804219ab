"""A kernel that writes into given tensors may be given a part of a buffer, of which the rest stays bit for bit."""

import math
from typing import Any

import pytest
import torch
from builders import CPU, attention_case, operation_of
from torch import Tensor

from assay.harness.kernels import wrap_function
from assay.harness.layouts import Destination
from assay.harness.operation import AttentionOutline
from assay.harness.plugin import kernel
from assay.harness.poison import SENTINEL, poisoned_allocations
from assay.harness.record import Record, Verdict
from assay.harness.runner import run_case
from assay.optimized.attention import AttentionShape, attention, plan_attention

CASE = attention_case(query_lens=[3, 2], key_lens=[5, 2])


def destination(within: tuple[int, ...] = (4, 7)) -> Destination:
    return Destination(shapes={"a": (2, 3)}, dtypes={"a": torch.float32}, device=CPU, within={"a": within})


@pytest.mark.parametrize("fill", [math.nan, SENTINEL])
def test_a_part_of_a_buffer_is_poisoned_and_surrounded(fill: float) -> None:
    lent = destination()
    with poisoned_allocations(fill) as allocations:
        inner = lent.allocate()["a"]
    assert (tuple(inner.shape), inner.stride(), inner.storage_offset() - 256) == ((2, 3), (7, 1), 1 * 7 + 2)
    assert inner.isnan().all() if math.isnan(fill) else (inner == fill).all()
    assert lent.written_beside() == []
    inner.fill_(1.0)
    assert lent.written_beside() == []
    assert allocations.intact()


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (1, 5), (3, 6)])
def test_a_write_beside_it_is_seen(place: tuple[int, int]) -> None:
    lent = destination()
    inner = lent.allocate()["a"]
    inner.fill_(0.0)
    whole, _ = lent.lent["a"]
    whole[place] = 0.0
    assert lent.written_beside() == ["a"]


def test_a_tensor_alone_has_nothing_beside_it() -> None:
    lent = Destination(shapes={"a": (2, 3)}, dtypes={"a": torch.float32}, device=CPU)
    assert lent.allocate()["a"].is_contiguous()
    assert lent.written_beside() == []


class InAPart:
    """The operation with an output in the midst of a larger buffer."""

    def __init__(self) -> None:
        self._operation: Any = operation_of(CASE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operation, name)

    def outline(self, case: Any) -> AttentionOutline:
        """Three more rows, two more heads, four more columns."""
        plain = self._operation.outline(case)
        within = plain.num_tokens + 3, plain.num_heads + 2, plain.d_v + 4
        return AttentionOutline(
            num_tokens=plain.num_tokens,
            num_heads=plain.num_heads,
            d_v=plain.d_v,
            empty_rows=plain.empty_rows,
            requests=plain.requests,
            out_within=within,
        )


def judged(store: Any) -> Record:
    """The verdict on a kernel that writes its answer by ``store``."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, lse: Tensor, **given: Any) -> None:
        shape = AttentionShape(
            device=CPU,
            dtype=q.dtype,
            num_heads=q.shape[1],
            num_kv_heads=k.shape[1],
            head_dim_qk=q.shape[2],
            head_dim_v=v.shape[2],
        )
        ends = given["cu_seqlens_q"], given["cu_seqlens_k"]
        plan = plan_attention(*ends, causal=given["causal"], shape=shape, provider="torch")
        answer, answer_lse = attention(q, k, v, softmax_scale=given["softmax_scale"], plan=plan)
        lse.copy_(answer_lse)
        store(out, answer)

    operation: Any = InAPart()
    return run_case(operation, wrap_function(kernel(style="dps")(attend), operation), CASE, CPU)


def test_a_kernel_that_follows_the_strides_passes() -> None:
    assert judged(lambda out, answer: out.copy_(answer)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    "store",
    [
        # as if it were alone
        lambda out, answer: out.as_strided(answer.shape, answer.stride()).copy_(answer),
        # the head behind the last, too
        lambda out, answer: (
            out.copy_(answer),
            out.as_strided((1,), (1,), out[-1, -1].storage_offset() - 1).fill_(1.0),
        ),
    ],
)
def test_a_kernel_that_does_not_is_found(store: Any) -> None:
    record = judged(store)
    assert record.verdict is Verdict.WRITE_SCOPE
    assert record.text == "wrote beside out, in the buffer around it"
