"""Calls of the gated delta rule, and how far their answers are from the oracle: the judge's bounds, relative errors."""

from typing import Any

import torch
from builders import in_dtype
from torch import Tensor

from assay.harness.contract import PRECISION_OF_DTYPE, Contract, Precision
from assay.harness.operations._kda_gates import KdaOracle, judge_kda
from assay.harness.operations._kda_recurrence import Tokens, layer_of
from assay.optimized.kda import KdaShape, kda, plan_kda, plan_kda_batch
from assay.reference.kda import kda as kda_oracle

TOKENS = ("q", "k", "v", "g", "beta")
# what the oracle's caller may leave out
LAYER: dict[str, Any] = {"A_log": None, "dt_bias": None, "lower_bound": None, "beta_is_logits": True, "qk_l2norm": True}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
# to which the kernels for any gate round what they multiply: float16 has as many bits as tf32
OPERANDS: dict[str, Precision] = {"float32": "fp32", "float16": "fp16", "bfloat16": "tf32"}


def tokens_of(given: dict[str, Any]) -> Tokens:
    """What the perturbed recurrence takes, from arguments of the oracle."""
    named = dict(zip(TOKENS, layer_of(LAYER | given), strict=True))
    end = int(given["cu_seqlens"][-1])
    kept = given["checkpoints"].tolist() if given.get("checkpoints") is not None else []
    return Tokens(
        **{name: value[:end] for name, value in named.items()},
        initial=given["initial_state"].double(),
        scale=given["scale"],
        gated=given.get("gate", "bounded") != "log",
        bounds=tuple(given["cu_seqlens"].tolist()),
        kept=tuple((owner, count) for owner, count in kept),
    )


def failures(
    given: dict[str, Any], answer: tuple[Tensor, Tensor, Tensor], *, operand: Precision = "fp32"
) -> dict[str, float]:
    """Gates that an answer ``(out, final_state, checkpoint_states)``, states K-first, does not pass."""
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
    dtypes = [DTYPE_NAMES[x.dtype] for x in (given["q"], *answer[:2])]
    oracle = KdaOracle(tokens=tokens_of(given), heads=range(given["v"].shape[1]), dtype=dtypes[0], seed=1)
    out, state = (PRECISION_OF_DTYPE[name] for name in dtypes[1:])
    contract = Contract(p=operand, out=out, state="fp32", state_store=state)
    judged = judge_kda(oracle, tuple(x.cpu() for x in answer), contract)
    return {gate.gate: gate.ratio for gate in judged.gates if not gate.passed}


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
