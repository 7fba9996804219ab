"""Faults of ``kda_step``: from and to which slots, what else is written, layers; and variants."""

from typing import Any

import torch
from torch import Tensor

from ..case import Case
from ..contract import PRECISION_OF_DTYPE, Contract
from ..plugin import kernel
from ..record import Verdict
from . import planted, variant
from ._kda_layer import one_by_one
from ._kda_step_twin import Answer, step_twin
from ._kda_twin import bfloat16, chunk_step, strength

OP = "kda_step"
NUMERIC, NONFINITE = Verdict.NUMERIC, Verdict.NONFINITE
WRITE_SCOPE, MUTATED_INPUT, STRUCTURE = Verdict.WRITE_SCOPE, Verdict.MUTATED_INPUT, Verdict.STRUCTURE


def single(case: Case, **promises: Any) -> Contract:
    """Everything in float32, but for what is stored."""
    store = PRECISION_OF_DTYPE[case.sizes["state_dtype"]]
    given = Contract(p="fp32", out=PRECISION_OF_DTYPE[case.dtype], state="fp32", state_store=store)
    return given.promising(mutates=("state_pool",), **promises)


@planted(OP, NUMERIC, NONFINITE, source="num_accepted ignored")
def start_from_the_first_column(**arguments: Any) -> Answer:
    """Every sequence starts from its first slot."""
    return step_twin(arguments, start=lambda row, accepted: row[0])


@planted(OP, NUMERIC, NONFINITE, source="column num_accepted instead of num_accepted - 1")
def start_from_the_column_after(**arguments: Any) -> Answer:
    """The number of accepted tokens is taken for a column."""
    return step_twin(arguments, start=lambda row, accepted: row[accepted % len(row)])


@planted(OP, NUMERIC, NONFINITE, source="the last column of the last step")
def start_from_the_last_column(**arguments: Any) -> Answer:
    """Every draft counts as accepted."""
    return step_twin(arguments, start=lambda row, accepted: row[-1])


@planted(OP, NUMERIC, NONFINITE, source="num_accepted of the first sequence for all")
def accepted_of_the_first_sequence(**arguments: Any) -> Answer:
    """All sequences start from the same column."""
    told = arguments["num_accepted"]
    return step_twin(arguments | {"num_accepted": None if told is None else told[:1].expand_as(told)})


@planted(OP, NUMERIC, source="store before instead of after the token")
def state_stored_before_the_token(**arguments: Any) -> Answer:
    """Each slot gets the state before its token."""
    return step_twin(arguments, late=True)


@planted(OP, NUMERIC, NONFINITE, source="the last state alone")
def last_state_alone(**arguments: Any) -> Answer:
    """The states of earlier drafts are not stored."""
    return step_twin(arguments, last_alone=True)


@planted(OP, NONFINITE, WRITE_SCOPE, NUMERIC, source="drafts written from the accepted column on")
def stored_from_the_accepted_column(**arguments: Any) -> Answer:
    """States go to the columns that follow the accepted one."""
    return step_twin(arguments, end=lambda row, token, accepted: row[(accepted - 1 + token) % len(row)])


@planted(OP, WRITE_SCOPE, NONFINITE, rows=("FC-128",))
def slot_minus_one_is_the_last(**arguments: Any) -> Answer:
    """Slot -1 is read and written like any other."""
    return step_twin(arguments, wraps=True)


@planted(OP, WRITE_SCOPE, source="NULL_BLOCK_ID written by padding")
def padding_written_to_slot_0(**arguments: Any) -> Answer:
    """What has no slot goes to slot 0."""
    pool, table = arguments["state_pool"], arguments["slot_table"]
    owned = bool((table == 0).any())
    answer = step_twin(arguments)
    if bool((table < 0).any()) and not owned:
        pool[0] = 0.0
    return answer


@planted(OP, WRITE_SCOPE, source="untouched slot rewritten")
def unused_columns_cleared(**arguments: Any) -> Answer:
    """Slots of drafts that the step does not have become zeros."""
    answer, lens = step_twin(arguments), arguments["cu_seqlens"].diff().tolist()
    for row, length in zip(arguments["slot_table"].tolist(), lens, strict=True):
        for slot in row[length:]:
            if slot >= 0:
                arguments["state_pool"][slot] = 0.0
    return answer


@planted(OP, WRITE_SCOPE, source="untouched slot rewritten")
def pool_cleaned(**arguments: Any) -> Answer:
    """What is no number anywhere in the pool becomes 0."""
    out, pool = step_twin(arguments)
    pool.nan_to_num_(nan=0.0)
    return out, pool


