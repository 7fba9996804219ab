"""Every companion equals a double loop in Python floats, and the inequalities between them hold."""

import itertools
import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from builders import attention_case, mla_case, rows_of
from torch import Tensor

from assay.harness import _companions_freedom as freedom
from assay.harness import companions as module
from assay.harness.companions import Companions, companions
from assay.harness.operation import Rows

NAMES = tuple(field.name for field in fields(Companions))
# over many keys estimated from random directions, so not equal to their definition
ESTIMATED = ("weight_dof", "spread_dof", "key_dof")
# sums that cancel where a row has one key, or freedoms of an error that is 0
UNDEFINED_FREEDOM = ("query_dof", *ESTIMATED)


def random_rows(seed: int, *, last_key: list[int], keys: int = 6, **given: Any) -> Rows:
    """Rows of two heads, three key and two value dimensions."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    queries = len(last_key)
    return Rows(
        request=0,
        tokens=torch.arange(queries),
        positions=torch.arange(queries),
        heads=torch.tensor([0, 2]),
        q=2 * normal(queries, 2, 3),
        k=normal(keys, 2, 3),
        v=normal(keys, 2, 2) + 0.5,
        last_key=torch.tensor(last_key),
        softmax_scale=given.pop("softmax_scale", 0.6),
        **given,
    )


def projected_rows(seed: int) -> Rows:
    """The same with two projected key dimensions, their terms, and merges after keys 1 and 4."""
    rows = random_rows(seed, last_key=[5, 2, 0], projected_dims=2, projection_depth=7, split_ends=(2, 5, 6))
    generator = torch.Generator().manual_seed(seed + 1)
    k_terms = torch.rand(6, 2, 2, generator=generator, dtype=torch.float64)
    v_terms = torch.rand(6, 2, 2, generator=generator, dtype=torch.float64)
    return replace(rows, k_terms=k_terms, v_terms=v_terms)


ROWS = {
    "all keys visible": random_rows(0, last_key=[5, 5]),
    "causal": random_rows(1, last_key=[3, 4, 5]),
    "negative scale": random_rows(2, last_key=[5, 1], softmax_scale=-0.4),
    "merged without projection": random_rows(3, last_key=[5, 3], split_ends=(1, 4, 6)),
    "projected and merged": projected_rows(4),
    "grouped heads": rows_of(attention_case(seed=5, num_heads=4, query_lens=[3], key_lens=[7], d_qk=4, d_v=3))[0],
    "latent": rows_of(mla_case(seed=6, query_lens=[3], context_lens=[9], history_chunk_size=4))[0],
}


def naive_row(rows: Rows, i: int, h: int) -> dict[str, Any]:
    """All companions of query ``i`` and head index ``h`` from their definitions; the row must see a key."""
    scale, head = rows.softmax_scale, h
    q = rows.q[i, head].tolist()
    keys = range(int(rows.last_key[i]) + 1)
    k, v = rows.k[:, head].tolist(), rows.v[:, head].tolist()
    dims, value_dims, d_p = range(len(q)), range(len(v[0])), range(rows.projected_dims)
    k_terms = None if rows.k_terms is None else rows.k_terms[:, head].tolist()
    v_terms = None if rows.v_terms is None else rows.v_terms[:, head].tolist()

    z = {j: scale * sum(q[d] * k[j][d] for d in dims) for j in keys}
    lse = math.log(sum(math.exp(z[j]) for j in keys))
    p = {j: math.exp(z[j] - lse) for j in keys}
    o = [sum(p[j] * v[j][d] for j in keys) for d in value_dims]
    highest, norm = max(z.values()), sum(x * x for x in o)
    w = {j: sum(v[j][d] * o[d] for d in value_dims) / norm for j in keys}
    s = {j: abs(scale) * math.sqrt(len(q)) / 2 * _root(q, k[j], dims) + 2 * abs(z[j]) for j in keys}
    key_var = {j: scale**2 * _root(q, k[j], d_p) ** 2 for j in keys}
    term_var = {j: scale**2 * _root(q, k_terms[j], d_p) ** 2 if k_terms else 0.0 for j in keys}
    terms = v_terms or [[0.0 for _ in value_dims] for _ in range(len(k))]
    parts = _stretches(rows)
    partial = {(c, d): sum(p[j] * v[j][d] for j in part if j in p) for c, part in enumerate(parts) for d in value_dims}
    mass = [sum(p[j] for j in part if j in p) for part in parts]
    running = {(m, d): sum(p[j] * v[j][d] for j in keys if j <= m) for m in range(len(k)) for d in value_dims}

    def around(weight: dict[int, float]) -> list[float]:
        return [sum(p[j] ** 2 * weight[j] * (v[j][d] - o[d]) ** 2 for j in keys) for d in value_dims]

    def along(element: list[float]) -> float:
        return float(sum(element[d] * o[d] ** 2 for d in value_dims) / norm**2)

    def moved(x: dict[int, float]) -> list[float]:
        return [sum(p[j] * x[j] * (v[j][d] - o[d]) for j in keys) for d in value_dims]

    def moved_scale(x: dict[int, float]) -> float:
        return float(sum(p[j] * x[j] * (w[j] - 1) for j in keys))

    power = [sum(p[j] ** 2 * v[j][d] ** 2 for j in keys) for d in value_dims]
    split_power = [sum(partial[c, d] ** 2 for c in range(len(parts))) for d in value_dims]
    sum_power = [sum(running[m, d] ** 2 for m in range(len(k))) for d in value_dims]
    terms_power = [sum(p[j] ** 2 * terms[j][d] ** 2 for j in keys) for d in value_dims]
    dof_weights = {j: p[j] ** 2 * _root(q, k[j], dims) ** 2 for j in keys}
    full_var = {j: scale**2 * _root(q, k[j], dims) ** 2 for j in keys}
    columns = {a: {j: abs(scale) * q[a] * k[j][a] for j in keys} for a in dims}
    by_query = [moved(columns[a]) for a in dims]
    magnitude = [sum(p[j] * abs(v[j][d]) for j in keys) for d in value_dims]
    reach = [
        max(0.0, *(running[m, d] for m in range(len(k)))) - min(0.0, *(running[m, d] for m in range(len(k))))
        for d in value_dims
    ]
    projected_products = max(abs(scale) * sum(abs(q[d] * k[j][d]) for d in d_p) for j in keys)
    return {
        "out": o,
        "lse": lse,
        "max_logits": highest,
        "share": 1.0,
        "sink": 0.0,
        "visible": len(keys),
        "keys": len(k),
        "total": sum(math.exp(z[j] - highest) for j in keys),
        "n_eff": 1 / sum(p[j] ** 2 for j in keys),
        "weight_dof": _freedom({j: p[j] ** 2 for j in keys}, v, [0.0 for _ in value_dims]),
        "spread_dof": _freedom({j: p[j] ** 2 for j in keys}, v, o),
        "key_dof": _freedom(dof_weights, v, o),
        "query_dof": _freedom(dict.fromkeys(dims, 1.0), by_query, [0.0 for _ in value_dims]),
        "value_dof": 1.0,
        "magnitude": magnitude,
        "stored_magnitude": magnitude,
        "sum_magnitude": magnitude,
        "power": power,
        "value_power": power,
        "weight_spread": around(dict.fromkeys(keys, 1.0)),
        "visible_power": [sum(v[j][d] ** 2 for j in keys) for d in value_dims],
        "visible_spread": [sum((v[j][d] - o[d]) ** 2 for j in keys) for d in value_dims],
        "spread": [sum(p[j] * abs(v[j][d] - o[d]) for j in keys) for d in value_dims],
        "products": max(abs(scale) * sum(abs(q[d] * k[j][d]) for d in dims) for j in keys),
        "projected_products": projected_products,
        "lse_projected": projected_products,
        "value_max": max(abs(x) for value in v for x in value),
        "logit_max": max(abs(z[j]) for j in keys),
        "logit_range": max(abs(z[j] - highest) for j in keys),
        "key_spread": around(key_var),
        "logit_spread": around({j: z[j] ** 2 for j in keys}),
        "fp32_spread": around({j: s[j] ** 2 for j in keys}),
        "operand_spread": around(full_var),
        "query_spread": [sum(row[d] ** 2 for row in by_query) for d in value_dims],
        "cut_spread": [x**2 for x in moved(z)],
        "range_power": [x**2 for x in reach],
        "range_magnitude": [x * a for x, a in zip(reach, magnitude, strict=True)],
        "split_power": split_power,
        "split_spread": [sum((partial[c, d] - mass[c] * o[d]) ** 2 for c in range(len(parts))) for d in value_dims],
        "sum_power": sum_power,
        "value_terms": [sum(p[j] * terms[j][d] for j in keys) for d in value_dims],
        "value_terms_power": terms_power,
        "key_terms": max(abs(scale) * sum(abs(q[d]) * k_terms[j][d] for d in d_p) if k_terms else 0.0 for j in keys),
        "key_terms_spread": around(term_var),
        "scale_p": sum(p[j] ** 2 * w[j] ** 2 for j in keys),
        "scale_weight": sum(p[j] ** 2 * (w[j] - 1) ** 2 for j in keys),
        "scale_visible": sum(w[j] ** 2 for j in keys),
        "scale_visible_spread": sum((w[j] - 1) ** 2 for j in keys),
        "scale_input": along(power),
        "scale_operand": sum(p[j] ** 2 * full_var[j] * (w[j] - 1) ** 2 for j in keys),
        "scale_query": sum(moved_scale(columns[a]) ** 2 for a in dims),
        "scale_cut": abs(moved_scale(z)),
        "scale_out": sum(x**4 for x in o) / norm**2,
        "scale_value": along(power),
        "scale_key": sum(p[j] ** 2 * key_var[j] * (w[j] - 1) ** 2 for j in keys),
        "scale_logits": sum(p[j] ** 2 * z[j] ** 2 * (w[j] - 1) ** 2 for j in keys),
        "scale_fp32": sum(p[j] ** 2 * s[j] ** 2 * (w[j] - 1) ** 2 for j in keys),
        "scale_key_terms": sum(p[j] ** 2 * term_var[j] * (w[j] - 1) ** 2 for j in keys),
        "scale_value_terms": along(terms_power),
        "scale_sum": along(sum_power),
        "scale_merge": sum(sum(p[j] * (w[j] - 1) for j in part if j in p) ** 2 for part in parts),
        "scale_split": along(split_power),
        "lse_key": sum(p[j] * math.sqrt(key_var[j]) for j in keys),
        "lse_key_power": sum(p[j] ** 2 * key_var[j] for j in keys),
        "lse_fp32": sum(p[j] * s[j] for j in keys),
        "lse_fp32_power": sum(p[j] ** 2 * s[j] ** 2 for j in keys),
        "lse_logits_power": sum(p[j] ** 2 * z[j] ** 2 for j in keys),
        "lse_operand_power": sum(p[j] ** 2 * full_var[j] for j in keys)
        + sum(sum(p[j] * columns[a][j] for j in keys) ** 2 for a in dims),
        "lse_cut": abs(sum(p[j] * z[j] for j in keys)),
        "split_means": [[partial[c, d] / mass[c] if mass[c] else 0.0 for d in value_dims] for c in range(len(parts))],
    }


def _root(q: list[float], k: list[float], dims: range) -> float:
    return math.sqrt(sum(q[d] ** 2 * k[d] ** 2 for d in dims))


def _freedom(weights: dict[int, float], v: list[list[float]], center: list[float]) -> float:
    """``tr(M)^2 / tr(M^2)``, the matrix written out."""
    dims = range(len(center))
    around = {j: [v[j][d] - center[d] for d in dims] for j in weights}
    matrix = [[sum(weights[j] * around[j][a] * around[j][b] for j in weights) for b in dims] for a in dims]
    square = sum(matrix[a][b] ** 2 for a in dims for b in dims)
    return sum(matrix[d][d] for d in dims) ** 2 / square if square > 1e-30 else 1.0


def _stretches(rows: Rows) -> list[range]:
    ends = rows.split_ends or (len(rows.k),)
    return [range(start, end) for start, end in zip((0, *ends[:-1]), ends, strict=True)]


@pytest.mark.parametrize("which", ROWS)
def test_every_field_equals_its_definition(which: str) -> None:
    rows = ROWS[which]
    found = companions(rows)
    for i in range(len(rows.tokens)):
        for h in range(len(rows.heads)):
            expected = naive_row(rows, i, h)
            assert set(expected) == set(NAMES)
            for name in set(NAMES) - set(UNDEFINED_FREEDOM if int(rows.last_key[i]) == 0 else ()):
                wanted = torch.tensor(expected[name], dtype=torch.float64)
                got = getattr(found, name)[i, h]
                # freedoms are quotients of sums that cancel
                exact = 1e-3 if name in UNDEFINED_FREEDOM else 1e-9
                assert torch.allclose(got, wanted, rtol=exact, atol=1e-12), (name, got, wanted)


def excess_freedom(probes: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Estimated over exact degrees of freedom of all rows with more than one key."""
    monkeypatch.setattr(freedom, "PAIRED_KEYS", 0)
    monkeypatch.setattr(freedom, "PROBES", probes)
    excess = []
    for rows in ROWS.values():
        found = companions(rows)
        for i, h in itertools.product(range(len(rows.tokens)), range(len(rows.heads))):
            if int(rows.last_key[i]) > 0:
                exact = naive_row(rows, i, h)
                excess += [float(getattr(found, name)[i, h]) / exact[name] for name in ESTIMATED]
    return excess


