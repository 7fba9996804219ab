"""The operation ``kda``: Kimi Delta Attention over packed sequences, from and to states in memory."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

from ...optimized.kda import IMPLEMENTATIONS, KdaShape, find_implementation, kda, plan_kda, plan_kda_batch
from ..answers import Answer, dtype_of
from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..operation import Ask, CaseRequest, Inputs, Judged, Kernel, Outline, Result
from ..perturbed import FEWEST_RUNS
from ..poison import Ledger
from ._kda_cases import kda_cases
from ._kda_gates import KdaOracle, judge_kda
from ._kda_inputs import EXACT, NEAR_EXACT, TOKENS, drawn_tokens, layer_arguments, poisoned_sequences, states
from ._kda_recurrence import Tokens, layer_of
from ._kda_relations import ask_kda

LAYER = ("scale", "gate", "A_log", "dt_bias", "lower_bound", "beta_is_logits", "qk_l2norm")
# bytes of the states of all runs of the perturbed oracle; heads are sampled above it
STATE_BYTES = {"cpu": 1 << 28, "cuda": 1 << 27}
# of both kinds, and the one without noise
RUNS = 2 * FEWEST_RUNS + 1
# chunks of a head that the interpreter of Triton may take: some tenths of a second each, at every call
INTERPRETED_CHUNKS = 2
INTERPRETED_CHUNK = 32
# as libraries call what they do, which is judged by name
LIBRARIES = ("fla", "flashkda")


class Kda:
    """See ``harness.operation.Operation``; the oracle is ``reference.kda.kda``."""

    name = "kda"
    arguments: tuple[str, ...] = (
        *TOKENS,
        *LAYER,
        "cu_seqlens",
        "initial_state",
        "checkpoints",
        "state_dtype",
        "state_layout",
    )
    optional_arguments: tuple[str, ...] = ("state_dtype", "state_layout")
    results: tuple[str, ...] = ("out", "final_state", "checkpoint_states")

    def cases(self, request: CaseRequest) -> list[Case]:
        """See ``_kda_cases``."""
        return kda_cases(request, self.name)

    def inputs(self, case: Case, device: torch.device) -> Inputs:
        """Packed tokens, parameters, states seen keys first whatever their memory, places of checkpoints."""
        sizes, ledger, found = case.sizes, Ledger(), drawn_tokens(case)
        arguments = layer_arguments(case, found, ledger, device)
        offsets = torch.tensor([0, *itertools.accumulate(sizes["seq_lens"])], dtype=dtype_of(sizes["offsets"]))
        arguments["cu_seqlens"] = ledger.guarded("cu_seqlens", offsets, device)
        initial = states("initial_state", found["initial"], case, ledger, device) if sizes["initial"] else None
        kept = torch.tensor(checkpoints_of(case), dtype=torch.int32).view(-1, 2)
        arguments["checkpoints"] = ledger.guarded("checkpoints", kept, device) if len(kept) else None
        arguments |= {"initial_state": initial, "state_dtype": dtype_of(sizes["state_dtype"])}
        return Inputs(arguments=arguments | {"state_layout": sizes["state_layout"]}, ledger=ledger)

    def outline(self, case: Case) -> Outline:
        """Outputs of all rows, a state a sequence, and those kept on the way."""
        sizes, lens = case.sizes, case.sizes["seq_lens"]
        state = sizes["num_v_heads"], sizes["head_dim_k"], sizes["head_dim_v"]
        out = sum(lens) + sizes["tail"], sizes["num_v_heads"], sizes["head_dim_v"]
        axes, stored = ("head", "channel", "dim"), "state_store"
        kept = len(checkpoints_of(case))
        return Outline(
            results=(
                Result(name="out", shape=out, axes=("token", "head", "dim"), field="out"),
                Result(name="final_state", shape=(len(lens), *state), axes=("request", *axes), field=stored),
                Result(name="checkpoint_states", shape=(kept, *state), axes=("position", *axes), field=stored),
            ),
            follows_contents=sum(lens) > 0,
            signed=signed_arguments(case),
        )

    def oracle(self, case: Case, arguments: dict[str, Any]) -> KdaOracle:
        """The recurrence of the judged heads, ready to be perturbed."""
        device = arguments["v"].device
        heads = judged_heads(case, device)
        tokens = [x.nan_to_num(nan=0.0) for x in layer_of(arguments, heads)]
        sizes = case.sizes
        shape = len(sizes["seq_lens"]), len(heads), sizes["head_dim_k"], sizes["head_dim_v"]
        initial = arguments["initial_state"]
        start = (
            torch.zeros(shape, dtype=torch.float64, device=device) if initial is None else initial[:, heads].double()
        )
        named = dict(zip(TOKENS, tokens, strict=True))
        kept = () if arguments["checkpoints"] is None else tuple(map(tuple, arguments["checkpoints"].tolist()))
        bounds, gated = tuple(arguments["cu_seqlens"].tolist()), arguments["gate"] != "log"
        return KdaOracle(
            tokens=Tokens(**named, initial=start, scale=arguments["scale"], bounds=bounds, gated=gated, kept=kept),
            heads=heads,
            dtype=case.dtype,
            seed=case.seed % 1009,
            undefined=poisoned_sequences(case),
            exact={EXACT: "bits", NEAR_EXACT: "near"}.get(case.family),
        )

    def judge(self, case: Case, oracle: KdaOracle, answer: Answer, contract: Contract) -> Judged:
        """See ``_kda_gates``."""
        return judge_kda(oracle, answer, contract)

    def ask_again(self, case: Case, arguments: dict[str, Any], ask: Ask, first: Answer, contract: Contract) -> Any:
        """See ``_kda_relations``."""
        return ask_kda(case, arguments, ask, first, contract)

    def default_contract(self, case: Case) -> Contract:
        """Operands of products and outputs in the dtype of the inputs; a state in float32 on chip."""
        stored = PRECISION_OF_DTYPE[case.dtype]
        return Contract(p=stored, out=stored, state="fp32", state_store=PRECISION_OF_DTYPE[case.sizes["state_dtype"]])

    def kernels(self) -> list[Kernel]:
        """The implementations of the house, then libraries by name."""
        return [_kernel(name) for name in IMPLEMENTATIONS]


def signed_arguments(case: Case) -> tuple[str, ...]:
    """What grows nothing as it is, and might with another sign: a log decay, a strength."""
    given = {"g": case.sizes["gate"] == "log", "beta": not case.sizes["beta_is_logits"]}
    return tuple(name for name, is_final in given.items() if is_final)


def checkpoints_of(case: Case) -> list[tuple[int, int]]:
    """``(sequence, tokens)``: within a chunk and at its end, the first and the last state, one twice, one of none."""
    lens = case.sizes["seq_lens"]
    if case.sizes["checkpoints"] == "none":
        return []
    longest = max(range(len(lens)), key=lens.__getitem__)
    found = [(longest, lens[longest] // 2), (longest, min(64, lens[longest])), (longest, lens[longest])]
    return [*found, (lens.index(min(lens)), 0), (len(lens) - 1, lens[-1]), found[0]]


def judged_heads(case: Case, device: torch.device) -> list[int]:
    """All value heads, or the first, the last, and as many others as the memory of the oracle's runs has room for."""
    sizes = case.sizes
    head = 8 * RUNS * len(sizes["seq_lens"]) * sizes["head_dim_k"] * sizes["head_dim_v"]
    total, room = sizes["num_v_heads"], max(2, STATE_BYTES[device.type] // head)
    if room >= total:
        return list(range(total))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(case.seed)).tolist()
    return sorted(list(dict.fromkeys([0, total - 1, *order]))[:room])


