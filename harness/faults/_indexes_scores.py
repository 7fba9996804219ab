"""Faults of ``indexer`` up to a score: relu, weights, causality, precision. And variants."""

from typing import Any

import torch
from torch import Tensor

from ..contract import Contract
from ..plugin import kernel
from ..record import Verdict
from . import planted, variant
from ._indexes import NEVER, Lists, hidden, index_twin, last_key, products, scores

OP = "indexer"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE


@planted(OP, NUMERIC, source="mlx-lm#531: relu left out of a port")
def relu_missing(**arguments: Any) -> Lists:
    """Products below 0 count."""
    return index_twin(arguments, scores=lambda found, weights: torch.einsum("th,ths->ts", weights, found))


@planted(OP, NUMERIC, source="mlx-lm#531: the sum over heads before the relu")
def relu_after_the_sum(**arguments: Any) -> Lists:
    """The weighted sum over heads is cut at 0, instead of each head."""
    return index_twin(arguments, scores=lambda found, weights: torch.einsum("th,ths->ts", weights, found).relu())


@planted(OP, NUMERIC, source="relu of the weighted product")
def relu_after_the_weights(**arguments: Any) -> Lists:
    """Heads of a negative weight count where their product is below 0."""
    return index_twin(arguments, scores=lambda found, weights: (weights[..., None] * found).relu().sum(1))


@planted(OP, NUMERIC, source="absolute value for relu")
def magnitude_of_products(**arguments: Any) -> Lists:
    """Products below 0 count as if they were above."""
    return index_twin(arguments, scores=lambda found, weights: scores(found.abs(), weights))


@planted(OP, NUMERIC, source="another activation")
def gelu_for_relu(**arguments: Any) -> Lists:
    """A smooth form of the relu."""
    smooth = torch.nn.functional.gelu
    return index_twin(arguments, scores=lambda found, w: torch.einsum("th,ths->ts", w, smooth(found)))


@planted(OP, NUMERIC, source="weights ignored")
def heads_of_equal_weight(**arguments: Any) -> Lists:
    """Every head counts once."""
    return index_twin(arguments, scores=lambda found, weights: found.relu().sum(1))


@planted(OP, NUMERIC, source="weights of another query")
def weights_of_the_first_query(**arguments: Any) -> Lists:
    """Every query of a request has the weights of its first that sees a key."""

    def first(found: Tensor, weights: Tensor) -> Tensor:
        known = weights[max(0, len(found) - found.shape[2]) :]
        return scores(found, known[:1].expand_as(weights) if len(known) else weights)

    return index_twin(arguments, scores=first)


@planted(OP, NUMERIC, source="weights taken for positive")
def magnitude_of_weights(**arguments: Any) -> Lists:
    """A negative weight counts as a positive one."""
    return index_twin(arguments, scores=lambda found, weights: scores(found, weights.abs()))


@planted(OP, NUMERIC, source="weights normalised over heads")
def weights_through_a_softmax(**arguments: Any) -> Lists:
    """Weights are made to sum to 1."""
    return index_twin(arguments, scores=lambda found, weights: scores(found, weights.softmax(-1)))


@planted(OP, NUMERIC, source="one head of several")
def first_head_alone(**arguments: Any) -> Lists:
    """The first head is taken for all."""
    return index_twin(arguments, scores=lambda found, weights: scores(found[:, :1], weights[:, :1]))


