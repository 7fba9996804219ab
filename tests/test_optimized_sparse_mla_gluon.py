"""The logic of the Gluon kernels of sparse MLA, emulated on the CPU, and the lists that neighbours share."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gluon_emulation import Deadlock, launch
from sparse_inputs import check, planned, sparse_inputs
from torch import Tensor

from assay.optimized import _sparse_mla_gluon as host
from assay.optimized import _sparse_mla_gluon_swap as swap
from assay.optimized import _sparse_mla_union as union
from assay.optimized._sparse_mla_gluon_union import union_kernel
from assay.optimized._sparse_mla_overlap import padded_heads, union_group
from assay.optimized._sparse_mla_plan import SparseMlaCall, SparseMlaShape
from assay.optimized._sparse_mla_triton import launch_flagged

SENTINEL = 7.0


class Emulated:
    """Takes the place of a Gluon kernel: ``kernel[grid](...)``."""

    def __init__(self, kernel: Any, programs: int) -> None:
        self.kernel, self.programs = kernel, programs

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*arguments: Any, num_warps: int, **constants: Any) -> None:
            launch(self.kernel, min(grid[0], self.programs), list(arguments), **constants)

        return run


def gluon_inputs(**sizes: Any) -> dict[str, Any]:
    return sparse_inputs(dtype=torch.bfloat16, d_v=512, **{"h_q": 8, "d_qk": 512, "s_kv": 400, "topk": 150} | sizes)


def call_of(given: dict[str, Any]) -> tuple[SparseMlaCall, Tensor]:
    """The call with an output among the heads of a larger buffer, and that buffer."""
    s_q, h_q, _ = given["q"].shape
    buffer = torch.full((s_q + 2, 36, 512), SENTINEL, dtype=torch.bfloat16)
    call = SparseMlaCall(
        q=given["q"],
        kv=given["kv"],
        indices=given["indices"],
        topk_length=given["topk_length"],
        attn_sink=given["attn_sink"],
        softmax_scale=given["softmax_scale"],
        out=buffer[1:-1, 2 : 2 + h_q],
        lse=torch.full((s_q, h_q), torch.nan),
        max_logits=torch.full((s_q, h_q), torch.nan),
    )
    return call, buffer


def attend(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, kernel: Any = None, programs: int = 3) -> Any:
    """What the host of ``gluon`` makes of the emulated kernels."""
    h_q, d_qk = given["q"].shape[1:]
    found, per_program, options = host._configuration(h_q, d_qk)
    chosen = Emulated(kernel or found, programs)
    monkeypatch.setattr(host, "_configuration", lambda h, d: (chosen, per_program, options))
    monkeypatch.setattr(host, "num_processors", lambda device: programs)
    call, buffer = call_of(given)
    host.attend(call, replace(planned(given), implementation="gluon"))
    return (call.out, call.lse, call.max_logits), buffer


def surroundings_stay(buffer: Tensor, h_q: int) -> bool:
    rest = buffer.clone()
    rest[1:-1, 2 : 2 + h_q] = SENTINEL
    return bool((rest == SENTINEL).all())


@pytest.mark.parametrize("h_q", [1, 8, 13, 32])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_a_list_a_query(d_qk: int, h_q: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = gluon_inputs(h_q=h_q, d_qk=d_qk, seed=h_q)
    results, buffer = attend(given, monkeypatch)
    check(results, given)
    assert surroundings_stay(buffer, h_q)


@pytest.mark.parametrize(("s_q", "programs"), [(12, 1), (19, 4), (13, 20)])
@pytest.mark.parametrize("d_qk", [512, 576])
def test_any_number_of_queries_and_programs(
    d_qk: int, s_q: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = gluon_inputs(h_q=16, d_qk=d_qk, s_q=s_q, lengths=s_q != 13, sinks=s_q != 19, seed=s_q, topk=300)
    results, _ = attend(given, monkeypatch, programs=programs)
    check(results, given)


def edited(kernel: Any, old: str, new: str) -> Any:
    """A kernel whose consumer has other lines."""
    source = Path(swap.__file__).read_text()
    assert source.count(old) >= 1
    module = type(swap)("edited")
    module.__dict__.update(__name__="assay.optimized.edited", __package__="assay.optimized", __file__=swap.__file__)
    exec(compile(source.replace(old, new), swap.__file__, "exec"), module.__dict__)
    return getattr(module, kernel.fn.__name__)


def test_the_emulation_finds_a_deadlock_and_a_lost_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gluon_inputs(seed=3)
    # the shorter query of a pair does not release its empty items
    stuck = edited(swap.swap_kernel, "for tile in range(num_tiles, other_tiles):", "for tile in range(0, 0):")
    with pytest.raises(Deadlock):
        attend(given, monkeypatch, kernel=stuck)
    unmasked = edited(swap.swap_kernel, "logits = gl.where(gl.expand_dims(valid, 1), logits * scale_log2", (
        "logits = gl.where(gl.expand_dims(valid, 1) | True, logits * scale_log2"
    ))  # fmt: skip
    with pytest.raises(AssertionError, match=r"of the bound|without keys"):
        check(attend(given, monkeypatch, kernel=unmasked)[0], given)
    unwaited = edited(swap.swap_kernel, "            mbarrier.wait(full.index(slot), (item // SLOTS) & 1)\n", "")
    # it lets go of what it has not got, and the ring comes out of step
    with pytest.raises(Deadlock):
        attend(given, monkeypatch, kernel=unwaited)


def shape_of(given: dict[str, Any]) -> SparseMlaShape:
    return planned(given).shape


def united(given: dict[str, Any], lists: union.UnitedLists) -> list[list[tuple[int, int]]]:
    """The entries of each group, ``(row, byte)``."""
    union.unite(given["indices"], given["topk_length"], lists, shape_of(given))
    return [
        list(zip(rows[:count].tolist(), members[:count].tolist(), strict=True))
        for rows, members, count in zip(lists.rows, lists.members, lists.count.tolist(), strict=True)
    ]


def united_by_counting(given: dict[str, Any]) -> list[list[tuple[int, int]]]:
    """The same from Python's own sets: rows in order with their members, then the repeats in order."""
    group = union_group(given["q"].shape[1])
    s_kv, lists = len(given["kv"]), given["indices"].tolist()
    length = given["topk_length"]
    seen = [
        [row for row in (listed if length is None else listed[: int(length[at])]) if 0 <= row < s_kv]
        for at, listed in enumerate(lists)
    ]
    answer = []
    for start in range(0, len(seen), group):
        members: dict[int, int] = {}
        repeats = []
        for bit, listed in enumerate(seen[start : start + group]):
            for row in listed:
                if members.get(row, 0) >> bit & 1:
                    repeats.append((row, 1 << bit))
                members[row] = members.get(row, 0) | 1 << bit
        answer.append(sorted(members.items()) + sorted(repeats))
    return answer


