"""The builds of the compile gate: each Triton kernel of the house as the host code would have it compiled.

A build is made by calling the public function of the operation on a stand-in device, so its signature, constants and
tile are those that a GPU would see. Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

ARCHITECTURES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0)}

_CALLS = "assay.harness.counts._compile_calls"

# head sizes of models: DeepSeek-V3 expanded, GLM-5 expanded, Llama, and one that divides into no tile
_GEOMETRIES = ((192, 128), (256, 256), (128, 128), (72, 40))
# the remaining branches of the tile choice: small heads, and an absorbed latent row
_OTHER_TILES = ((64, 64), (576, 512))

# R/Dn/Dr/Dv: DeepSeek-V3.2, and GLM-5.3-Flash, which has no rope part
_LATENT_GEOMETRIES = ((512, 128, 64, 128), (512, 256, 0, 256))
# heads on a rank and width of a latent row
_TRITON_SELECTIONS = (("sm_90a", 8, 512), ("sm_90a", 8, 576), ("sm_90a", 64, 576))
_SCORE_KERNELS = {
    "logits": ("logits_kernel",),
    "probability": ("denominator_kernel", "join_kernel", "probability_kernel"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One specialisation of a kernel for one architecture.

    Attributes:
        arch: A key of ``ARCHITECTURES``.
        kernel: The jitted function, ``file stem.function``.
        variant: What tells it from other builds of the kernel.
        ops: Operations that launch it.
        call: ``module:function`` that takes the host's way to the launch.
        arguments: Of that function; JSON values.
    """

    arch: str
    kernel: str
    variant: str
    ops: tuple[str, ...]
    call: str
    arguments: dict[str, Any]

    @property
    def name(self) -> str:
        """The build in records and messages."""
        return f"{self.arch} {self.kernel.partition('.')[2]} {self.variant}"


def builds() -> list[Build]:
    """Everything that the gate compiles: all of it for Hopper, one of each kind for the other architectures."""
    hopper = [
        *(_attention("sm_90a", sizes, dtype) for sizes in _GEOMETRIES for dtype in ("bfloat16", "float16", "float32")),
        *(_attention("sm_90a", sizes, causal=False) for sizes in _GEOMETRIES),
        *(_attention("sm_90a", sizes, aligned=False) for sizes in _GEOMETRIES),
        *(_attention("sm_90a", sizes) for sizes in _OTHER_TILES),
        _attention("sm_90a", (128, 128), positive_scale=False),
    ]
    others = [build for arch in ("sm_80", "sm_100a") for build in _one_of_each_kind(arch)]
    scores = [build for arch in ARCHITECTURES for build in _scores(arch)]
    merges = [
        _merge(arch, width) for arch in ARCHITECTURES for width in ((128, 256, 40) if arch == "sm_90a" else (128,))
    ]
    return [*hopper, *others, *merges, *scores, *_selections(), *_masks(), *_recurrences()]


def _one_of_each_kind(arch: str) -> Iterator[Build]:
    yield from (_attention(arch, sizes) for sizes in _GEOMETRIES)
    yield _attention(arch, (192, 128), aligned=False)


def _attention(
    arch: str,
    sizes: tuple[int, int],
    dtype: str = "bfloat16",
    *,
    causal: bool = True,
    aligned: bool = True,
    positive_scale: bool = True,
) -> Build:
    marks = {"causal": causal, "unaligned": not aligned, "scale below 0": not positive_scale}
    arguments = {"head_dim_qk": sizes[0], "head_dim_v": sizes[1], "dtype": dtype, "causal": causal, "aligned": aligned}
    return Build(
        arch=arch,
        kernel="_attention_triton_kernel.attention_kernel",
        variant=", ".join([f"{sizes[0]}/{sizes[1]} {dtype}", *(mark for mark, holds in marks.items() if holds)]),
        ops=("attention", "mla_prefill"),
        call=f"{_CALLS}:attend",
        arguments=arguments | {"positive_scale": positive_scale},
    )


def _scores(arch: str) -> Iterator[Build]:
    """Each kernel of the token scores, with a rope part and without."""
    geometries = _LATENT_GEOMETRIES if arch == "sm_90a" else _LATENT_GEOMETRIES[:1]
    for mode, kernels in _SCORE_KERNELS.items():
        for kernel in kernels:
            # what joins the parts of the denominators knows no width
            for geometry in geometries[:1] if kernel == "join_kernel" else geometries:
                yield Build(
                    arch=arch,
                    kernel=f"_token_scores_triton_kernel.{kernel}",
                    variant=f"{'/'.join(map(str, geometry))} bfloat16",
                    ops=("token_scores",),
                    call=f"{_CALLS}:score",
                    arguments={"mode": mode, "geometry": geometry, "dtype": "bfloat16"},
                )