def test_degrees_of_freedom_tend_to_their_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    excess = excess_freedom(512, monkeypatch)
    assert 0.9 < min(excess)
    assert max(excess) < 1.1


def test_degrees_of_freedom_are_not_much_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max(excess_freedom(freedom.PROBES, monkeypatch)) < 2.5


def test_degrees_of_freedom_count_directions() -> None:
    weights = torch.ones(1, 32, dtype=torch.float64)
    # keys along the axes of 16 dimensions, then all along one direction
    spread, alike = torch.eye(16, dtype=torch.float64).repeat(2, 1), torch.ones(32, 16, dtype=torch.float64)
    zero = torch.zeros(1, 16, dtype=torch.float64)
    assert float(freedom.Directions(spread).freedom(weights, zero)) == pytest.approx(16.0, rel=1e-9)
    assert float(freedom.Directions(alike).freedom(weights, zero)) == pytest.approx(1.0, rel=1e-9)
    assert float(freedom.freedom_of_factors(spread[None])) == pytest.approx(16.0, rel=1e-9)
    assert float(freedom.freedom_of_factors(alike[None, :2])) == pytest.approx(1.0, rel=1e-9)


def test_fields_with_terms_are_not_trivially_zero() -> None:
    found = companions(ROWS["projected and merged"])
    for name in ("value_terms", "key_terms", "key_spread", "split_spread", "scale_key", "scale_merge", "lse_key"):
        # the first query sees several keys, so nothing vanishes
        assert bool((getattr(found, name)[0] > 0).all()), name


