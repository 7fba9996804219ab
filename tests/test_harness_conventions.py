"""A kernel is judged in its own conventions: it gets the same values in its own layout, and nothing is forgiven."""

import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from builders import Answer, arguments_of, attention_case, honest_attention, honest_mla, judged, mla_case
from foreign_layouts import LAYOUTS, foreign_mla, given_to, paged_rows
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from assay.harness import Conventions, cli, kernel, operations
from assay.harness.conventions import argument_names
from assay.harness.kernels import wrap_function
from assay.harness.layouts import relocated
from assay.harness.operation import AttentionOperation
from assay.harness.record import Verdict

ATTENTION = cast(AttentionOperation, operations.load("attention"))
INF, NAN = math.inf, math.nan

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"lse_base": "10"}, "lse_base must be one of 'e', '2', got '10'"),
    "layout": ({"lse_layout": "BHT"}, "lse_layout must be one of 'TH', 'HT', got 'BHT'"),
    "row": ({"empty_row": ("zero", "0")}, "empty_row must be .*, got .*'0'"),
    "row list": ({"empty_row": "nan"}, "empty_row must be .*, got 'nan'"),
    "duplicates": ({"duplicates": "some"}, "duplicates must be one of None, 'multiset', 'set', got 'some'"),
    "cache": ({"cache": "pages"}, "cache must be one of 'slots', 'blocks', 'indptr', got 'pages'"),
    "no page": ({"cache": "blocks"}, "page_size must be given with cache 'blocks', got None"),
    "page of slots": ({"page_size": 16}, "page_size must be None with cache 'slots', got 16"),
    "page of nothing": ({"cache": "indptr", "page_size": 0}, "page_size must be an integer of at least 1, got 0"),
    "page of true": ({"cache": "indptr", "page_size": True}, "page_size must be an integer of at least 1, got True"),
    "gap": ({"row_gap": -1}, "row_gap must be an integer of at least 0, got -1"),
}


@pytest.mark.parametrize("which", WRONG)
def test_what_is_no_convention_is_refused(which: str) -> None:
    said, text = WRONG[which]
    with pytest.raises(ValueError, match=text):
        Conventions(**said)


def test_the_note_names_what_differs() -> None:
    assert Conventions().note == ""
    assert Conventions(lse_layout="HT", row_gap=8).note == "lse_layout='HT', row_gap=8"
    assert not Conventions(lse_base="2", lse_layout="HT", empty_row=("nan", "nan")).rearranges
    assert all(Conventions(**said).rearranges for said in ({"row_gap": 1}, {"bundled": True}, {"cache": "indptr"}))


LATENT = ("q", "kv_c", "k_pe", "kv_b_proj", "slot_table", "request_rows", "context_lens")
PACKED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
NAMES: list[tuple[tuple[str, ...], dict[str, Any], set[str], set[str]]] = [
    (LATENT, {}, set(LATENT), set()),
    (LATENT, {"bundled": True}, {"q", "kv_cache", "kv_b_proj", "slot_table", "request_rows", "context_lens"}, set()),
    (LATENT, {"cache": "blocks", "page_size": 16}, {"q", "kv_c", "k_pe", "kv_b_proj", "block_table", "context_lens"},
     set()),
    (LATENT, {"cache": "indptr"}, {"q", "kv_c", "k_pe", "kv_b_proj", "kv_indptr", "kv_indices", "context_lens"},
     {"kv_last_page_len"}),
    (PACKED, {"cache": "blocks", "page_size": 64}, {"q", "k", "v", "cu_seqlens_q", "block_table", "context_lens"},
     set()),
    (PACKED, {"row_gap": 8}, set(PACKED), set()),
]  # fmt: skip


@pytest.mark.parametrize(("names", "said", "required", "optional"), NAMES)
def test_a_layout_brings_its_own_arguments(
    names: tuple[str, ...], said: dict[str, Any], required: set[str], optional: set[str]
) -> None:
    got, may = argument_names(names, ("history_chunk_size",), Conventions(**said))
    assert (set(got), set(may)) == (required, {"history_chunk_size", *optional})
    assert len(got) == len(set(got))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"bundled": True}, "bundled needs an operation with kv_c and k_pe, this one lacks kv_c"),
        ({"flat_projection": True}, "flat_projection needs an operation with kv_b_proj, this one lacks kv_b_proj"),
        ({"duplicates": "set"}, "duplicates needs an operation with indices, this one lacks indices"),
    ],
)
def test_a_convention_about_an_argument_that_is_not_there_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"conventions of attend do not fit attention: {text}"):
        wrap_function(kernel(name="attend", conventions=Conventions(**said))(lambda **given: None), ATTENTION)
    for names in ({"cache": "indptr"}, {"row_gap": 1}):
        with pytest.raises(ValueError, match="needs an operation with"):
            argument_names(("scores", "lengths"), (), Conventions(**names))


