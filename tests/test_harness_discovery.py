"""What installed packages bring is listed from metadata, imported when it is selected, and refused with its name."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from assay.harness import cli, discovery, operations
from assay.harness.discovery import CASES, GROUPS, KERNELS, OPERATIONS, PluginError, find_plugin, plugins
from assay.harness.kernels import KernelNotFoundError, find_kernels, is_strange
from assay.harness.listing import plugins_table
from assay.harness.operation import CaseRequest

ATTENTION = operations.load("attention")
REQUEST = CaseRequest(tier="smoke", seed=0, dtypes=("float32",))

ENTRY_POINTS = """
[assay.kernels]
acme.right = acme_kernels:right
acme.wrong = acme_kernels:wrong
acme.plain = acme_kernels:plain
acme.latent = acme_kernels:latent
acme.broken = acme_broken:right
acme.gone = acme_kernels:nothing
acme.next = acme_next:right
torch = acme_kernels:right

[assay.operations]
acme_attention = acme_kernels:OPERATION
acme_old = acme_kernels:OLD
acme_alias = acme_kernels:OPERATION

[assay.cases]
acme.long = acme_kernels:long
acme.unversioned = acme_kernels:unversioned
acme.odd = acme_kernels:odd
"""

MODULE = """
import dataclasses
from assay.harness import kernel, operations
from assay.harness.operations.attention import Attention
from assay.reference.attention import attention

def plain(**given):
    wide = {n: v.double() if n in "qkv" else v for n, v in given.items()}
    out, lse = attention(**wide)
    return out.to(given["q"].dtype), lse.float()

@kernel("attention", name="acme right")
def right(**given):
    return plain(**given)

@kernel("attention")
def wrong(**given):
    out, lse = plain(**given)
    return out * 1.01, lse

@kernel("mla_prefill")
def latent(**given):
    return None

class Acme(Attention):
    name = "acme_attention"
    api = 1

class Old(Attention):
    name = "acme_old"
    api = 2

OPERATION, OLD = Acme(), Old()

def long(request):
    drawn = operations.load("attention").cases(request) + operations.load("mla_prefill").cases(request)
    return [dataclasses.replace(case, seed=case.seed + 1) for case in drawn]

long.api = 1

def unversioned(request):
    return []

def odd(request):
    return ["attention-peaked"]

odd.api = 1
"""

NEXT = """
from assay.harness import kernel

@kernel("attention", api=2)
def right(**given):
    return None
"""


def install(folder: Path, name: str, version: str, entry_points: str) -> None:
    """What pip leaves of a package, as far as its metadata matters."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture(autouse=True)