def test_a_row_without_keys_is_the_identity_and_adds_nothing() -> None:
    found = companions(random_rows(7, last_key=[-1, 5], split_ends=(3, 6)))
    assert found.lse[0].tolist() == [-math.inf, -math.inf]
    assert found.n_eff[0].min() > 1e299
    # the largest value is that of all keys, seen or not
    assert found.max_logits[0].tolist() == [-math.inf, -math.inf]
    constant = {"n_eff", "value_max", "keys", "value_dof", "share", *UNDEFINED_FREEDOM}
    for name in set(NAMES) - {"lse", "max_logits"} - constant:
        assert getattr(found, name)[0].abs().max() == 0.0, name
        assert bool(torch.isfinite(getattr(found, name)[1]).all()), name


def test_no_keys_at_all_are_legal() -> None:
    found = companions(random_rows(8, last_key=[-1, -1], keys=0))
    assert found.out.shape == (2, 2, 2)
    assert float(found.out.abs().max()) == 0.0
    assert bool((found.lse == -math.inf).all())


@pytest.mark.parametrize("which", ROWS)
def test_inequalities_hold(which: str) -> None:
    rows = ROWS[which]
    found = companions(rows)
    tiny = 1e-12
    assert bool((found.magnitude >= found.out.abs() - tiny).all())
    assert bool((found.spread <= found.magnitude + found.out.abs() + tiny).all())
    assert bool((found.power <= found.magnitude.square() + tiny).all())
    assert bool(((found.n_eff >= 1 - tiny) & (found.n_eff <= found.visible + tiny)).all())
    assert bool((found.logit_max <= found.products + tiny).all())
    assert bool((found.projected_products <= found.products + tiny).all())


