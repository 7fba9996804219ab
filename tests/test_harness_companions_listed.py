"""Companions of queries that list their keys: those of the same keys seen by place, of copies, and beside a sink."""

import math
from dataclasses import fields, replace

import pytest
import torch

from assay.harness.companions import Companions, companions
from assay.harness.contract import Contract, default_contract
from assay.harness.gates import Roundoffs, exact_elements, hard_envelope, judge, lse_limit, max_logits_limit
from assay.harness.operation import Rows

INF = math.inf
NAMES = tuple(field.name for field in fields(Companions))
# bounds for an order that is not known, and what is worked out from probes or cancels
BY_ORDER = ("range_power", "range_magnitude")


def listed(lists: list[list[int]], *, sink: list[float] | None = None, seed: int = 0, d_v: int = 4) -> Rows:
    """Queries of two heads over five keys, whose leading columns are their values."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(5, 1, 6, generator=generator, dtype=torch.float64)
    longest = max(len(entries) for entries in lists)
    padded = torch.tensor([entries + [-1] * (longest - len(entries)) for entries in lists], dtype=torch.long)
    return Rows(
        request=0,
        tokens=torch.arange(len(lists)),
        positions=torch.arange(len(lists)),
        heads=torch.tensor([0, 1]),
        q=torch.randn(len(lists), 2, 6, generator=generator, dtype=torch.float64),
        k=k,
        v=k[..., :d_v],
        last_key=torch.tensor([len(entries) - 1 for entries in lists]),
        softmax_scale=-0.7,
        lists=padded,
        attn_sink=None if sink is None else torch.tensor(sink, dtype=torch.float64),
    )


def by_place(rows: Rows, query: int, entries: list[int]) -> Rows:
    """The keys of one query, each head with its copy, seen by place."""
    own = torch.tensor(entries, dtype=torch.long)
    return replace(
        rows,
        tokens=rows.tokens[query : query + 1],
        positions=rows.positions[query : query + 1],
        q=rows.q[query : query + 1],
        k=rows.k[own].repeat(1, 2, 1),
        v=rows.v[own].repeat(1, 2, 1),
        last_key=torch.tensor([len(entries) - 1]),
        lists=None,
        attn_sink=None,
    )


def test_a_list_of_different_keys_is_those_keys_seen_by_place() -> None:
    rows = listed([[3, 0, 4], [2], [1, 4, 3, 2, 0]])
    found = companions(rows)
    for query, entries in enumerate(([0, 3, 4], [2], [0, 1, 2, 3, 4])):
        dense = companions(by_place(rows, query, entries))
        for name in set(NAMES) - {*BY_ORDER, "keys"}:
            torch.testing.assert_close(getattr(found, name)[query], getattr(dense, name)[0], msg=name)
        # no order of visit sums to more, and none to more than all magnitudes
        for name in BY_ORDER:
            assert bool((getattr(found, name)[query] >= getattr(dense, name)[0] - 1e-12).all())
        assert bool((found.range_power[query] <= found.magnitude[query].square() + 1e-12).all())
    assert found.keys.unique().tolist() == [5.0]


def test_copies_count_and_err_alike() -> None:
    rows = listed([[3, 1, 3, 3]])
    found, dense = companions(rows), companions(by_place(rows, 0, [3, 1, 3, 3]))
    for name in ("out", "lse", "max_logits", "visible", "total", "magnitude", "spread", "products", "lse_fp32"):
        torch.testing.assert_close(getattr(found, name), getattr(dense, name), msg=name)
    logits = rows.softmax_scale * torch.einsum("hd,jd->hj", rows.q[0], rows.k[:, 0])
    p = torch.exp(logits - found.lse[0][:, None])
    for head in range(2):
        three, one = 3 * p[head, 3], p[head, 1]
        v, o = rows.v[:, 0], found.out[0, head]
        assert found.n_eff[0, head] == pytest.approx(float(1 / (three**2 + one**2)))
        torch.testing.assert_close(found.power[0, head], three**2 * v[3] ** 2 + one**2 * v[1] ** 2)
        torch.testing.assert_close(found.weight_spread[0, head], three**2 * (v[3] - o) ** 2 + one**2 * (v[1] - o) ** 2)
        torch.testing.assert_close(found.visible_power[0, head], 9 * v[3] ** 2 + v[1] ** 2)


def test_a_sink_is_a_key_without_a_value_or_an_error() -> None:
    sink = [0.4, -1.1]
    rows, alone = listed([[3, 0, 4]], sink=sink), companions(listed([[3, 0, 4]]))
    found = companions(rows)
    # the sink as a fourth key: its value is 0, and its logit that of a query of its own
    for name in ("lse", "max_logits", "visible", "n_eff", "lse_fp32", "lse_fp32_power", "products"):
        torch.testing.assert_close(getattr(found, name), getattr(alone, name), msg=name)
    for head in range(2):
        z = rows.softmax_scale * (rows.k[[3, 0, 4], 0] @ rows.q[0, head])
        weights = torch.cat([z, torch.tensor(sink[head : head + 1], dtype=torch.float64)]).softmax(0)
        values = torch.cat([rows.v[[3, 0, 4], 0], torch.zeros(1, 4, dtype=torch.float64)])
        out = weights @ values
        torch.testing.assert_close(found.out[0, head], out)
        torch.testing.assert_close(found.spread[0, head], weights @ (values - out).abs())
        torch.testing.assert_close(found.share[0, head], weights[:3].sum())
        torch.testing.assert_close(found.sink[0, head], weights[3] * abs(sink[head]))
        # rounded weights are those of keys
        torch.testing.assert_close(found.power[0, head], weights[:3].square() @ values[:3].square())
        torch.testing.assert_close(found.weight_spread[0, head], weights[:3].square() @ (values[:3] - out).square())
        # in units of the largest weight of a key
        assert found.total[0, head] == pytest.approx(float(1 / weights[:3].max()))


@pytest.mark.parametrize(("sink", "share"), [(-INF, 1.0), (INF, 0.0)])
def test_an_infinite_sink_leaves_all_or_nothing(sink: float, share: float) -> None:
    found, alone = companions(listed([[3, 0, 4], []], sink=[sink, sink])), companions(listed([[3, 0, 4], []]))
    assert found.share[0].tolist() == [share, share]
    torch.testing.assert_close(found.out, alone.out * share)
    assert found.out[1].abs().max() == 0.0
    assert found.lse[1].tolist() == [-INF, -INF]
    for name in set(NAMES) - {"lse", "max_logits", "total", "n_eff"}:
        assert bool(torch.isfinite(getattr(found, name)).all()), name
    limits = hard_envelope(
        found, Roundoffs.of(default_contract("float32", projected=False, splits=False), listed([[0]]))
    )
    # without weight there is nothing to round
    assert (float(limits[0].max()) < 1e-30) == (share == 0.0)


def test_empty_lists_alone_are_legal() -> None:
    found = companions(listed([[], []], sink=[0.0, 0.0]))
    assert found.out.abs().max() == 0.0
    assert bool((found.max_logits == -INF).all())


def test_the_highest_logit_is_held_to_the_error_of_a_logit() -> None:
    rows = listed([[3, 0, 4], [2]])
    contract = default_contract("float32", projected=False, splits=False)
    c = companions(rows)
    limit = max_logits_limit(c, Roundoffs.of(contract, rows))
    assert 1e-8 < float(limit.min()) <= float(limit.max()) < 1e-4
    rounded = Roundoffs.of(contract.promising(logits="bf16"), rows)
    torch.testing.assert_close(max_logits_limit(c, rounded) - limit, (2.0**-8 - 2.0**-24) * c.logit_max)
    out, lse = c.out.float(), c.lse.float()
    for factor, passes in ((0.0, True), (0.9, True), (1.2, False)):
        moved = c.max_logits + factor * limit
        tally = judge(out, lse, [rows], contract=contract, family="diffuse", max_logits=moved)
        gate = next(gate for gate in tally.results() if gate.gate == "G6 max logits")
        assert gate.passed == passes
    assert lse_limit(c, rounded).shape == limit.shape


def test_a_sink_that_halves_the_weight_keeps_exact_elements() -> None:
    rows = listed([[0, 1], [0, 1, 2]], sink=[math.log(2.0), 0.3])
    rows = replace(rows, q=torch.zeros_like(rows.q), k=torch.ones_like(rows.k), v=torch.ones_like(rows.v))
    contract = Contract(p="bf16", out="bf16")
    exact = exact_elements(companions(rows), rows, Roundoffs.of(contract, rows), torch.bfloat16, "exact-uniform")
    assert exact[..., 0].tolist() == [[True, False], [False, False]]
    one_hot = exact_elements(companions(rows), rows, Roundoffs.of(contract, rows), torch.bfloat16, "exact-one-hot")
    assert one_hot[..., 0].tolist() == [[True, False], [False, False]]