@pytest.mark.parametrize("which", LAYOUTS)
def test_a_right_kernel_passes_in_its_own_conventions_and_a_wrong_one_does_not(which: str) -> None:
    said = {**LAYOUTS[which], "lse_base": "2", "lse_layout": "HT", "flat_projection": True}
    conventions = Conventions(**said)
    for dtype in ("float32", "bfloat16"):
        record = judged(foreign_mla(conventions), mla_case(dtype=dtype))
        assert (record.verdict, record.text) == ("PASS", "")
    assert judged(foreign_mla(conventions, scale=1.01), mla_case()).verdict == "NUMERIC"


@pytest.mark.parametrize(
    ("does", "says"), [("2", "e"), ("e", "2"), ("e", "e")], ids=["base 2 unsaid", "base 2 only said", "both e"]
)
def test_the_base_that_is_said_is_the_base_that_must_be(does: Any, says: Any) -> None:
    does_not = Conventions(cache="indptr", lse_base=does)
    attend = kernel(conventions=Conventions(cache="indptr", lse_base=says))(foreign_mla(does_not))
    record = judged(attend, mla_case())
    assert record.verdict == ("PASS" if does == says else "NUMERIC")
    assert does == says or (record.worst is not None and record.worst.gate == "G6 lse")


def test_a_wrong_layout_of_the_lse_is_named_with_the_convention() -> None:
    record = judged(kernel(conventions=Conventions(lse_layout="HT"))(partial(honest_mla)), mla_case())
    assert record.verdict == "STRUCTURE"
    assert record.text == "lse must have shape (14, 2), got (2, 14), under lse_layout='HT'"


def test_a_destination_has_the_layout_of_the_kernel() -> None:
    @kernel(style="dps", conventions=Conventions(lse_layout="HT"))
    def attend(*, out: Tensor, lse: Tensor, **given: Any) -> None:
        right, right_lse = honest_attention(**given)
        out.copy_(right)
        lse.copy_(right_lse.T)

    assert judged(attend, attention_case()).verdict == "PASS"


EMPTY_CASE: dict[str, Any] = {"query_lens": [4, 3], "key_lens": [2, 5]}


def empty_rows_as(value: float, lse_value: float, row: int = 0) -> Any:
    """A right kernel but for the two rows that see no key (of which ``row`` 0 and 1 are), and maybe one that does."""

    def attend(**given: Any) -> Answer:
        out, lse = honest_attention(**given)
        for at in {0, 1, row}:
            out[at], lse[at] = value, lse_value
        return out, lse

    return attend


def test_declared_values_pass_in_empty_rows_and_nowhere_else() -> None:
    case = attention_case(**EMPTY_CASE)
    declared = kernel(conventions=Conventions(empty_row=("nan", "+inf")))
    assert judged(declared(empty_rows_as(NAN, INF)), case).verdict == "PASS"
    for fault in (empty_rows_as(0.0, INF), empty_rows_as(NAN, -INF), empty_rows_as(NAN, INF, row=3)):
        assert judged(declared(fault), case).verdict == "NONFINITE"
    assert judged(empty_rows_as(NAN, INF), case).verdict == "NONFINITE"
    record = judged(declared(empty_rows_as(NAN, -INF)), case)
    assert record.text == "4 elements of lse in empty rows are not the declared +inf"


def test_an_empty_row_left_unwritten_is_not_the_declared_nan() -> None:
    def attend(**given: Any) -> Answer:
        right, lse = honest_attention(**given)
        out = torch.empty_like(right)
        out[2:] = right[2:]
        return out, lse

    record = judged(kernel(conventions=Conventions(empty_row=("nan", "-inf")))(attend), attention_case(**EMPTY_CASE))
    assert (record.verdict, record.text) == ("WRITE_SCOPE", "64 of 224 elements of out left unwritten")


def test_a_cache_that_is_written_in_its_own_layout_is_found() -> None:
    conventions = Conventions(cache="blocks", page_size=16, bundled=True)

    @kernel(conventions=conventions)
    def attend(**given: Any) -> Answer:
        answer = honest_mla(**paged_rows(given, conventions))
        given["kv_cache"][0, 0, 0] = 0.0
        return answer

    record = judged(attend, mla_case())
    assert (record.verdict, record.text) == ("MUTATED_INPUT", "wrote its input kv_cache")
    assert judged(kernel(conventions=conventions, mutates=("kv_cache",))(attend), mla_case()).verdict == "PASS"