def _acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with kernels, operations and cases, here and in every process that a test starts."""
    site = tmp_path / "site"
    install(site, "acme_kernels", "1.2", ENTRY_POINTS)
    (site / "acme_kernels.py").write_text(MODULE)
    (site / "acme_broken.py").write_text("raise OSError('libacme.so is not there')\n")
    (site / "acme_next.py").write_text(NEXT)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    importlib.invalidate_caches()
    monkeypatch.setattr(cli, "console", Console(width=300))
    monkeypatch.setattr(cli, "errors", Console(width=300, stderr=True))
    yield
    for name in ("acme_kernels", "acme_broken", "acme_next"):
        sys.modules.pop(name, None)


def acme(group: str) -> list[discovery.Plugin]:
    return [plugin for plugin in plugins(group) if plugin.distribution.startswith("acme_kernels")]


def test_everything_is_listed_with_its_origin_and_nothing_imported() -> None:
    found = {group: [plugin.name for plugin in acme(group)] for group in GROUPS}
    assert found[KERNELS] == sorted(["acme.broken", "acme.gone", "acme.latent", "acme.next", "acme.plain",
                                     "acme.right", "acme.wrong", "torch"])  # fmt: skip
    assert found[OPERATIONS] == ["acme_alias", "acme_attention", "acme_old"]
    assert found[CASES] == ["acme.long", "acme.odd", "acme.unversioned"]
    right = find_plugin(KERNELS, "acme.right")
    assert right is not None
    assert (right.value, right.distribution) == ("acme_kernels:right", "acme_kernels 1.2")
    assert str(right) == "assay.kernels 'acme.right' (acme_kernels 1.2)"
    assert find_plugin(KERNELS, "acme.none") is None
    assert is_strange("acme.right")
    assert set(discovery.operation_names()) == {*operations.NAMES, "acme_alias", "acme_attention", "acme_old"}
    assert "acme_kernels" not in sys.modules


def test_the_list_shows_what_is_installed_without_importing_it() -> None:
    table = plugins_table()
    assert table is not None
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    lines = [line.split() for line in capture.get().replace("│", " ").splitlines()]
    assert ["kernels", "acme.right", "acme_kernels:right", "acme_kernels", "1.2"] in lines
    assert ["cases", "acme.long", "acme_kernels:long", "acme_kernels", "1.2"] in lines
    assert "acme_kernels" not in sys.modules


def test_without_plug_ins_there_is_no_such_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay.harness.listing.plugins", lambda group: [])
    assert plugins_table() is None


def test_a_kernel_is_found_by_the_name_of_its_entry_point() -> None:
    (kernel,) = find_kernels(ATTENTION, "acme.right")
    assert kernel.name == "acme right"
    assert is_strange("a.py:b")
    assert not any(is_strange(name) for name in (None, "sdpa", "attention[torch]"))


UNUSABLE = {
    "plain": ("acme.plain", KernelNotFoundError, "'acme.plain' .* must lead to a function decorated with @kernel"),
    "other operation": ("acme.latent", KernelNotFoundError, "latent must be declared for attention, got op 'mla_pre"),
    "both": (
        "torch",
        KernelNotFoundError,
        "torch is both a kernel of the house and assay.kernels 'torch' .*use acme_k",
    ),
    "nobody": ("acme.none", KernelNotFoundError, r"or one of attention\[torch\], .*, acme.right, .*, got 'acme.none'"),
    "broken": ("acme.broken", OSError, "libacme.so is not there"),
    "gone": ("acme.gone", AttributeError, "nothing"),
    "version": ("acme.next", ValueError, "api must be 1, the only version that this assay serves, got 2"),
}


@pytest.mark.parametrize("which", UNUSABLE)
def test_an_entry_point_that_cannot_be_used_says_why(which: str) -> None:
    name, error, text = UNUSABLE[which]
    with pytest.raises(error, match=text):
        find_kernels(ATTENTION, name)


def test_two_packages_may_not_bring_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "more", "rival", "0.1", "[assay.kernels]\nacme.right = rival:right\n")
    monkeypatch.syspath_prepend(tmp_path / "more")
    text = r"'acme.right' must be brought by one package, got acme_kernels:right \(acme_kernels 1.2\) and rival:right"
    with pytest.raises(PluginError, match=text):
        find_plugin(KERNELS, "acme.right")
    with pytest.raises(KernelNotFoundError, match=text):
        find_kernels(ATTENTION, "acme.right")


def test_an_operation_is_loaded_by_its_name() -> None:
    assert discovery.load_operation("attention") is ATTENTION
    acme_attention = discovery.load_operation("acme_attention")
    assert acme_attention.name == "acme_attention"
    assert {case.op for case in acme_attention.cases(REQUEST)} == {"acme_attention"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "acme_old",
            r"'acme_old' \(acme_kernels 1.2\) must be written for api 1, the version of this assay, got api 2",
        ),
        ("acme_alias", "must be called as its operation, got 'acme_attention'"),
        (
            "conv",
            f"an operation must be one of {', '.join(operations.NAMES)}, acme_alias, acme_attention, acme_old, "
            "got 'conv'",
        ),
    ],
)
def test_an_operation_that_cannot_be_loaded_says_why(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        discovery.load_operation(name)


def test_no_package_takes_the_name_of_an_operation_of_the_house(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "more", "thief", "0.1", "[assay.operations]\nattention = thief:OPERATION\n")
    monkeypatch.syspath_prepend(tmp_path / "more")
    with pytest.raises(PluginError, match=r"'attention' \(thief 0.1\) must not take the name of an operation"):
        discovery.load_operation("attention")
    assert "thief" not in sys.modules


def test_cases_of_an_installed_package_are_added_for_their_operation() -> None:
    cases = discovery.load_cases("acme.long", ATTENTION, REQUEST)
    own = ATTENTION.cases(REQUEST)
    assert [case.seed for case in cases] == [case.seed + 1 for case in own]
    assert {case.op for case in cases} == {"attention"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("acme.unversioned", "must be written for api 1, the version of this assay, got api None"),
        ("acme.odd", "must return a list of cases, got list"),
        ("acme.none", "must be one of acme.long, acme.odd, acme.unversioned, got 'acme.none'"),
    ],
)
def test_cases_that_cannot_be_added_say_why(name: str, text: str) -> None:
    with pytest.raises(PluginError, match=text):
        discovery.load_cases(name, ATTENTION, REQUEST)


@pytest.mark.parametrize(
    ("name", "code"), [("acme.right", 0), ("acme.wrong", 1), ("acme.plain", 2), ("acme.broken", 2)]
)
def test_the_command_judges_an_installed_kernel(name: str, code: int) -> None:
    arguments = ["check", "attention", "--device", "cpu", "--kernel", name, "--family", "diffuse", "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    assert {0: "acme right", 1: "NUMERIC", 2: "acme_kernels 1.2" if name == "acme.plain" else "libacme.so"}[
        code
    ] in result.output