@pytest.mark.parametrize("h_q", [8, 16, 32])
def test_united_lists_are_what_sets_say_and_leave_their_scratch_clean(h_q: int) -> None:
    given = sparse_inputs(dtype=torch.float16, h_q=h_q, d_qk=32, s_kv=45, seed=h_q, s_q=21)
    given["indices"] = given["indices"].T.contiguous().T
    lists = union.prepare(shape_of(given))
    assert (
        lists.num_bytes
        == sum(
            tensor.numel() * tensor.element_size()
            for tensor in (lists.words, lists.num_repeats, lists.count, lists.rows, lists.repeat_rows)
        )
        + 2 * lists.members.numel()
    )
    first = united(given, lists)
    assert first == united_by_counting(given)
    assert sum(count > group[-1][0] for count, group in zip(lists.count.tolist(), first, strict=True)) >= 1
    assert not lists.words.any()
    assert not lists.num_repeats.any()
    other = given | {"topk_length": None}
    assert united(other, lists) == united_by_counting(other)


def union_results(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the host of ``gluon-union`` makes of the emulated kernel; its flags; and the buffer around the output."""
    flagged = []

    def repair(call: SparseMlaCall, shape: SparseMlaShape, flags: Tensor) -> None:
        flagged.append(flags.clone())
        # the interpreter multiplies bfloat16 wrongly
        out = torch.empty(call.out.shape)
        wide = replace(call, q=call.q.float(), kv=call.kv.float(), out=out)
        out.copy_(call.out)
        launch_flagged(wide, replace(shape, dtype=torch.float32), flags)
        call.out.copy_(out)

    monkeypatch.setattr("assay.optimized._sparse_mla_gluon_union.union_kernel", Emulated(union_kernel, 3))
    monkeypatch.setattr(union, "num_processors", lambda device: 3)
    monkeypatch.setattr(union, "launch_flagged", repair)
    call, buffer = call_of(given)
    plan = planned(given)
    union.attend(call, replace(plan, implementation="gluon-union", prepared=union.prepare(plan.shape)))
    return (call.out, call.lse, call.max_logits), flagged[0], buffer


@pytest.mark.parametrize(("h_q", "d_qk"), [(8, 512), (8, 576), (5, 576), (16, 512)])
def test_a_list_a_group(h_q: int, d_qk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = gluon_inputs(h_q=h_q, d_qk=d_qk, s_q=21, s_kv=300, topk=70, seed=h_q)
    results, flags, buffer = union_results(given, monkeypatch)
    check(results, given)
    assert not flags.any()
    assert surroundings_stay(buffer, h_q)


def test_a_neighbours_nan_is_repaired_and_ones_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given = gluon_inputs(s_q=22, s_kv=300, topk=70, seed=11, lengths=False, sinks=False)
    given["indices"][given["indices"] == 20] = 5
    given["indices"][17, 5] = 20
    given["kv"][20] = torch.nan
    results, flags, _ = union_results(given, monkeypatch)
    # queries 16 to 21 share a list; 17 lists the NaN itself
    assert flags.any(1).nonzero()[:, 0].tolist() == [16, 18, 19, 20, 21]
    for result in results:
        assert result.isnan().flatten(1).any(1).nonzero()[:, 0].tolist() == [17]
        assert result[17].isnan().all()
    rest = torch.tensor([query for query in range(22) if query != 17])
    check(results, given, rest)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("q", lambda q: q.repeat_interleave(2, -1)[..., ::2], "q must be contiguous in its last dimension"),
        ("kv", lambda kv: kv.repeat_interleave(2, -1)[..., ::2], "kv must be contiguous in its last dimension"),
        ("kv", lambda kv: torch.cat([kv, kv[:, :8]], 1)[:, :512], "multiples of 16 elements apart"),
        ("kv", lambda kv: torch.cat([kv, kv], 1)[:, 1:513], "must start at a multiple of 16 bytes"),
        ("indices", lambda i: i.T.contiguous().T, "indices must be contiguous in its last dimension"),
    ],
)
def test_strides_that_gluon_does_not_follow_are_refused(
    name: str, change: Any, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = gluon_inputs(s_q=12)
    call, buffer = call_of(given | {name: change(given[name])})
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        host.check_layout(call)
    with pytest.raises(NotImplementedError, match=re.escape(text)):
        host.attend(call, planned(given))
    assert bool((buffer == SENTINEL).all())


def test_every_head_count_has_a_tile() -> None:
    assert {padded_heads(h_q) for h_q in range(1, 33)} == set(host._SWAP) == set(host._SPLIT)