def _selections() -> Iterator[Build]:
    """Sparse MLA for native heads: plain Triton everywhere, Gluon on Hopper, its lists united, its answers mended."""
    for arch, h_q, d_qk in (*_TRITON_SELECTIONS, ("sm_80", 8, 576), ("sm_100a", 8, 576)):
        yield _selection(arch, "_sparse_mla_triton_kernel.sparse_mla_kernel", "triton", h_q, d_qk)
    for h_q in (8, 16, 32):
        yield _selection("sm_90a", "_sparse_mla_gluon_swap.swap_kernel", "gluon", h_q, 512)
        yield _selection("sm_90a", "_sparse_mla_gluon_split.split_kernel", "gluon", h_q, 576)
    for h_q, d_qk in ((8, 512), (8, 576), (16, 576)):
        yield _selection("sm_90a", "_sparse_mla_gluon_union.union_kernel", "gluon-union", h_q, d_qk)
    for kernel in (
        "_sparse_mla_lists_kernel.mark_kernel",
        "_sparse_mla_lists_kernel.compact_kernel",
        "_sparse_mla_triton_kernel.flagged_kernel",
    ):
        yield _selection("sm_90a", kernel, "gluon-union", 8, 576)


def _selection(arch: str, kernel: str, implementation: str, h_q: int, d_qk: int) -> Build:
    return Build(
        arch=arch,
        kernel=kernel,
        variant=f"{h_q} heads of {d_qk} bfloat16",
        ops=("sparse_mla",),
        call=f"{_CALLS}:attend_selection",
        arguments={"implementation": implementation, "h_q": h_q, "d_qk": d_qk},
    )


def _masks() -> Iterator[Build]:
    """The mask of a selection for one request and for many, attention under it, and the indexer that selects."""
    folder = "_topk_mask_triton_kernel"
    for requests, kernels in ((1, ("mark_single_kernel", "map_kernel")), (8, ("mark_kernel",))):
        for kernel in kernels:
            yield _plain(
                "sm_90a", f"{folder}.{kernel}", f"{requests} requests", "topk_mask", "pack_selection", requests=requests
            )
    yield _plain("sm_90a", "_indexer_triton.score_kernel", "64 heads of 128 bfloat16", "indexer", "choose_keys")
    # for Blackwell the masked kernel is refused: it does not compile
    for arch in ("sm_80", "sm_90a"):
        for aligned in (True, False) if arch == "sm_90a" else (True,):
            for kernel in ("masked_mha_kernel", "list_kernel") if aligned else ("masked_mha_kernel",):
                variant = "192/128 bfloat16" + ("" if aligned else ", unaligned")
                sizes = {"head_dim_qk": 192, "head_dim_v": 128, "aligned": aligned}
                yield _plain(
                    arch, f"_masked_mha_triton_kernel.{kernel}", variant, "masked_mha", "attend_masked", **sizes
                )


def _plain(arch: str, kernel: str, variant: str, op: str, call: str, **arguments: Any) -> Build:
    return Build(arch=arch, kernel=kernel, variant=variant, ops=(op,), call=f"{_CALLS}:{call}", arguments=arguments)


def _recurrences() -> Iterator[Build]:
    """The gated delta rule: for models, for any gate, whole and in segments, and a step on a state pool."""
    prepare = {"flash": "_kda_flash_kernel.prepare_kernel", "triton": "_kda_triton_kernel.prepare_kernel"}
    scan, seed = "_kda_scan_kernel.scan_kernel", "_kda_scan_kernel.seed_kernel"
    # short sequences are not cut, and so are walked in one form
    for implementation, kernel in prepare.items():
        yield _recurrence("sm_90a", kernel, implementation, (128, 128))
        yield _recurrence("sm_90a", scan, implementation, (128, 128))
    for kernel in (prepare["triton"], scan):
        yield _recurrence("sm_90a", kernel, "triton", (60, 100), dtype="float16", gate="log")
        yield _recurrence("sm_80", kernel, "triton", (128, 128))
        yield _recurrence("sm_100a", kernel, "triton", (128, 128))
    yield _recurrence("sm_90a", seed, "flash", (128, 128), tokens=8192)
    for arch in ARCHITECTURES:
        yield Build(
            arch=arch,
            kernel="_kda_step_triton_kernel.step_kernel",
            variant="128/128 bfloat16",
            ops=("kda_step",),
            call=f"{_CALLS}:step_states",
            arguments={},
        )


def _recurrence(
    arch: str,
    kernel: str,
    implementation: str,
    sizes: tuple[int, int],
    *,
    dtype: str = "bfloat16",
    gate: str = "bounded",
    tokens: int = 1024,
) -> Build:
    return Build(
        arch=arch,
        kernel=kernel,
        variant=f"{implementation} {sizes[0]}/{sizes[1]} {dtype}, {gate}",
        ops=("kda",),
        call=f"{_CALLS}:recur",
        arguments={
            "implementation": implementation,
            "head_dim_k": sizes[0],
            "head_dim_v": sizes[1],
            "dtype": dtype,
            "gate": gate,
            "tokens": tokens,
        },
    )


def _merge(arch: str, width: int) -> Build:
    return Build(
        arch=arch,
        kernel="_merge_triton._merge_kernel",
        variant=f"{width} bfloat16",
        ops=("mla_prefill",),
        call=f"{_CALLS}:merge",
        arguments={"width": width, "dtype": "bfloat16"},
    )