@planted(OP, WRITE_SCOPE, NUMERIC, source="the state of an empty sequence cleared")
def empty_sequences_cleared(**arguments: Any) -> Answer:
    """A sequence without tokens loses the state that it would start from."""
    answer, lens = step_twin(arguments), arguments["cu_seqlens"].diff().tolist()
    told = arguments["num_accepted"]
    counts = [1] * len(lens) if told is None else told.tolist()
    for row, length, count in zip(arguments["slot_table"].tolist(), lens, counts, strict=True):
        if length == 0 and row[count - 1] >= 0:
            arguments["state_pool"][row[count - 1]] = 0.0
    return answer


@planted(OP, NUMERIC, rows=("FC-117",))
def step_taken_twice(**arguments: Any) -> Answer:
    """A tuner has run the kernel before, and nothing was put back."""
    step_twin(arguments)
    return step_twin(arguments)


@planted(OP, NUMERIC, NONFINITE, source="a pool that is copied")
def pool_left_as_it_is(**arguments: Any) -> Tensor:
    """The states are written to a copy."""
    return step_twin(arguments | {"state_pool": arguments["state_pool"].clone()})[0]


@planted(OP, STRUCTURE, source="a pool that is copied")
def copy_of_the_pool_handed_out(**arguments: Any) -> Answer:
    """The states are written to a copy, which is the result."""
    return step_twin(arguments | {"state_pool": arguments["state_pool"].clone()})


@planted(OP, NUMERIC, NONFINITE, WRITE_SCOPE, rows=("FC-121",))
def pitch_of_slots_assumed(**arguments: Any) -> Answer:
    """Slots are read and written as if they lay side by side."""
    pool = arguments["state_pool"]
    packed = torch.empty(pool.shape, dtype=pool.dtype, device="meta")
    near = pool.as_strided(pool.shape, packed.stride(), pool.storage_offset())
    return step_twin(arguments | {"state_pool": near})[0], pool


@planted(OP, WRITE_SCOPE, source="writes past a slot")
def slot_written_to_its_end_and_further(**arguments: Any) -> Answer:
    """One element behind the last slot is written."""
    out, pool = step_twin(arguments)
    last = sum((size - 1) * stride for size, stride in zip(pool.shape, pool.stride(), strict=True))
    torch.as_strided(pool, (1,), (1,), pool.storage_offset() + last + 1).fill_(1.0)
    return out, pool


@planted(OP, NUMERIC, source="state layout transposed")
def states_stored_value_columns_first(**arguments: Any) -> Answer:
    """States are stored ``[V, K]`` where they are read ``[K, V]``."""
    return step_twin(arguments, store=lambda state: state.mT.reshape(state.shape))


@planted(OP, NUMERIC, source="a state in the format of the pool from token to token")
@kernel(contract=single)
def state_read_back_from_the_pool(**arguments: Any) -> Answer:
    """The next token takes the stored state, rounded, and nobody says so."""
    dtype = arguments["state_pool"].dtype
    return step_twin(arguments, carry=lambda state: state.to(dtype).float())


@planted(OP, NUMERIC, source="a state in the format of the pool from token to token")
def state_read_back_among_operands_like_it(**arguments: Any) -> Answer:
    """The same of a kernel that promises nothing: where tokens are bfloat16, so may be the operands of its products."""
    return state_read_back_from_the_pool(**arguments)


@planted(OP, NUMERIC, NONFINITE, source="tables of 64 bits read as 32")
def wide_tables_read_as_narrow_ones(**arguments: Any) -> Answer:
    """Every other word of an int64 table is the high half of an entry."""
    table = arguments["slot_table"]
    if table.dtype == torch.int64:
        table = table.contiguous().view(torch.int32).flatten()[: table.numel()].view(table.shape)
    return step_twin(arguments | {"slot_table": table})


@planted(OP, NUMERIC, NONFINITE, source="rows of padding computed from zeros")
def padding_computed(**arguments: Any) -> Answer:
    """A sequence of padding starts from zeros and answers."""
    out, pool = step_twin(arguments)
    bounds, table = arguments["cu_seqlens"].tolist(), arguments["slot_table"].tolist()
    for row, start, stop in zip(table, bounds, bounds[1:], strict=False):
        if max(row) < 0:
            out[start:stop] = arguments["v"][start:stop]
    return out, pool


