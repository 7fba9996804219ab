"""Which libraries of other authors an operation meets: what is timed is judged, and what is not here says why."""

import importlib
import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from assay.harness import operations, peers, providers
from assay.harness._doctor_machine import PROVIDERS
from assay.harness.kernels import find_kernels
from assay.optimized import attention as optimized

# every library that the project promises to measure itself against
NAMED = {
    "torch SDPA (cuDNN)": "torch",
    "torch varlen (FlashAttention 2)": "torch",
    "torch FlexAttention": "torch",
    "FlashAttention 3": "flash-attn-3",
    "FlashAttention 4": "flash-attn-4",
    "FlashInfer": "flashinfer-python",
    "FlashMLA": "tokenspeed-flashmla",
    "FlashKDA": "tokenspeed-flashkda",
    "flash-linear-attention": "fla-core",
    "cuDNN front end": "nvidia-cudnn-frontend",
}


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of packages, ahead of all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(packages: Path, module: str, distribution: str | None = None, version: str = "1.2.3") -> None:
    """Put a package there that must not be imported, and its metadata unless it has none."""
    *parents, last = module.split(".")
    folder = packages.joinpath(*parents, last)
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    if distribution is not None:
        metadata = packages / f"{distribution.replace('-', '_')}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    importlib.invalidate_caches()


def only(monkeypatch: pytest.MonkeyPatch, *found: str) -> None:
    """Let these modules be installed and no others."""
    monkeypatch.setattr(peers, "is_importable", lambda module: module in found)


def peer(operation: str, name: str) -> peers.Peer:
    (found,) = (peer for peer in peers.for_operation(operation) if peer.name == name)
    return found


@pytest.mark.parametrize("operation", operations.NAMES)
def test_every_named_library_is_told_of(operation: str) -> None:
    assert [found.name for found in peers.for_operation(operation)] == list(NAMED)


@pytest.mark.parametrize("operation", operations.NAMES)
def test_what_can_be_timed_is_a_kernel_that_is_judged(operation: str) -> None:
    judged = {kernel.name for kernel in operations.load(operation).kernels()}
    found = peers.for_operation(operation)
    present = [peer for peer in found if peer.absent is None]
    # torch and what it brings along; nobody else's scores and selections are called yet
    assert len(present) >= (3 if operation in ("attention", "mla_prefill") else 0)
    for one in found:
        assert (one.kernel is None) == (one.absent is not None)
    for one in present:
        assert one.kernel in judged
        assert one.version is not None
        assert [kernel.name for kernel in find_kernels(operations.load(operation), one.kernel)] == [one.kernel]


def test_every_provider_is_of_the_house_or_of_a_library() -> None:
    named = {library.provider for library in peers.LIBRARIES if "attention" in library.serves} - {None}
    assert named | {"torch", "triton"} == set(optimized.PROVIDERS)


def test_without_anything_installed_each_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch)
    for name, package in NAMED.items():
        found = peer("attention", name)
        assert (found.package, found.version, found.kernel) == (package, None, None)
    assert peer("attention", "FlashAttention 4").absent == "not installed: no module flash_attn.cute"
    missing = "not installed: no module flash_attn_interface or vllm.vllm_flash_attn"
    assert peer("mla_prefill", "FlashAttention 3").absent == missing


def test_a_library_of_another_operation_is_absent_although_installed(packages: Path) -> None:
    install(packages, "flash_mla", "tokenspeed-flashmla")
    found = peer("attention", "FlashMLA")
    assert (found.version, found.kernel, found.absent) == ("1.2.3", None, "serves: sparse_mla")
    assert peer("sparse_mla", "FlashMLA").kernel == "sparse_mla[flashmla]"


def test_a_library_for_a_later_operation_is_absent_although_installed(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(packages, "fla", "fla-core")
    table = tuple(replace(library, serves=("some_day",)) for library in peers.LIBRARIES)
    monkeypatch.setattr(peers, "LIBRARIES", table)
    found = peer("attention", "flash-linear-attention")
    assert (found.version, found.kernel, found.absent) == ("1.2.3", None, "no operation yet: some_day")


def test_a_library_for_other_operations_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    table = tuple(replace(library, serves=("mla_prefill",)) for library in peers.LIBRARIES)
    monkeypatch.setattr(peers, "LIBRARIES", table)
    assert peer("attention", "torch FlexAttention").absent == "serves: mla_prefill"
    assert peer("mla_prefill", "torch FlexAttention").kernel == "mla_prefill[flex]"


def test_a_version_is_that_of_the_distribution_at_hand(packages: Path) -> None:
    install(packages, "flash_kda", "flash-kda", "0.9")
    found = peer("attention", "FlashKDA")
    assert (found.package, found.version) == ("flash-kda", "0.9")


def test_a_module_without_metadata_is_there_but_of_no_known_version(packages: Path) -> None:
    install(packages, "flash_attn.cute")
    found = peer("attention", "FlashAttention 4")
    assert (found.package, found.version) == ("flash-attn-4", "unknown")
    assert (found.kernel, found.absent) == ("attention[fa4]", None)


def test_a_distribution_without_the_module_is_not_the_library(packages: Path) -> None:
    # vLLM for a machine without CUDA
    install(packages, "vllm", "vllm")
    assert importlib.metadata.version("vllm") == "1.2.3"
    assert peer("attention", "FlashAttention 3").absent is not None
    assert "fa3" not in providers.known_providers()
    install(packages, "vllm.vllm_flash_attn")
    found = peer("attention", "FlashAttention 3")
    assert (found.package, found.version, found.kernel) == ("vllm", "1.2.3", "attention[fa3]")
    assert "fa3" in providers.available_providers()


def test_what_comes_with_torch_is_judged_only_when_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert providers.BY_NAME == ("flash", "flex")
    only(monkeypatch, "flashinfer", "cudnn", "torch")
    assert providers.available_providers() == ["torch", "sdpa", "triton", "flashinfer", "cudnn_frontend"]
    assert providers.known_providers() == [*providers.available_providers(), "flash", "flex"]


def test_the_doctor_asks_for_the_same_libraries() -> None:
    homes = {module for library in peers.LIBRARIES for module in library.homes}
    assert set(PROVIDERS) == homes - {"torch"}


def test_an_operation_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"op must be one of attention, .*, got 'sparse'"):
        peers.for_operation("sparse")


def test_the_table_can_be_read_without_torch() -> None:
    program = "import sys; from assay.harness import peers; print(len(peers.LIBRARIES), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(len(NAMED)), "False"], done.stderr