def test_one_key_has_no_spread() -> None:
    found = companions(random_rows(9, last_key=[0, 0]))
    for name in ("spread", "logit_range", "fp32_spread", "logit_spread", "scale_fp32"):
        torch.testing.assert_close(getattr(found, name), torch.zeros_like(getattr(found, name)), atol=1e-14, rtol=0.0)
    torch.testing.assert_close(found.n_eff, torch.ones_like(found.n_eff))


@pytest.mark.parametrize("keys", [1, 4, 6])
def test_equal_weights_are_shared_by_all_keys(keys: int) -> None:
    rows = random_rows(10, last_key=[keys - 1])
    found = companions(replace(rows, q=torch.zeros_like(rows.q)))
    torch.testing.assert_close(found.n_eff, torch.full_like(found.n_eff, keys))
    torch.testing.assert_close(found.lse, torch.full_like(found.lse, math.log(keys)))


def test_huge_logits_do_not_overflow() -> None:
    rows = random_rows(11, last_key=[5, 3])
    found = companions(replace(rows, q=rows.q * 1e4))
    for name in NAMES:
        assert bool(torch.isfinite(getattr(found, name)).all()), name


def test_blocks_of_queries_join_to_the_same_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = ROWS["projected and merged"]
    whole = companions(rows)
    # one query at a time
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", {"cpu": 1})
    for name in NAMES:
        torch.testing.assert_close(getattr(companions(rows), name), getattr(whole, name), rtol=1e-12, atol=1e-14)


def test_rows_repeat_a_key_head_for_its_group() -> None:
    case = attention_case(num_heads=4, num_kv_heads=2)
    (first, _) = rows_of(case)
    assert first.k.shape == (40, 4, 24)
    assert torch.equal(first.k[:, 0], first.k[:, 1])
    assert torch.equal(first.v[:, 2], first.v[:, 3])
    assert not torch.equal(first.k[:, 1], first.k[:, 2])
