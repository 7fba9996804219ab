"""A kernel is found by any of its names, a stranger's is called with what it takes, and a wrong name says so."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import attention_case, mla_case, operation_of
from rich.console import Console

from assay.harness import operations
from assay.harness.contract import Contract, default_contract
from assay.harness.kernels import KernelNotFoundError, find_kernels, wrap_function
from assay.harness.listing import operations_table
from assay.harness.operation import Operation
from assay.harness.plugin import kernel

ATTENTION = operations.load("attention")
MLA = operations.load("mla_prefill")

STRANGER = """
from neighbour import ANSWER

def attend(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k):
    return ANSWER, q

number = 3
"""


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A kernel file with a neighbour that it imports."""
    (tmp_path / "neighbour.py").write_text("ANSWER = 'from next door'\n")
    (tmp_path / "stranger.py").write_text(STRANGER)
    return tmp_path / "stranger.py"


def names(operation: Operation, name: str | None) -> list[str]:
    return [found.name for found in find_kernels(operation, name)]


def test_without_a_name_all_of_the_house_are_meant() -> None:
    assert names(ATTENTION, None) == [twin.name for twin in ATTENTION.kernels() if not twin.by_name]
    assert {"attention[torch]", "attention[sdpa]", "attention[triton]"} <= set(names(ATTENTION, None))


@pytest.mark.parametrize("operation", [ATTENTION, MLA])
def test_some_are_judged_only_when_named(operation: Operation) -> None:
    twin = f"{operation.name}[flex]"
    assert twin not in names(operation, None)
    for name in ("flex", twin, f"{operation.name}[fle*]"):
        assert names(operation, name) == [twin]


@pytest.mark.parametrize("name", ["torch", "mla_prefill[torch]", "mla_prefill[to*]", "*[torch]", "*[torc?]"])
def test_a_provider_a_name_or_a_pattern_leads_to_the_twin(name: str) -> None:
    assert names(MLA, name) == ["mla_prefill[torch]"]


@pytest.mark.parametrize("operation", [ATTENTION, MLA])
def test_the_list_shows_every_kernel_and_marks_those_by_name(operation: Operation) -> None:
    console = Console(width=400, record=True, file=io.StringIO())
    console.print(operations_table())
    text = console.export_text()
    twins = operation.kernels()
    assert any(twin.by_name for twin in twins)
    for twin in twins:
        assert (f"{twin.name} (by name)" in text) is twin.by_name
        assert twin.name in text


def test_brackets_in_a_pattern_are_part_of_the_name() -> None:
    assert len(names(MLA, "mla_prefill[*]")) == len(MLA.kernels())
    with pytest.raises(KernelNotFoundError):
        names(MLA, "mla_prefill[t]")


@pytest.mark.parametrize("name", ["cuda", "attention[torch]", ""])
def test_a_name_of_nothing_lists_what_there_is(name: str) -> None:
    with pytest.raises(KernelNotFoundError, match=r"must be module:function, .* mla_prefill\[torch\], .*, got"):
        find_kernels(MLA, name)


def test_a_file_is_loaded_with_its_neighbours(stranger: Path) -> None:
    (found,) = find_kernels(ATTENTION, f"{stranger}:attend")
    assert found.name == "attend"
    given = operation_of(attention_case()).inputs(attention_case(), torch.device("cpu")).arguments
    assert found.bind(given)() == ("from next door", given["q"])


def test_a_module_is_loaded(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(stranger.parent)
    assert names(ATTENTION, "stranger:attend") == ["attend"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere.py:attend", "must name an existing file, got nowhere.py"),
        ("no_such_module:attend", "must name an importable module, got 'no_such_module'"),
        ("json.no_such_part:attend", "must name an importable module, got 'json.no_such_part'"),
        ("json:attend", "must name a function of json, got 'attend'"),
        ("json:__name__", "must name a function of json, got '__name__'"),
    ],
)
def test_a_place_without_a_kernel_says_how_far_it_led(name: str, text: str) -> None:
    with pytest.raises(KernelNotFoundError, match=text):
        find_kernels(ATTENTION, name)


def test_what_is_no_function_is_refused(stranger: Path) -> None:
    with pytest.raises(KernelNotFoundError, match=r"must name a function of .*stranger\.py, got 'number'"):
        find_kernels(ATTENTION, f"{stranger}:number")


def test_a_missing_import_of_the_kernel_itself_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        find_kernels(ATTENTION, "needy:attend")


def test_a_function_gets_the_arguments_that_it_names() -> None:
    seen: dict[str, Any] = {}

    def plain(
        q: Any, kv_c: Any, k_pe: Any, kv_b_proj: Any, softmax_scale: Any, cu_seqlens: Any, slot_table: Any,
        request_rows: Any, context_lens: Any,
    ) -> None:  # fmt: skip
        seen.update(locals())

    def chunked(
        q: Any, kv_c: Any, k_pe: Any, kv_b_proj: Any, softmax_scale: Any, cu_seqlens: Any, slot_table: Any,
        request_rows: Any, context_lens: Any, history_chunk_size: int, extra: int = 5,
    ) -> None:  # fmt: skip
        seen.update(locals())

    def greedy(**given: Any) -> None:
        seen.update(given)

    given = MLA.inputs(mla_case(), torch.device("cpu")).arguments
    required = set(MLA.arguments) - {"history_chunk_size"}
    for function, expected in (
        (plain, required),
        (chunked, {*MLA.arguments, "seen", "extra"}),
        (greedy, set(MLA.arguments)),
    ):
        seen.clear()
        wrap_function(function, MLA).bind(given)()
        assert set(seen) - {"seen"} == expected - {"seen"}
        assert seen["kv_c"] is given["kv_c"]


def test_a_function_that_lacks_an_argument_is_refused() -> None:
    def attend(q: Any, k: Any, v: Any, softmax_scale: float, causal: bool) -> None: ...

    with pytest.raises(TypeError, match=r"must take q, k, .* by name, attend lacks cu_seqlens_q, cu_seqlens_k"):
        wrap_function(attend, ATTENTION)


@pytest.mark.parametrize(("which", "text"), [("one more", "one_more also needs block"), ("by position", "lacks q")])
def test_a_function_that_cannot_be_called_by_these_names_is_refused(which: str, text: str) -> None:
    def one_more(block: int, **given: Any) -> None: ...

    def by_position(
        q: Any, /, k: Any, v: Any, softmax_scale: Any, causal: Any, cu_seqlens_q: Any, cu_seqlens_k: Any
    ) -> None: ...

    with pytest.raises(TypeError, match=text):
        wrap_function(one_more if which == "one more" else by_position, ATTENTION)


def test_a_declared_contract_and_name_are_kept_and_else_the_default_holds() -> None:
    def attend(**given: Any) -> None: ...

    case = attention_case(dtype="bfloat16")
    assert wrap_function(attend, ATTENTION).contract(case) == default_contract(
        "bfloat16", projected=False, splits=False
    )
    assert wrap_function(attend, MLA).contract(mla_case(dtype="float16")) == default_contract(
        "float16", projected=True, splits=True
    )
    contract = Contract(p="fp16", out="bf16")
    mine = wrap_function(kernel(name="mine", contract=contract)(attend), ATTENTION)
    assert (mine.name, mine.contract(case)) == ("mine", contract)


def test_a_stranger_is_never_called_unsupported() -> None:
    def attend(**given: Any) -> None: ...

    assert wrap_function(attend, MLA).unsupported(mla_case(), torch.device("cpu")) is None
