"""Prefills that look at the best tokens alone: each kernel against plain loops, and against the dense prefill."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
pytest.importorskip("tokenizers", reason="the extra `model` is not installed")

from tiny_models import PROMPTS, TARGETS, generated, made, save_llama, scored, values  # noqa: E402

from assay.eval.models import _hf_exact_scores, _hf_topk  # noqa: E402
from assay.eval.models._hf_exact_scores import TopkRule, exact_selection  # noqa: E402
from assay.eval.models._hf_latent import LatentRows  # noqa: E402
from assay.optimized import _sparse_mla_padded  # noqa: E402
from assay.optimized.mla_prefill import MlaShape  # noqa: E402

CONVERTED = {"rope_frequencies": "2"}
KERNELS = {
    "masked_mha/torch": {"attention": "masked_mha", "provider": "torch"},
    "masked_mha/triton": {"attention": "masked_mha", "provider": "triton"},
    "sparse_mla/torch": {"attention": "sparse_mla", "provider": "torch"},
    "sparse_mla/triton": {"attention": "sparse_mla", "provider": "triton"},
    "sparse_mla/padded": {"attention": "sparse_mla", "provider": "padded"},
}
PLAIN, INTERPRETED = (
    ["masked_mha/torch", "sparse_mla/torch"],
    ["masked_mha/triton", "sparse_mla/triton", "sparse_mla/padded"],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def best(q: Tensor, k: Tensor, scale: float, topk: int, scores: str) -> list[list[int]]:
    """The positions that each query looks at, one by one; ``[H, L, D]``."""
    found = []
    for t in range(q.shape[1]):
        logits = scale * (q[:, t, None] * k[:, : t + 1]).sum(-1)
        each = logits.softmax(-1) if scores == "probability" else logits.clamp(min=0)
        total = each.sum(0).tolist()
        found.append(sorted(range(t + 1), key=lambda s: (-total[s], s))[:topk])
    return found


def masked(folder: Path, prompt: tuple[int, ...], behind: tuple[int, ...], *, sparse: int, scores: str) -> Tensor:
    """Log-probabilities ``[L + n, vocabulary]`` of one float64 pass whose first ``sparse`` queries see 3 tokens."""
    network = made(folder, **CONVERTED)._network.double()

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        logits = options["scaling"] * query[0] @ key[0].transpose(1, 2)
        tokens = torch.arange(logits.shape[1])
        hidden = tokens > tokens[:, None]
        chosen = best(query[0, :, :sparse], key[0, :, :sparse], options["scaling"], 3, scores)
        for t, some in enumerate(chosen):
            hidden[t] = True
            hidden[t, some] = False
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value[0]).transpose(0, 1)[None], None

    transformers.AttentionInterface.register("loops", attend)
    network.set_attn_implementation("loops")
    with torch.no_grad():
        shares: Tensor = network(torch.tensor([prompt + behind])).logits[0].log_softmax(-1)
    return shares


def expected(folder: Path, scores: str) -> Tensor:
    parts = []
    for prompt, target in zip(PROMPTS, TARGETS, strict=True):
        shares = masked(folder, prompt, target, sparse=len(prompt + target), scores=scores)
        parts.append(shares[:-1].gather(1, torch.tensor(prompt + target)[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("name", "scores", "step"),
    [(name, scores, 5) for name in PLAIN for scores in ("logits", "probability")]
    + [(name, "probability", 0) for name in INTERPRETED],
)
def test_prompts_are_scored_by_what_is_chosen_alone(folder: Path, name: str, scores: str, step: int) -> None:
    found = scored(made(folder, **CONVERTED, **KERNELS[name], topk="3", scores=scores, step=str(step)))
    torch.testing.assert_close(values(found), expected(folder, scores), rtol=0, atol=1e-4)
    # 3 layers; 14, 5 and 11 tokens in steps of 5, or at once
    steps = (3, 1, 3) if step else (1, 1, 1)
    assert [one.kernel_calls for one in found] == [{f"prefill/{name}": 3 * some} for some in steps]


@pytest.mark.parametrize("name", PLAIN)
def test_answers_follow_the_prefill_that_was_sparse(folder: Path, name: str) -> None:
    model = made(folder, **CONVERTED, **KERNELS[name], topk="3")
    for prompt, answer in zip(PROMPTS, generated(model, min_new_tokens=6), strict=True):
        shares = masked(folder, prompt, answer.ids, sparse=len(prompt), scores="probability")[len(prompt) - 1 : -1]
        # the end of a sequence may not come before its time
        shares[:5, -1] = -torch.inf
        assert shares.argmax(-1).tolist() == list(answer.ids)
        assert answer.kernel_calls == {f"prefill/{name}": 3, "decode/eager": 3 * 5}


@pytest.mark.parametrize(
    ("name", "topk"),
    [(name, topk) for name in PLAIN for topk in ("14", "2048")] + [(name, "14") for name in INTERPRETED],
)
def test_everything_chosen_is_the_dense_prefill(folder: Path, name: str, topk: str) -> None:
    dense = made(folder, **CONVERTED, attention="mla_prefill", step="0")
    model = made(folder, **CONVERTED, **KERNELS[name], topk=topk)
    torch.testing.assert_close(values(scored(model)), values(scored(dense)), rtol=0, atol=1e-4)
    if name in PLAIN:
        assert [one.ids for one in generated(model)] == [one.ids for one in generated(dense)]
        few = made(folder, **CONVERTED, **KERNELS[name], topk="3")
        assert (values(scored(few)) - values(scored(dense))).abs().max() > 1e-2


def test_all_kernels_serve_one_selection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[Tensor]] = {name: [] for name in KERNELS}
    for name, options in KERNELS.items():

        def watched(*tensors: Any, name: str = name, **rest: Any) -> Tensor:
            seen[name].append(exact_selection(*tensors, **rest))
            return seen[name][-1]

        monkeypatch.setattr(_hf_topk, "exact_selection", watched)
        scored(made(folder, **CONVERTED, **options, topk="3"), PROMPTS[1:], TARGETS[1:])
    first = seen.pop("masked_mha/torch")
    assert len(first) == 3
    assert [tuple(one.shape) for one in first] == [(5 + 11, 3)] * 3
    for others in seen.values():
        assert all(torch.equal(one, other) for one, other in zip(first, others, strict=True))


def selected(rule: TopkRule, requests: list[tuple[int, int]], width: int) -> list[list[list[int]]]:
    """Positions by request and query, of random float64 rows that stand where a batch has them."""
    generator = torch.Generator().manual_seed(3)
    shape = MlaShape(num_heads=2, kv_lora_rank=6, d_nope=4, d_rope=2, d_v=3)
    stop = max(context for context, _ in requests)
    start = stop - max(count for _, count in requests)
    rows = LatentRows.of([stop - context for context, _ in requests], start, stop, torch.device("cpu"))
    q = torch.randn(sum(rows.query_lens), 2, 6, generator=generator, dtype=torch.float64)
    latent = torch.randn(rows.num_slots, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    found = exact_selection(q, latent, weight, scale=0.5, width=width, rule=rule, rows=rows, shape=shape)
    assert found.shape == (len(q), width)
    assert found.dtype == torch.int32
    for queries, mine, (context, count), row in zip(
        q.split(rows.query_lens), found.split(rows.query_lens), requests, rows.rows, strict=True
    ):
        cache = latent[row * stop + stop - context : (row + 1) * stop]
        keys = torch.einsum("hdr,sr->hsd", weight[:, :4], cache[:, :6])
        keys = torch.cat([keys, cache[None, :, 6:].expand(2, -1, -1)], dim=-1)
        # a query for every token, of which the last ones are real
        padded = torch.zeros(2, context, 6, dtype=torch.float64)
        padded[:, context - count :] = queries.transpose(0, 1)
        wanted = best(padded, keys, 0.5, rule.topk, rule.scores)[context - count :]
        assert [[s for s in one if s >= 0] for one in mine.tolist()] == wanted
    return [one.tolist() for one in found.split(rows.query_lens)]


@pytest.mark.parametrize("scores", ["logits", "probability"])
def test_a_selection_is_that_of_plain_loops(scores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = TopkRule(topk=3, scores=scores)  # type: ignore[arg-type]
    whole = selected(rule, [(9, 4), (2, 2), (6, 4)], width=3)
    # a short request's lists end in padding
    assert whole[1][0] == [0, -1, -1]
    # blocks of one query choose the same
    monkeypatch.setattr(_hf_exact_scores, "BLOCK_BYTES", 1)
    assert selected(rule, [(9, 4), (2, 2), (6, 4)], width=3) == whole
    assert selected(rule, [(9, 4)], width=5)[0][0][3:] == [-1, -1]


@pytest.mark.parametrize("name", ["masked_mha/torch", "sparse_mla/torch"])
def test_the_selection_of_another_request_shows(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, targets = [PROMPTS[0], PROMPTS[0][::-1]], [(8,), (8,)]
    right = scored(made(folder, **CONVERTED, **KERNELS[name], topk="3"), prompts, targets)
    monkeypatch.setattr(_hf_topk, "exact_selection", lambda *a, **rest: exact_selection(*a, **rest).roll(12, 0))
    wrong = scored(made(folder, **CONVERTED, **KERNELS[name], topk="3"), prompts, targets)
    assert (values(wrong) - values(right)).abs().max() > 1e-2


def test_padded_heads_that_leak_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = _sparse_mla_padded.keep_native_heads

    def leaking(call: Any, padded: Any) -> None:
        keep(call, padded)
        call.out.copy_(padded.out[:, 1 : call.q.shape[1] + 1])

    monkeypatch.setattr(_sparse_mla_padded, "keep_native_heads", leaking)
    wrong = scored(made(folder, **CONVERTED, **KERNELS["sparse_mla/padded"], topk="3"))
    assert (values(wrong) - expected(folder, "probability")).abs().max() > 1e-2


def test_rows_of_the_request_before_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(folder, **CONVERTED, **KERNELS["sparse_mla/torch"], topk="3")
    sparse_mla = vars(_hf_topk)["sparse_mla"]

    def earlier(q: Tensor, kv: Tensor, indices: Tensor, **rest: Any) -> Any:
        return sparse_mla(q, kv, torch.where(indices > 0, indices - 1, indices), **rest)

    monkeypatch.setattr(_hf_topk, "sparse_mla", earlier)
    assert (values(scored(model)) - expected(folder, "probability")).abs().max() > 1e-2


@pytest.mark.parametrize("op", ["masked_mha", "sparse_mla"])
def test_a_kernel_of_ones_own_serves_the_selection(folder: Path, op: str) -> None:
    options = {"attention": op, "provider": "torch", "topk": "3", "step": "5"}
    own = made(folder, **CONVERTED, **options, kernel=f"assay.reference.{op}:{op}")
    found = scored(own)
    torch.testing.assert_close(values(found), expected(folder, "probability"), rtol=0, atol=1e-4)
    assert [one.kernel_calls for one in found] == [{f"prefill/{op}": 3 * steps} for steps in (3, 1, 3)]
    assert own.describe()["kernel"] == f"assay.reference.{op}:{op}"


def test_the_rule_is_described(folder: Path) -> None:
    described = made(folder, **CONVERTED, **KERNELS["sparse_mla/padded"], topk="3").describe()
    assert json.loads(json.dumps(described)) == described
    assert described["topk"] == {"topk": 3, "scores": "probability"}
    assert (described["attention"], described["provider"], described["decode"]) == ("sparse_mla", "padded", "eager")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"attention": "masked_mha"}, ValueError, "topk goes with masked_mha and sparse_mla and no other attention"),
        ({"attention": "mla_prefill", "topk": "3"}, ValueError, "and no other attention, got mla_prefill"),
        ({"attention": "masked_mha", "topk": "0"}, ValueError, "topk must be a number of at least 1, got '0'"),
        ({"attention": "masked_mha", "topk": "3", "scores": "sum"}, ValueError, "scores must be one of logits"),
        ({"attention": "masked_mha", "topk": "3", "budget": "9"}, ValueError, "budget must come with a selection"),
        ({"attention": "masked_mha", "topk": "3", "provider": "padded"}, ValueError, "implementation must be 'auto'"),
        ({"attention": "sparse_mla", "topk": "3", "provider": "gluon"}, NotImplementedError, "a CUDA device is needed"),
        ({"attention": "sparse_mla", "topk": "3", "rope_frequencies": "none"}, NotImplementedError, "must have latent"),
    ],
)
def test_senseless_options_are_refused(
    folder: Path, options: dict[str, str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(folder, **(CONVERTED | options))