@planted(OP, WRITE_SCOPE, source="rows past the last sequence left as they come")
def rows_of_no_sequence_left(**arguments: Any) -> Answer:
    """Rows past the last sequence are not written."""
    out, pool = step_twin(arguments)
    mine, end = torch.empty_like(out), int(arguments["cu_seqlens"][-1])
    mine[:end] = out[:end]
    return mine, pool


@planted(OP, MUTATED_INPUT, source="tables used as scratch memory")
def accepted_counts_reset(**arguments: Any) -> Answer:
    """The counts are set to 1 for the next step."""
    answer = step_twin(arguments)
    if arguments["num_accepted"] is not None:
        arguments["num_accepted"].fill_(1)
    return answer


@planted(OP, NUMERIC, NONFINITE, source="beta without sigmoid")
def beta_without_sigmoid(**arguments: Any) -> Answer:
    """Logits are the strength."""
    return step_twin(arguments, strengthen=lambda a, beta: beta)


@planted(OP, NUMERIC, source="fla allow_neg_eigval taken for granted")
def beta_doubled(**arguments: Any) -> Answer:
    """Strengths up to 2."""
    return step_twin(arguments, strengthen=lambda a, beta: 2.0 * strength(a, beta))


@planted(OP, NUMERIC, source="GVA: h % n instead of h // n")
def value_heads_interleaved(**arguments: Any) -> Answer:
    """Value head ``h`` meets key head ``h % H``."""
    return step_twin(arguments, group=lambda x, heads: x.repeat(1, heads // x.shape[1], 1))


@planted(OP, NUMERIC, source="F.normalize taken for the norm of the models")
def length_no_less_than_epsilon(**arguments: Any) -> Answer:
    """Rows are divided by their length, or by 1e-12."""
    return step_twin(arguments, normalise=lambda x: torch.nn.functional.normalize(x, dim=-1, eps=1e-12))


@planted(OP, NUMERIC, source="scale ignored")
def scale_left_out(**arguments: Any) -> Answer:
    """The scale is 1."""
    return step_twin(arguments | {"scale": 1.0})


@planted(OP, NUMERIC, source="lower_bound ignored")
def lower_bound_ignored(**arguments: Any) -> Answer:
    """Bounded gates go down to -5, whatever their bound is."""
    return step_twin(arguments | {"lower_bound": None if arguments["lower_bound"] is None else -5.0})


@planted(OP, NUMERIC, source="gate after instead of before the update")
def decay_after_the_write(**arguments: Any) -> Answer:
    """What is written decays at once."""
    return step_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="write, decay"))


@planted(OP, NUMERIC, source="fla #885: forget before error")
def prediction_before_the_decay(**arguments: Any) -> Answer:
    """The error is of what the state recalled before it decayed."""
    return step_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="predict, decay, write"))


@planted(OP, NUMERIC, source="output before the write")
def output_before_the_write(**arguments: Any) -> Answer:
    """A token does not see what it writes."""
    return step_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="read first"))


@planted(OP, NUMERIC, source="the prediction rounded before it is taken off the value")
def prediction_rounded(**arguments: Any) -> Answer:
    """What is recalled is bfloat16 before the error is."""
    return step_twin(arguments, step=lambda *tokens: one_by_one(*tokens, order="rounded"))


@variant(OP)
@kernel(contract=single)
def clean(**arguments: Any) -> Answer:
    """The clean twin, which hands the pool out."""
    return step_twin(arguments)


@variant(OP)
@kernel(contract=single)
def pool_not_handed_out(**arguments: Any) -> Tensor:
    """The output alone: the pool is the caller's."""
    return step_twin(arguments)[0]


@variant(OP)
@kernel(contract=single)
def tokens_as_chunks(**arguments: Any) -> Answer:
    """Each token is a chunk of one: the inverse of 1."""
    return step_twin(arguments, step=chunk_step)


@variant(OP)
@kernel(contract=lambda case: single(case, state="bf16"))
def state_in_bfloat16(**arguments: Any) -> Answer:
    """The state is rounded from token to token, and that is said."""
    return step_twin(arguments, carry=bfloat16)


@variant(OP)
@kernel(contract=lambda case: single(case, p="bf16"))
def operands_in_bfloat16(**arguments: Any) -> Answer:
    """Products take bfloat16, and that is said."""
    return step_twin(arguments, step=lambda *tokens: chunk_step(*tokens, operand=bfloat16))
