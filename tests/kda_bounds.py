"""How far an honest kernel may be from the oracle of the gated delta rule: the perturbed recurrence, and its gates."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from builders import in_dtype
from torch import Tensor

from assay.harness.contract import PRECISION_OF_DTYPE, Precision
from assay.harness.perturbed import Rounded, Spread, perturbed_gates, perturbed_oracle
from assay.optimized.kda import KdaShape, kda, plan_kda, plan_kda_batch
from assay.reference.kda import kda as kda_oracle
from assay.reference.kda import transformed

TOKENS = ("q", "k", "v", "g", "beta")
LAYER = ("gate", "A_log", "dt_bias", "lower_bound", "beta_is_logits", "qk_l2norm")
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
# operands of products meet them in the kernel's format; the rest is float32
OPERANDS = ("query", "key", "value", "recalled", "error", "read")
OTHERS = ("gate", "write", "norm", "sum", "state")
# float32 roundoffs by which an exponential, a root or a quotient may err: PTX documents 2^-22 for the approximations
ELEMENTARY = 4.0
# tokens of the longest chunk: a rounded write of the chunk is seen by its outputs, but its predictions were made before
CHUNK = 64


def coarse(rounded: Rounded, site: str, value: Tensor, roundoffs: float) -> Tensor:
    """A value with so many times the noise of its site."""
    return value + roundoffs * (rounded(site, value) - value)


def recurrence(given: dict[str, Any]) -> Callable[[Rounded], dict[str, Tensor]]:
    """The rule in float64 on the stored inputs, with a place for a rounding at each operand and state."""
    wide = in_dtype(given, torch.float64)
    layer: dict[str, Any] = {
        "A_log": None,
        "dt_bias": None,
        "lower_bound": None,
        "beta_is_logits": True,
        "qk_l2norm": True,
    }
    layer |= {name: wide[name] for name in LAYER if name in wide}
    q, k, g, beta = transformed(wide["q"], wide["k"], wide["g"], wide["beta"], **layer)
    # a sum of D products errs like a random walk, by about sqrt(D) roundoffs of the root of its squared terms
    terms = q.shape[2] ** 0.5
    bounds = wide["cu_seqlens"].tolist()
    wanted = given["checkpoints"].tolist() if given.get("checkpoints") is not None else []

    def run(rounded: Rounded) -> dict[str, Tensor]:
        out, finals = torch.zeros_like(wide["v"]), []
        kept = wide["initial_state"].new_zeros(len(wanted), *wide["initial_state"].shape[1:])
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            state = wide["initial_state"][n]
            power, unseen = state.square(), torch.zeros_like(state)
            for t in range(start, stop + 1):
                if (t - start) % CHUNK == 0 or t == stop:
                    state, unseen = state + unseen, torch.zeros_like(unseen)
                for index, place in enumerate(wanted):
                    if place == [n, t - start]:
                        kept[index] = state + unseen
                if t == stop:
                    break
                decay = coarse(rounded, "gate", g[t], ELEMENTARY).exp()[:, :, None]
                state, unseen = decay * state, decay * unseen
                one = torch.ones_like(beta[t])[:, None]
                query = rounded("query", q[t]) * coarse(rounded, "norm", one, ELEMENTARY)
                key = rounded("key", k[t]) * coarse(rounded, "norm", one, ELEMENTARY)
                # a chunk adds its writes up when it reads them, so its sums err in proportion to the writes
                power = power * g[t].exp().square()[:, :, None]
                size = power.sqrt()
                recalled = rounded("recalled", state) + coarse(rounded, "sum", size, terms) - size
                told = torch.einsum("hkv,hk->hv", recalled, key)
                write = coarse(rounded, "write", beta[t], ELEMENTARY)[:, None]
                error = write * (rounded("value", wide["v"][t]) - told)
                unseen = unseen + key[:, :, None] * (rounded("error", error) - error)[:, None]
                state = rounded("state", state + key[:, :, None] * error[:, None])
                power = power + (key[:, :, None] * error[:, None]).square()
                size = power.sqrt()
                read = rounded("read", state + unseen) + coarse(rounded, "sum", size, terms) - size
                out[t] = wide["scale"] * torch.einsum("hkv,hk->hv", read, query)
            finals.append(state)
        return {"out": out[: bounds[-1]], "final state": torch.stack(finals), "checkpoints": kept}

    return run


def spreads(given: dict[str, Any], operand: Precision) -> dict[str, Spread]:
    """The perturbed oracle for a kernel whose products take operands of that format."""
    sites: dict[str, Precision] = dict.fromkeys(OPERANDS, operand) | dict.fromkeys(OTHERS, "fp32")
    return perturbed_oracle(recurrence(given), sites, seed=1)


def failures(
    given: dict[str, Any], answer: tuple[Tensor, Tensor, Tensor], *, operand: Precision = "fp32"
) -> dict[str, float]:
    """Gates that an answer ``(out, final_state, checkpoint_states)``, states K-first, does not pass."""
    bounds = given["cu_seqlens"].tolist()
    out, final, kept = (x.cpu() for x in answer)
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
    state = PRECISION_OF_DTYPE[DTYPE_NAMES[final.dtype]]
    gates = perturbed_gates(
        {"out": out[: bounds[-1]], "final state": final, "checkpoints": kept},
        spreads(given, operand),
        stored={"out": PRECISION_OF_DTYPE[DTYPE_NAMES[out.dtype]], "final state": state, "checkpoints": state},
        sequences=[slice(start, stop) for start, stop in itertools.pairwise(bounds)],
    )
    return {gate.gate: gate.ratio for gate in gates if not gate.ratio <= 1.0}


def shape_of(given: dict[str, Any], **options: Any) -> KdaShape:
    """The planned shape of some arguments of the oracle."""
    sizes: dict[str, Any] = {"num_heads": given["q"].shape[1], "num_v_heads": given["v"].shape[1]}
    sizes |= {"head_dim_k": given["q"].shape[2], "head_dim_v": given["v"].shape[2]}
    sizes |= {name: given[name] for name in ("gate", "lower_bound", "beta_is_logits", "qk_l2norm") if name in given}
    sizes |= {"device": given["q"].device, "dtype": given["q"].dtype, "state_dtype": given["initial_state"].dtype}
    return KdaShape(**sizes | options)


def call(
    given: dict[str, Any], implementation: str, *, shape: dict[str, Any] | None = None, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Plan and call with a workspace of NaN; arguments are those of the oracle."""
    checkpoints = given.get("checkpoints")
    plan = plan_kda(
        shape_of(given, **shape or {}),
        max_tokens=len(given["q"]),
        max_sequences=len(given["cu_seqlens"]) - 1,
        max_checkpoints=0 if checkpoints is None else len(checkpoints),
        implementation=implementation,
    )
    plan.workspace.fill_(255)
    batch = plan_kda_batch(given["cu_seqlens"], plan=plan, checkpoints=checkpoints)
    named: dict[str, Any] = {name: given.get(name) for name in ("A_log", "dt_bias", "initial_state")} | options
    return kda(*(given[name] for name in TOKENS), scale=given["scale"], batch=batch, **named)


def relative_errors(given: dict[str, Any], answer: tuple[Tensor, Tensor, Tensor]) -> list[float]:
    """Root mean square of the error of output, final and kept states over that of the oracle's answer; 0 of nothing."""
    bounds = given["cu_seqlens"].tolist()
    exact = kda_oracle(**in_dtype(given, torch.float64))
    errors = []
    for got, expected in zip((answer[0][: bounds[-1]], *answer[1:]), (exact[0][: bounds[-1]], *exact[1:]), strict=True):
        error = (got.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        errors.append(float(error) if expected.numel() else 0.0)
    return errors
