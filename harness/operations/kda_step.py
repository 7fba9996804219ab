"""The operation ``kda_step``: decode and speculative steps of Kimi Delta Attention, in place on a pool of states."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from ...optimized.kda_step import STEP_IMPLEMENTATIONS, kda_step, plan_kda_step
from ..answers import Answer, dtype_of
from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..metamorphic.rearranged import Rearranged
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..poison import Ledger
from ._kda_inputs import EXACT, NEAR_EXACT, TOKENS, drawn_tokens, layer_arguments
from ._kda_recurrence import Tokens, layer_of
from ._kda_step_cases import kda_step_cases
from ._kda_step_gates import StepOracle, judge_step
from ._kda_step_inputs import pool_of, table_of
from ._kda_step_relations import ask_step
from .kda import LAYER, judged_heads, shape_of, signed_arguments

TABLES = ("cu_seqlens", "slot_table", "num_accepted")
# programs of the interpreter of Triton at a call
INTERPRETED_TOKENS = 12


class KdaStep:
    """See ``harness.operation.Operation``; the oracle is ``reference.kda_step.kda_step``."""

    name = "kda_step"
    arguments: tuple[str, ...] = (*TOKENS, *LAYER, *TABLES, "state_pool", "state_layout")
    optional_arguments: tuple[str, ...] = ("state_layout",)
    results: tuple[str, ...] = ("out", "state_pool")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_kda_step_cases``."""
        return kda_step_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tokens, tables with all slots in no order, and a pool of NaN but for what is started from."""
        sizes, ledger, found, table = case.sizes, Ledger(), drawn_tokens(case), table_of(case)
        arguments = layer_arguments(case, found, ledger, device)
        dtype = dtype_of(sizes["offsets"])
        offsets = [0, *itertools.accumulate(sizes["seq_lens"])]
        tables = dict(zip(TABLES, (offsets, table.rows, table.accepted), strict=True))
        for name, values in tables.items():
            given = None if values is None else torch.tensor(values, dtype=dtype)
            arguments[name] = None if given is None else ledger.guarded(name, given, device)
        arguments["state_pool"] = pool_of(case, table, found["initial"], ledger, device)
        return Inputs(arguments=arguments | {"state_layout": sizes["state_layout"]}, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """Outputs of all rows; the pool, which is written."""
        sizes, table, lens = case.sizes, table_of(case), case.sizes["seq_lens"]
        heads, d_k, d_v = sizes["num_v_heads"], sizes["head_dim_k"], sizes["head_dim_v"]
        out, pool = (sum(lens) + sizes["tail"], heads, d_v), (table.num_slots, heads, d_k, d_v)
        axes = ("slot", "head", "channel", "dim")
        return Outline(
            results=(
                Result(name="out", shape=out, axes=("token", "head", "dim"), field="out"),
                Result(name="state_pool", shape=pool, axes=axes, field="state_store", in_place=True),
            ),
            follows_contents=any(n and start >= 0 for n, start in zip(lens, table.starts, strict=True)),
            signed=signed_arguments(case),
        )

    def oracle(self, case: Case, arguments: dict[str, Any]) -> StepOracle:
        """The recurrence of the sequences that start from a slot, ready to be perturbed."""
        table, lens = table_of(case), case.sizes["seq_lens"]
        pool, device = arguments["state_pool"], arguments["v"].device
        heads = judged_heads(case, device)
        bounds = [0, *itertools.accumulate(lens)]
        active = [at for at, start in enumerate(table.starts) if start >= 0]
        parts = [torch.arange(bounds[at], bounds[at + 1]) for at in active]
        rows = torch.cat([torch.arange(0), *parts]).to(device)
        place = {sequence: at for at, sequence in enumerate(active)}
        writes = table.writes(lens)
        starts = torch.tensor([table.starts[at] for at in active], dtype=torch.int64, device=device)
        tokens = {name: x[rows] for name, x in zip(TOKENS, layer_of(arguments, heads), strict=True)}
        return StepOracle(
            tokens=Tokens(
                **tokens,
                initial=pool[starts][:, heads].double(),
                scale=arguments["scale"],
                gated=arguments["gate"] != "log",
                bounds=(0, *itertools.accumulate(lens[at] for at in active)),
                kept=tuple((place[sequence], token + 1) for sequence, token, _ in writes),
            ),
            heads=heads,
            rows=rows,
            slots=torch.tensor([slot for *_, slot in writes], dtype=torch.int64, device=device),
            before=pool.clone(),
            dtype=case.dtype,
            seed=case.seed % 1009,
            exact={EXACT: "bits", NEAR_EXACT: "near"}.get(case.family),
        )

    def judge(self, case: Case, oracle: StepOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_kda_step_gates``."""
        return judge_step(oracle, answer, contract)

    def ask_again(
        self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract
    ) -> Rearranged | None:
        """See ``_kda_step_relations``."""
        return ask_step(case, arguments, ask, first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Operands and outputs in the dtype of the inputs; a state in float32 from token to token."""
        stored = PRECISION_OF_DTYPE[case.dtype]
        store = PRECISION_OF_DTYPE[case.sizes["state_dtype"]]
        return Contract(p=stored, out=stored, state="fp32", state_store=store, mutates=("state_pool",))

    def kernels(self) -> list[Kernel]:
        """Both implementations of the house."""
        return [_kernel(name) for name in STEP_IMPLEMENTATIONS]


def _kernel(name: str) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        a, pool = arguments, arguments["state_pool"]
        shape = shape_of(a | {"state_dtype": pool.dtype})
        plan = plan_kda_step(*(a[key] for key in TABLES), shape=shape, num_slots=len(pool), implementation=name)
        tokens, named = [a[key] for key in TOKENS], {key: a[key] for key in ("scale", "A_log", "dt_bias")}
        own = pool.mT if a["state_layout"] == "VK" else pool
        return lambda: kda_step(*tokens, **named, state_pool=own, plan=plan)[0]

    def unsupported(case: Case, device: torch.device) -> str | None:
        return None if name == "torch" else _refusal(case, device)

    def contract(case: Case) -> Contract:
        # float32 throughout
        return OPERATION.default_contract(case).promising(p="fp32", capturable=name == "triton")

    return Kernel(name=f"kda_step[{name}]", contract=contract, bind=bind, unsupported=unsupported)


def _refusal(case: Case, device: torch.device) -> str | None:
    if device.type != "cpu":
        return None
    sizes = case.sizes
    if "bfloat16" in (case.dtype, sizes["state_dtype"]):
        return "a Triton kernel on bfloat16 tensors needs a GPU: the interpreter computes bfloat16 wrongly"
    tokens = sizes["num_v_heads"] * sum(sizes["seq_lens"])
    if tokens <= INTERPRETED_TOKENS:
        return None
    return f"interpreted on the CPU, {tokens} tokens are more than the {INTERPRETED_TOKENS} that fit the time"


OPERATION = KdaStep()