@planted(OP, NUMERIC, source="the last head of a tile not masked in")
def last_head_lost(**arguments: Any) -> Lists:
    """Heads beyond an even number are left out."""
    heads = max(1, arguments["q"].shape[1] // 2 * 2)
    return index_twin(arguments, scores=lambda found, weights: scores(found[:, :heads], weights[:, :heads]))


@planted(OP, NUMERIC, source="maximum over heads")
def highest_head_alone(**arguments: Any) -> Lists:
    """The maximum over heads for the sum."""
    return index_twin(arguments, scores=lambda found, weights: (weights[..., None] * found.relu()).amax(1))


@planted(OP, NUMERIC, source="scale of the head size applied again")
def scaled_twice(**arguments: Any) -> Lists:
    """The root of the head size divides what the weights have divided: the lists are right, the scores are not."""
    width = arguments["q"].shape[2]
    return index_twin(arguments, products=lambda q, k: products(q, k) * width**-0.5)


@planted(OP, NUMERIC, rows=("F5",), source="the tail of the inner product dropped")
def last_dimensions_dropped(**arguments: Any) -> Lists:
    """Products end at the last whole sixteen dimensions."""
    width = arguments["q"].shape[2]
    kept = max(width // 16 * 16, 1) if width % 16 else width - 1
    return index_twin(arguments, products=lambda q, k: products(q[..., :kept], k[..., :kept]))


@planted(OP, NUMERIC, source="causal off by one")
def next_key_seen(**arguments: Any) -> Lists:
    """Each query sees one key too many."""
    return index_twin(arguments, last_key=lambda n, m: last_key(n, m) + 1)


@planted(OP, NUMERIC, source="causal off by one")
def own_key_hidden(**arguments: Any) -> Lists:
    """A query does not see its own position."""
    return index_twin(arguments, last_key=lambda n, m: last_key(n, m) - 1)


@planted(OP, NUMERIC, rows=("F4",))
def top_left(**arguments: Any) -> Lists:
    """Query ``i`` sees keys ``0 .. i``, however many keys there are."""
    return index_twin(arguments, last_key=lambda n, m: torch.arange(n))


@planted(OP, NUMERIC, source="no mask")
def everything_seen(**arguments: Any) -> Lists:
    """Every query sees every key of its request."""
    return index_twin(arguments, last_key=lambda n, m: torch.full((n,), m))


@planted(OP, NUMERIC, source="whole tiles skipped, the diagonal one not masked")
def seen_to_the_end_of_the_tile(**arguments: Any) -> Lists:
    """A query sees its whole tile of 16 keys."""
    return index_twin(arguments, last_key=lambda n, m: torch.where(last_key(n, m) < 0, -1, last_key(n, m) | 15))


@planted(OP, NUMERIC, source="the second tile of queries")
def later_queries_see_one_more(**arguments: Any) -> Lists:
    """Queries past the first tile of 16 see one key too many."""
    return index_twin(arguments, last_key=lambda n, m: last_key(n, m) + (torch.arange(n) >= 16))


@planted(OP, NUMERIC, source="the second tile of queries, of the usual size")
def queries_past_64_see_one_more(**arguments: Any) -> Lists:
    """Queries past the 64th of a request see one key too many."""
    return index_twin(arguments, last_key=lambda n, m: last_key(n, m) + (torch.arange(n) >= 64))


@planted(OP, NUMERIC, NONFINITE, source="a finite number for what is hidden")
def hidden_keys_score_0(**arguments: Any) -> Lists:
    """The future scores 0, which is more than a negative score."""

    def filled(found: Tensor, last: Tensor) -> Tensor:
        return hidden(found, last).nan_to_num(neginf=0.0)

    return index_twin(arguments, hidden=filled)


@planted(OP, NUMERIC, NONFINITE, source="the smallest number for what is hidden")
def hidden_keys_score_the_least(**arguments: Any) -> Lists:
    """The future scores the smallest finite number, and is listed where nothing else is left."""
    least = torch.finfo(torch.float32).min
    return index_twin(arguments, hidden=lambda found, last: hidden(found, last).clamp(min=least))


@planted(OP, NUMERIC, source="a score of 0 taken for no key")
def scores_of_0_are_no_keys(**arguments: Any) -> Lists:
    """What no head reads is as good as hidden."""

    def lost(found: Tensor, last: Tensor) -> Tensor:
        return hidden(found, last).masked_fill(found == 0, NEVER)

    return index_twin(arguments, hidden=lost)


@planted(OP, NUMERIC, source="a threshold of 0")
def negative_scores_are_no_keys(**arguments: Any) -> Lists:
    """What scores below 0 is as good as hidden."""

    def lost(found: Tensor, last: Tensor) -> Tensor:
        return hidden(found, last).masked_fill(found < 0, NEVER)

    return index_twin(arguments, hidden=lost)


@planted(OP, NUMERIC, source="accumulated in bfloat16")
def heads_summed_in_bfloat16(**arguments: Any) -> Lists:
    """The sum over heads is rounded after each."""

    def rounded(found: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(found.shape[0], found.shape[2], dtype=torch.bfloat16, device=found.device)
        for head in range(found.shape[1]):
            total += (weights[:, head, None] * found[:, head].relu()).bfloat16()
        return total.float()

    return index_twin(arguments, scores=rounded)


@planted(OP, NUMERIC, NONFINITE, source="products kept in half precision")
def products_in_float16(**arguments: Any) -> Lists:
    """Products are rounded to float16, and overflow."""
    return index_twin(arguments, products=lambda q, k: products(q, k).half().float())


@planted(OP, NUMERIC, source="products kept in half precision")
def products_in_bfloat16(**arguments: Any) -> Lists:
    """Products are rounded to bfloat16 before anything else."""
    return index_twin(arguments, products=lambda q, k: products(q, k).bfloat16().float())


@planted(OP, NUMERIC, source="operands cut to tf32")
def operands_cut_to_tf32(**arguments: Any) -> Lists:
    """Float32 operands lose 13 bits, which half precision does not have."""

    def cut(operand: Tensor) -> Tensor:
        return (operand.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    return index_twin(arguments, products=lambda q, k: products(cut(q), cut(k)))


@planted(OP, NUMERIC, source="weights in the dtype of the queries")
def weights_in_bfloat16(**arguments: Any) -> Lists:
    """Weights are rounded to bfloat16."""
    return index_twin({**arguments, "weights": arguments["weights"].bfloat16().float()})


@planted(OP, NUMERIC, source="scores stored in bfloat16")
def scores_in_bfloat16(**arguments: Any) -> Lists:
    """Scores are rounded before the choice, so that many more are equal."""
    return index_twin(arguments, scores=lambda found, weights: scores(found, weights).bfloat16().float())


@variant(OP)
def request_by_request(**arguments: Any) -> Lists:
    """The clean twin."""
    return index_twin(arguments)


@variant(OP)
def heads_one_by_one_from_the_last(**arguments: Any) -> Lists:
    """Heads are added in the other order, and keys multiplied in tiles of 7."""

    def backwards(found: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(found.shape[0], found.shape[2], device=found.device)
        for head in reversed(range(found.shape[1])):
            total = total + found[:, head].relu() * weights[:, head, None]
        return total

    def tiles(q: Tensor, k: Tensor) -> Tensor:
        return torch.cat([products(q, part) for part in k.split(7)] or [products(q, k)], dim=-1)

    return index_twin(arguments, products=tiles, scores=backwards)


@variant(OP)
def weights_folded_into_the_queries(**arguments: Any) -> Lists:
    """``w relu(x)`` as ``sign(w) relu(|w| x)``: the weight is multiplied in before the product is summed."""

    def folded(found: Tensor, weights: Tensor) -> Tensor:
        return (torch.sign(weights)[..., None] * (weights.abs()[..., None] * found).relu()).sum(1)

    return index_twin(arguments, scores=folded)


@variant(OP)
def halves_of_the_product(**arguments: Any) -> Lists:
    """Inner products in two halves, the second one first; in float64 from there on."""

    def halved(q: Tensor, k: Tensor) -> Tensor:
        middle = q.shape[-1] // 2
        return products(q[..., middle:], k[..., middle:]) + products(q[..., :middle], k[..., :middle])

    def wide(found: Tensor, weights: Tensor) -> Tensor:
        return scores(found.double(), weights.double()).float()

    return index_twin(arguments, products=halved, scores=wide)


@variant(OP)
@kernel(contract=Contract(p="fp32", out="fp32", logits="bf16"))
def products_declared_in_bfloat16(**arguments: Any) -> Lists:
    """Products rounded to bfloat16, and said to be."""
    return index_twin(arguments, products=lambda q, k: products(q, k).bfloat16().float())


@variant(OP)
@kernel(contract=Contract(p="fp32", out="fp32", inputs="bf16"))
def inputs_declared_in_bfloat16(**arguments: Any) -> Lists:
    """All inputs rounded to bfloat16, and said to be."""
    rounded = {name: arguments[name].bfloat16().float() for name in ("q", "k", "weights")}
    return index_twin({**arguments, **rounded})
