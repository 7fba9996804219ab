"""Kernels that project queries and outputs instead of keys and values: their companions, and who is let through."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import CPU, failing, gates_of, mla_case, operation_of, rows_of, true_answer
from torch import Tensor

from assay.harness._gates_bounds import Roundoffs, Variances, hard_envelope, logit_error, lse_limit
from assay.harness.case import Case
from assay.harness.companions import Companions, companions
from assay.harness.contract import Contract
from assay.harness.families import FAMILIES
from assay.harness.faults import load
from assay.harness.faults._mla_absorbed import absorbed_twin
from assay.harness.kernels import wrap_function
from assay.harness.operation import Rows
from assay.harness.plugin import kernel
from assay.harness.record import Record, Verdict
from assay.harness.runner import Exam, run_case
from assay.harness.strata import ScaleRows

U = 2.0**-8
SMALL: dict[str, Any] = {"query_lens": [3], "context_lens": [9], "history_chunk_size": 4, "kv_lora_rank": 5, "d_v": 4}


def naive(rows: Rows, i: int, h: int) -> dict[str, Any]:
    """The companions that differ from those of expanded keys, of query ``i`` and head ``h``, in Python floats."""
    assert rows.latent is not None
    scale, d_n, keys = abs(rows.softmax_scale), rows.projected_dims, range(int(rows.last_key[i]) + 1)
    c, w_uk, w_uv = rows.latent.rows.tolist(), rows.latent.w_uk[h].tolist(), rows.latent.w_uv[h].tolist()
    q, k, v = rows.q[i, h].tolist(), rows.k[:, h].tolist(), rows.v[:, h].tolist()
    ranks, dims, value_dims = range(len(c[0])), range(len(q)), range(len(v[0]))
    z = {j: rows.softmax_scale * sum(q[d] * k[j][d] for d in dims) for j in keys}
    lse = math.log(sum(math.exp(z[j]) for j in keys))
    p = {j: math.exp(z[j] - lse) for j in keys}
    o = [sum(p[j] * v[j][d] for j in keys) for d in value_dims]
    norm = sum(x * x for x in o)
    w = {j: sum(v[j][d] * o[d] for d in value_dims) / norm for j in keys}
    query = [sum(q[d] * w_uk[d][r] for d in range(d_n)) for r in ranks]
    query_terms = [math.sqrt(sum(q[d] ** 2 * w_uk[d][r] ** 2 for d in range(d_n)) * d_n / len(c[0])) for r in ranks]
    mean = [sum(p[j] * c[j][r] for j in keys) for r in ranks]
    center = [sum(row[r] for row in c) / len(c) for r in ranks]
    moved = [[sum(p[j] * c[j][r] * (v[j][d] - o[d]) for j in keys) for d in value_dims] for r in ranks]
    shifted = [sum(p[j] * c[j][r] * (w[j] - 1) for j in keys) for r in ranks]
    along = [(sum(w_uv[d][r] * o[d] for d in value_dims) / norm) ** 2 for r in ranks]
    size = [sum(p[j] * abs(c[j][r]) for j in keys) for r in ranks]
    running = [[sum(p[j] * c[j][r] for j in keys if j <= m) for m in range(len(c))] for r in ranks]
    reach = [max(0.0, *running[r]) - min(0.0, *running[r]) for r in ranks]
    sums = [sum(x * x for x in running[r]) for r in ranks]
    ends = rows.split_ends
    stretches = [range(a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
    parts = [sum(sum(p[j] * c[j][r] for j in part if j in p) ** 2 for part in stretches) for r in ranks]

    def projected(values: list[float], power: int = 2) -> list[float]:
        return [sum(abs(w_uv[d][r]) ** power * values[r] for r in ranks) for d in value_dims]

    power = projected([x * x for x in mean])
    wide = [*query, *q[d_n:]]
    columns = [[*c[j], *k[j][d_n:]] for j in range(len(c))]
    return {
        "products": max(scale * sum(abs(a * b) for a, b in zip(wide, columns[j], strict=True)) for j in keys),
        "projected_products": max(scale * sum(abs(query[r] * (c[j][r] - center[r])) for r in ranks) for j in keys),
        "lse_projected": max(scale * sum(abs(query[r] * c[j][r]) for r in ranks) for j in keys),
        "key_terms": max(scale * sum(query_terms[r] * abs(c[j][r]) for r in ranks) for j in keys),
        "key_spread": [sum((scale * query[r] * moved[r][d]) ** 2 for r in ranks) for d in value_dims],
        "key_terms_spread": [sum((scale * query_terms[r] * moved[r][d]) ** 2 for r in ranks) for d in value_dims],
        "scale_key": sum((scale * query[r] * shifted[r]) ** 2 for r in ranks),
        "scale_key_terms": sum((scale * query_terms[r] * shifted[r]) ** 2 for r in ranks),
        "lse_key": math.sqrt(sum((scale * query[r] * mean[r]) ** 2 for r in ranks)),
        "lse_key_power": sum((scale * query[r] * mean[r]) ** 2 for r in ranks),
        "stored_magnitude": projected([abs(x) for x in mean], power=1),
        "sum_magnitude": projected(size, power=1),
        "value_power": power,
        "value_terms": [math.sqrt(x) for x in power],
        "value_terms_power": power,
        "sum_power": projected(sums),
        "split_power": projected(parts),
        "range_power": projected([x * x for x in reach]),
        "range_magnitude": projected([x * s for x, s in zip(reach, size, strict=True)]),
        "scale_value": sum(mean[r] ** 2 * along[r] for r in ranks),
        "scale_value_terms": sum(power[d] * o[d] ** 2 for d in value_dims) / norm**2,
        "scale_sum": sum(sums[r] * along[r] for r in ranks),
        "scale_split": sum(parts[r] * along[r] for r in ranks),
    }


@pytest.mark.parametrize("seed", range(3))
def test_every_companion_that_differs_equals_its_definition(seed: int) -> None:
    rows = rows_of(mla_case(seed=seed, **SMALL))[0]
    found, expanded = companions(rows, absorbed=True), companions(rows)
    for i in range(len(rows.tokens)):
        for h in range(len(rows.heads)):
            for name, value in naive(rows, i, h).items():
                wanted = torch.tensor(value, dtype=torch.float64)
                assert torch.allclose(getattr(found, name)[i, h], wanted, rtol=1e-9, atol=1e-12), name
    # the answer, and what weights do to it, is that of the same function
    for name in ("out", "lse", "magnitude", "power", "spread", "weight_spread", "n_eff", "scale_p", "split_means"):
        torch.testing.assert_close(getattr(found, name), getattr(expanded, name))


def test_without_a_projection_nothing_can_be_absorbed() -> None:
    rows = rows_of(mla_case())[0]
    plain = replace(rows, projection_depth=0, projected_dims=0, k_terms=None, v_terms=None, latent=None)
    torch.testing.assert_close(companions(plain, absorbed=True).products, companions(plain).products)
    with pytest.raises(ValueError, match="latent must be given for rows whose keys come out of a projection, got None"):
        companions(replace(rows, latent=None), absorbed=True)


def rounded(value: Tensor, generator: torch.Generator) -> Tensor:
    return value * (1 + U * (2 * torch.rand(value.shape, generator=generator, dtype=torch.float64) - 1))


def perturbed_answers(rows: Rows, *, site: str, runs: int) -> Iterator[tuple[Tensor, Tensor]]:
    """What a float64 kernel answers that rounds absorbed queries, or latent outputs, and nothing else."""
    assert rows.latent is not None
    generator = torch.Generator().manual_seed(7)
    latent, d_n = rows.latent, rows.projected_dims
    query = torch.einsum("nhd,hdr->nhr", rows.q[..., :d_n], latent.w_uk)
    rope = torch.einsum("nhd,shd->nhs", rows.q[..., d_n:], rows.k[..., d_n:])
    hidden = torch.arange(len(rows.k)) > rows.last_key[:, None, None]
    for _ in range(runs):
        taken = rounded(query, generator) if site == "query" else query
        logits = rows.softmax_scale * (torch.einsum("nhr,sr->nhs", taken, latent.rows) + rope)
        logits = logits.masked_fill(hidden, -math.inf)
        mixed = torch.einsum("nhs,sr->nhr", torch.softmax(logits, -1), latent.rows)
        mixed = rounded(mixed, generator) if site == "output" else mixed
        yield torch.einsum("nhr,hdr->nhd", mixed, latent.w_uv), torch.logsumexp(logits, -1)


def judged_as(rows: Rows, contract: Contract) -> tuple[Companions, Roundoffs]:
    return companions(rows, absorbed=contract.absorbed), Roundoffs.of(contract, rows)


# nothing but what is projected is rounded; its sums and the answer are in float64
PROJECTED = Contract(p="fp64", out="fp64", lse="fp64", qk_acc="fp64", logits="fp64", pv_acc="fp64", ex2_rel=2.0**-52)
ROUNDING = PROJECTED.promising(projected="bf16", absorbed=True)


@pytest.mark.parametrize("family", ["diffuse", "ramp-v", "peaked"])
@pytest.mark.parametrize("site", ["query", "output"])
def test_the_variances_are_those_of_rounded_queries_and_outputs(site: str, family: str) -> None:
    # small errors, so that the first order is all there is
    rows = rows_of(mla_case(family, "float32", seed=3, query_lens=[6], context_lens=[50]))[0]
    if family == "peaked":
        rows = replace(rows, q=rows.q / 8)
    c, u = judged_as(rows, ROUNDING)
    answers = list(perturbed_answers(rows, site=site, runs=600))
    errors = torch.stack([out - c.out for out, _ in answers])
    found = Variances.of(c, u)
    expected = found.key if site == "query" else found.latent
    torch.testing.assert_close(errors.square().mean(0).sum(-1), expected.sum(-1), rtol=0.2, atol=0.0)
    # no element beyond its bound, and the largest not far below
    assert bool((errors.abs() <= hard_envelope(c, u)).all())
    alpha = (errors * c.out).sum(-1) / c.out.square().sum(-1)
    scale = ScaleRows.of(c, u, rows, c.out)
    share = c.scale_key if site == "query" else c.scale_value
    torch.testing.assert_close(alpha.square().mean(0), U**2 * share / 3, rtol=0.25, atol=0.0)
    assert float(scale.shared.abs().max()) == 0.0
    lse_errors = torch.stack([lse - c.lse for _, lse in answers])
    if site == "query":
        torch.testing.assert_close(lse_errors.square().mean(0), U**2 * c.lse_key_power / 3, rtol=0.25, atol=0.0)
        assert bool((lse_errors.abs() <= lse_limit(c, u)).all())
        assert bool((lse_errors.abs() <= logit_error(c, u, c.lse_projected)).all())


def test_the_freedom_of_an_error_is_that_of_what_it_comes_from() -> None:
    rows = rows_of(mla_case(seed=1, query_lens=[4], context_lens=[60], kv_lora_rank=6, d_v=40))[0]
    c, u = judged_as(rows, ROUNDING)
    errors = torch.stack([out - c.out for out, _ in perturbed_answers(rows, site="output", runs=2000)])
    energy = errors.square().sum(-1)
    # six latent dimensions span the errors of forty elements; uniform errors vary a little less than normal ones
    seen = 2 / (energy / energy.mean(0)).var(0)
    assert bool((c.value_dof <= 6).all())
    assert bool((c.value_dof <= 1.3 * seen).all())
    assert bool((Variances.of(c, u).freedom(c, u) <= 6.01).all())


def test_an_error_that_all_logits_share_is_none() -> None:
    """A latent channel that is the same in all tokens moves every logit alike, so it may be as large as it likes."""
    rows = rows_of(mla_case(seed=2, query_lens=[4], context_lens=[30]))[0]
    assert rows.latent is not None
    latent = rows.latent.rows.clone()
    latent[:, 0] = 1e6
    c, u = judged_as(replace(rows, latent=replace(rows.latent, rows=latent)), ROUNDING)
    assert bool((c.lse_projected > 100 * c.projected_products).all())
    assert bool((logit_error(c, u, c.lse_projected) > 10).all())
    assert bool((logit_error(c, u, c.projected_products) < 1).all())


def run(function: Callable[..., Any], case: Case) -> Record:
    return run_case(operation_of(case), wrap_function(function, operation_of(case)), case, CPU)


def named(name: str) -> Callable[..., Any]:
    faults, variants = load("mla_prefill")
    functions: dict[str, Callable[..., Any]] = {one.name: one.function for one in faults}
    functions |= {one.name: one.function for one in variants}
    return functions[name]


def small_case(family: str, dtype: str, seed: int) -> Case:
    uniform = {"query_lens": [16, 4], "context_lens": [32, 4]} if family == "exact-uniform" else {}
    return mla_case(family, dtype, seed=seed, **uniform)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["absorbed_in_input_dtype", "absorbed_in_one_pass", "absorbed"])
def test_a_kernel_that_absorbs_is_not_rejected(name: str, dtype: str) -> None:
    rejected = []
    for seed in range(20):
        family = FAMILIES[seed % len(FAMILIES)]
        record = run(named(name), small_case(family, dtype, seed))
        rejected += [(family, record.text)] if record.verdict is not Verdict.PASS else []
    assert rejected == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["absorbed_scale_of_latent_width", "absorbed_queries_in_e4m3"])
def test_a_kernel_that_absorbs_wrongly_is_rejected(name: str, dtype: str) -> None:
    for family in ("diffuse", "peaked", "ramp-v"):
        assert run(named(name), small_case(family, dtype, seed=5)).verdict is Verdict.NUMERIC, family


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_kernel_that_absorbs_must_say_so(dtype: str) -> None:
    """Undeclared, its rounded queries look like an error: keys that are rounded one by one err less together."""
    undeclared = kernel(name="undeclared")(lambda **arguments: absorbed_twin(arguments))
    records = [run(undeclared, small_case("diffuse", dtype, seed)) for seed in range(12)]
    assert Verdict.NUMERIC in {record.verdict for record in records}


def test_an_oracle_answers_each_form_once() -> None:
    case = mla_case(dtype="bfloat16")
    exam, contract = Exam(operation_of(case), case, CPU), operation_of(case).default_contract(case)
    plain, absorbed = exam.answers_for(contract), exam.answers_for(contract.promising(absorbed=True))
    assert exam.answers_for(contract) is plain
    assert exam.answers_for(contract.promising(absorbed=True)) is absorbed
    assert not torch.equal(plain[0][1].products, absorbed[0][1].products)
    assert absorbed[0][0].latent is None


def test_a_right_answer_passes_in_either_form() -> None:
    case = mla_case("diffuse", "bfloat16")
    out, lse = true_answer(case)
    contract = operation_of(case).default_contract(case)
    for held_to in (contract, contract.promising(absorbed=True)):
        assert failing(gates_of(case, (out.bfloat16(), lse.float()), held_to)) == set()
