"""Sparse decoding: what stays in the cache, against the whole cache under a mask that plain loops worked out."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="the extra `model` is not installed")
pytest.importorskip("tokenizers", reason="the extra `model` is not installed")

from tiny_models import PROMPTS, TARGETS, generated, made, save_llama, scored, values  # noqa: E402

from assay.eval.models import _hf_selection  # noqa: E402
from assay.eval.models._hf_selection import Selection  # noqa: E402

LATENT = {"rope_frequencies": "2", "attention": "mla_prefill", "chunk": "3", "step": "4"}
SNAPKV = {"selection": "snapkv", "budget": "6", "sink": "1", "window": "3", "recent": "2", "pool": "3"}
H2O = {"selection": "h2o", "budget": "6", "sink": "1", "recent": "2"}
RULES = [rule | {"scores": scores} for rule, scores in itertools.product((SNAPKV, H2O), ("logits", "probability"))]
NAMES = ["snapkv_logits", "snapkv_probability", "h2o_logits", "h2o_probability"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


def best(rule: dict[str, str], q: Tensor, k: Tensor, scale: float) -> list[int]:
    """Positions that stay, token by token; queries and keys of a prompt are ``[H, L, D]``."""
    heads, length, _ = q.shape
    raw = (q @ k.transpose(1, 2)).tolist()
    weights = [[softmax([scale * raw[h][t][s] for s in range(t + 1)]) for t in range(length)] for h in range(heads)]

    def score(s: int, queries: range) -> float:
        if rule["scores"] == "logits":
            return max((raw[h][t][s] for h in range(heads) for t in queries if t >= s), default=-math.inf)
        return max(sum(weights[h][t][s] for t in queries if t >= s) / len(queries) for h in range(heads))

    if rule["selection"] == "snapkv":
        queries = range(max(0, length - int(rule["window"])), length)
        scores = [score(s, queries) for s in range(length)]
    else:
        scores = [0.0] * length
        step = int(LATENT["step"])
        stops = list(range(length, 0, -step))
        for stop in reversed(stops):
            queries = range(max(0, stop - step), stop)
            part = [score(s, queries) for s in range(stop)]
            part = softmax(part) if rule["scores"] == "logits" else part
            scores = [scores[s] + len(queries) * (part[s] if s < stop else 0.0) for s in range(length)]
    budget, sink, recent, reach = *(int(rule[name]) for name in ("budget", "sink", "recent")), int(rule.get("pool", 1))
    if length <= budget:
        return list(range(length))
    between = range(sink, length - recent)
    pooled = {s: max(scores[r] for r in between if abs(r - s) <= reach // 2) for s in between}
    chosen = sorted(between, key=lambda s: (-pooled[s], s))[: budget - sink - recent]
    return sorted([*range(sink), *chosen, *range(length - recent, length)])


def softmax(row: list[float]) -> list[float]:
    highest = max(row)
    terms = [math.exp(one - highest) for one in row]
    return [one / sum(terms) for one in terms]


def masked(folder: Path, rule: dict[str, str], prompt: tuple[int, ...], behind: tuple[int, ...]) -> Tensor:
    """Log-probabilities ``[L + n, vocabulary]`` of one float64 pass, in which later tokens see what stays alone."""
    network = made(folder, rope_frequencies=LATENT["rope_frequencies"])._network.double()
    length, dropped = len(prompt), []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        logits = options["scaling"] * query[0] @ key[0].transpose(1, 2)
        tokens = torch.arange(logits.shape[1])
        hidden = tokens > tokens[:, None]
        stays = best(rule, query[0, :, :length], key[0, :, :length], options["scaling"])
        gone = [at for at in range(length) if at not in stays]
        hidden[length:, gone] = True
        dropped.append(len(gone))
        return (logits.masked_fill(hidden, -torch.inf).softmax(-1) @ value[0]).transpose(0, 1)[None], None

    transformers.AttentionInterface.register("loops", attend)
    network.set_attn_implementation("loops")
    with torch.no_grad():
        found: Tensor = network(torch.tensor([prompt + behind])).logits[0].log_softmax(-1)
    assert dropped == [max(0, length - int(rule["budget"]))] * 3
    return found


def expected(folder: Path, rule: dict[str, str]) -> Tensor:
    """Of prompts and targets, one pair after the other."""
    parts = []
    for prompt, target in zip(PROMPTS, TARGETS, strict=True):
        shares = masked(folder, rule, prompt, target)
        parts.append(shares[:-1].gather(1, torch.tensor(prompt + target)[1:, None])[:, 0])
    return torch.cat(parts)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_targets_are_scored_as_if_the_others_were_masked(folder: Path, rule: dict[str, str]) -> None:
    found = scored(made(folder, **LATENT, **rule))
    assert [(len(one.prompt), len(one.target)) for one in found] == [(10, 3), (2, 2), (6, 4)]
    torch.testing.assert_close(values(found), expected(folder, rule), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_answers_are_the_likeliest_of_what_stays(folder: Path, rule: dict[str, str]) -> None:
    for prompt, answer in zip(PROMPTS, generated(made(folder, **LATENT, **rule), min_new_tokens=6), strict=True):
        shares = masked(folder, rule, prompt, answer.ids)[len(prompt) - 1 : -1]
        # the end of a sequence may not come before its time
        shares[:5, -1] = -torch.inf
        assert shares.argmax(-1).tolist() == list(answer.ids)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_batch_of_uneven_lengths_answers_as_single_prompts_do(folder: Path, rule: dict[str, str]) -> None:
    model = made(folder, **LATENT, **rule)
    alone = [answer for prompt in PROMPTS for answer in generated(model, [prompt])]
    together = generated(model)
    assert [one.ids for one in together] == [one.ids for one in alone]
    assert [one.kernel_calls for one in together] == [one.kernel_calls for one in alone]
    singles = [one for pair in zip(PROMPTS, TARGETS, strict=True) for one in scored(model, [pair[0]], [pair[1]])]
    torch.testing.assert_close(values(scored(model)), values(singles), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", RULES, ids=NAMES)
def test_a_budget_of_the_longest_prompt_changes_no_bit(folder: Path, rule: dict[str, str]) -> None:
    whole, kept = made(folder, **LATENT), made(folder, **LATENT, **(rule | {"budget": "11"}))
    assert [(one.ids, one.gaps) for one in generated(kept)] == [(one.ids, one.gaps) for one in generated(whole)]
    torch.testing.assert_close(values(scored(kept)), values(scored(whole)), rtol=0, atol=1e-5)
    less = made(folder, **LATENT, **(rule | {"budget": "4"}))
    assert [one.gaps for one in generated(less)] != [one.gaps for one in generated(whole)]


def test_every_selection_is_counted_and_described(folder: Path) -> None:
    model = made(folder, **LATENT, **RULES[0])
    answers = generated(model, min_new_tokens=6)
    assert [one.kernel_calls for one in answers] == [
        {
            "prefill/mla_prefill": 3 * steps, "scores/token_scores/torch": 3, "select/snapkv_logits": 3,
            "decode/eager": 3 * 5,
        }
        for steps in (3, 1, 2)
    ]  # fmt: skip
    # every step of a prompt is scored, and no step before it began
    steps = [one.kernel_calls["scores/token_scores/torch"] for one in generated(made(folder, **LATENT, **RULES[3]))]
    assert steps == [3 * 3, 3 * 1, 3 * 2]
    # of two targets the first is known when the prompt was read
    calls = scored(model, [PROMPTS[0]] * 2, [(8,), (8, 2)])
    assert [one.kernel_calls.get("decode/eager", 0) for one in calls] == [0, 3]
    assert [one.kernel_calls["select/snapkv_logits"] for one in calls] == [3, 3]
    described = model.describe()
    assert json.loads(json.dumps(described)) == described
    assert described["selection"] == {
        "method": "snapkv", "scores": "logits", "budget": 6, "sink": 1, "recent": 2, "window": 3, "pool": 3,
    }  # fmt: skip
    assert "selection" not in made(folder, **LATENT).describe()


def test_positions_that_were_not_kept_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(folder, **LATENT, **RULES[1])
    forward: Callable[..., Tensor] = model._forward

    def recounted(ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, keep: int) -> Tensor:
        left = cache.get_seq_length()
        return forward(ids, mask, positions.clamp(max=left) if left == 6 else positions, cache, keep=keep)

    monkeypatch.setattr(model, "_forward", recounted)
    assert (values(scored(model)) - expected(folder, RULES[1])).abs().max() > 1e-2


def test_the_selection_of_another_request_shows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, targets = [PROMPTS[0], PROMPTS[0][::-1]], TARGETS[:2]
    model = made(folder, **LATENT, **RULES[1])
    right = values(scored(model, prompts, targets))
    choose = vars(_hf_selection)["token_selection"]
    monkeypatch.setattr(_hf_selection, "token_selection", lambda scores, **rest: choose(scores.flip(0), **rest))
    assert (values(scored(model, prompts, targets)) - right).abs().max() > 1e-3


def test_scores_of_the_wrong_kind_show(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = vars(_hf_selection)["plan_token_scores"]
    wrong = {"mode": "logits"}
    monkeypatch.setattr(_hf_selection, "plan_token_scores", lambda step, **rest: plan(step, **(rest | wrong)))
    difference = values(scored(made(folder, **LATENT, **RULES[1]))) - expected(folder, RULES[1])
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "tova", "budget": "9"}, "selection must be one of snapkv, h2o, got 'tova'"),
        ({"selection": "snapkv"}, "budget must be a number of at least 1, got ''"),
        (SNAPKV | {"budget": "3"}, r"budget must be more than the 1 \+ 2 tokens that always stay, got 3"),
        (SNAPKV | {"scores": "weights"}, "scores must be one of logits, probability, got 'weights'"),
        (SNAPKV | {"pool": "2"}, "pool must be odd, got 2"),
        (SNAPKV | {"window": "0"}, "window must be at least 1, got 0"),
        (SNAPKV | {"window": "5"}, "window must be at most step, since the last step is observed, got 5 and 4"),
        (H2O | {"window": "3"}, "h2o observes every token and pools none, got window 3 and pool 1"),
        ({"budget": "9", "scores": "logits"}, "budget, scores must come with a selection, and got none"),
        (SNAPKV | {"topk": "3"}, "selection and topk must not come together, got snapkv and 3"),
        (SNAPKV | {"attention": "eager"}, "selection needs the scores of mla_prefill of the house, got eager"),
        (SNAPKV | {"kernel": "mine.py:fn"}, "selection needs the scores of mla_prefill of the house, got mine.py:fn"),
    ],
)
def test_senseless_options_are_refused(folder: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(folder, **(LATENT | options))


def test_a_cache_without_the_whole_prompt_is_refused() -> None:
    rule = Selection(method="h2o", scores="probability", budget=2, sink=0, recent=1, window=0, pool=1)
    observed = _hf_selection.Observed(rule, [0], 4, print)
    observed._scores[0] = torch.ones(1, 4)
    cache = transformers.DynamicCache()
    cache.update(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 2), 0)
    with pytest.raises(NotImplementedError, match="a cache must hold the 4 tokens of a prompt, got 3"):
        observed.keep(cache)