def shape_of(case_arguments: dict[str, Any]) -> KdaShape:
    """The planned shape of some arguments."""
    a = case_arguments
    return KdaShape(
        device=a["q"].device,
        dtype=a["q"].dtype,
        num_heads=a["q"].shape[1],
        num_v_heads=a["v"].shape[1],
        head_dim_k=a["q"].shape[2],
        head_dim_v=a["v"].shape[2],
        state_dtype=a["state_dtype"],
        state_layout=a["state_layout"],
        **{name: a[name] for name in ("gate", "lower_bound", "beta_is_logits", "qk_l2norm")},
    )


def planned_shape(case: Case, device: torch.device) -> KdaShape:
    """The same from a case alone."""
    sizes = case.sizes
    names = ("num_heads", "num_v_heads", "head_dim_k", "head_dim_v", "gate", "beta_is_logits", "qk_l2norm")
    return KdaShape(
        device=device,
        dtype=dtype_of(case.dtype),
        lower_bound=-sizes["bound"] if sizes["gate"] == "bounded" else None,
        state_dtype=dtype_of(sizes["state_dtype"]),
        state_layout=sizes["state_layout"],
        **{name: sizes[name] for name in names},
    )


def _kernel(name: str) -> Kernel:
    def bind(arguments: dict[str, Any]) -> Callable[[], Any]:
        a, values_first = arguments, arguments["state_layout"] == "VK"
        kept = a["checkpoints"]
        plan = plan_kda(
            shape_of(a),
            max_tokens=len(a["q"]),
            max_sequences=len(a["cu_seqlens"]) - 1,
            max_checkpoints=0 if kept is None else len(kept),
            implementation=name,
        )
        batch = plan_kda_batch(a["cu_seqlens"], plan=plan, checkpoints=kept)
        tokens, named = [a[key] for key in TOKENS], {key: a[key] for key in ("scale", "A_log", "dt_bias")}
        initial = a["initial_state"]
        if initial is not None and values_first:
            initial = initial.mT

        def run() -> Any:
            out, final, on_the_way = kda(*tokens, **named, batch=batch, initial_state=initial)
            return (out, final.mT, on_the_way.mT) if values_first else (out, final, on_the_way)

        return run

    def unsupported(case: Case, device: torch.device) -> str | None:
        try:
            refused: str | None = find_implementation(name).refusal(planned_shape(case, device))
        except ValueError:
            # a case of no inputs, which is said where they are drawn
            return None
        if refused is not None:
            return f"{name} refuses: {refused}"
        return _interpreted_refusal(case) if name != "torch" and device.type == "cpu" else None

    def contract(case: Case) -> Contract:
        return _contract(name, case)

    return Kernel(name=f"kda[{name}]", contract=contract, bind=bind, unsupported=unsupported, by_name=name in LIBRARIES)


def _interpreted_refusal(case: Case) -> str | None:
    sizes = case.sizes
    if "bfloat16" in (case.dtype, sizes["state_dtype"]):
        return "a Triton kernel on bfloat16 tensors needs a GPU: the interpreter computes bfloat16 wrongly"
    chunks = sizes["num_v_heads"] * sum(math.ceil(length / INTERPRETED_CHUNK) for length in sizes["seq_lens"])
    if chunks <= INTERPRETED_CHUNKS:
        return None
    most = INTERPRETED_CHUNKS
    return f"interpreted on the CPU, {chunks} chunks are more than the {most} that fit the time; needs a device"


def _contract(name: str, case: Case) -> Contract:
    """As the docstring of ``optimized.kda.kda`` says; of libraries what is known of them."""
    given = OPERATION.default_contract(case)
    if name == "torch":
        return given.promising(p="fp32", batch_invariant=True)
    if name == "triton":
        return given.promising(p="fp32" if case.dtype == "float32" else "tf32", capturable=True)
    if name == "flash":
        # logits of gates are rounded once to float16
        return given.promising(logits="fp16", capturable=True)
    # a state in bfloat16 on chip, whatever it is in memory
    return given.promising(state="bf16") if name == "flashkda" else given


OPERATION = Kda()