def test_a_kernel_that_reads_the_tail_of_a_page_is_found() -> None:
    conventions = Conventions(cache="blocks", page_size=16)

    @kernel(conventions=conventions)
    def attend(**given: Any) -> Answer:
        longer = {**given, "context_lens": given["context_lens"] + torch.tensor([1, 0])}
        return honest_mla(**paged_rows(longer, conventions))

    assert judged(attend, mla_case(query_lens=[9, 5], context_lens=[45, 5])).verdict == "NONFINITE"


def test_the_report_names_the_place_that_the_kernel_knows() -> None:
    conventions = Conventions(cache="blocks", page_size=16)
    case, right = mla_case(), foreign_mla(conventions)

    @kernel(conventions=conventions)
    def attend(**given: Any) -> Answer:
        out, lse = right(**given)
        out[7, 1, 3] += 1.0
        return out, lse

    record = judged(attend, case)
    assert record.worst is not None
    where = record.worst.where
    assert where is not None
    assert (where.token, where.head, where.dim, where.position) == (7, 1, 3, 43)
    table = given_to(case, conventions).arguments["block_table"]
    assert where.slot == int(table[0, 43 // 16]) * 16 + 43 % 16
    rows = list(relocated(ATTENTION.rows(attention_case(), arguments_of(attention_case()), budget=1 << 40),
                          arguments_of(attention_case()), attention_case(), conventions))  # fmt: skip
    assert {part.slots for part in rows} == {None}


KERNEL_FILE = """
import math, torch
from assay.harness import Conventions, kernel
from assay.reference.mla_prefill import mla_prefill

@kernel("mla_prefill", style="dps", conventions=Conventions(
    cache="blocks", page_size=16, row_gap=8, bundled=True, flat_projection=True, lse_base="2", lse_layout="HT"))
def engine(q, kv_cache, kv_b_proj, softmax_scale, cu_seqlens, block_table, context_lens, *, out, lse):
    rank, pages, size = kv_b_proj.shape[1], *kv_cache.shape[:2]
    rows = kv_cache.reshape(pages * size, -1).double()
    table = (block_table[:, :, None] * size + torch.arange(size)).flatten(1)
    right, natural = mla_prefill(
        q.double(), rows[:, :rank], rows[:, rank:], kv_b_proj.double().view(q.shape[1], -1, rank),
        softmax_scale=softmax_scale, cu_seqlens=cu_seqlens, slot_table=table,
        request_rows=torch.arange(len(context_lens)), context_lens=context_lens,
    )
    out.copy_(right)
    lse.copy_(natural.T / math.log(FACTOR))
"""


@pytest.mark.parametrize(("factor", "code"), [("2", 0), ("3", 1)])
def test_the_command_judges_a_kernel_in_its_own_conventions(
    factor: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "console", Console(width=200))
    (tmp_path / "engine.py").write_text(KERNEL_FILE.replace("FACTOR", factor))
    arguments = ["check", "mla_prefill", "--device", "cpu", "--kernel", f"{tmp_path}/engine.py:engine"]
    result = CliRunner().invoke(cli.app, [*arguments, "--family", "peaked", "--dtype", "bfloat16"])
    assert result.exit_code == code, result.stdout
    assert code == 0 or "G6 lse" in result.stdout


@pytest.mark.parametrize("which", LAYOUTS)
def test_a_table_of_pages_that_is_kept_by_its_address_is_found(which: str) -> None:
    conventions = Conventions(**LAYOUTS[which])
    name = "block_table" if conventions.cache == "blocks" else "kv_indices"
    honest = foreign_mla(conventions)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    @kernel("mla_prefill", conventions=conventions)
    def remembering(**given: Any) -> Answer:
        # who holds a tensor keeps its memory from being handed out again, so that no other has its address by chance
        held, _ = kept.setdefault(given[name].data_ptr(), (given[name].clone(), given[name]))
        answer: Answer = honest(**(given | {name: held if held.shape == given[name].shape else given[name]}))
        return answer

    case = mla_case("peaked", query_lens=[9, 5, 1], context_lens=[45, 30, 64])
    assert judged(honest, case).verdict is Verdict.PASS
    found = judged(remembering, case)
    assert found.verdict is Verdict.METAMORPHIC
    assert found.worst is not None
    assert found.worst.gate.startswith("G8")
