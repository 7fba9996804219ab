"""Shapes and grids from TOML files."""

from pathlib import Path

import pytest

from assay.harness.bench.shapes import packaged_shapes, read_shapes, read_sweep
from assay.harness.plan import UsageError

TABLE = """
[[shape]]
name = "small"
op = "attention"
source = "a test"
num_heads = 4
num_kv_heads = 2
d_qk = 64
d_v = 32
query_lens = [8]
key_lens = [8]
causal = true
softmax_scale = 0.125
layout = "packed"
"""


def written(folder: Path, text: str) -> Path:
    (folder / "shapes.toml").write_text(text)
    return folder / "shapes.toml"


def test_the_packaged_shapes_are_models_with_a_source() -> None:
    shapes = {shape.name: shape for shape in packaged_shapes()}
    assert {shape.op for shape in shapes.values()} == {"attention", "mla_prefill"}
    assert {shape.dtype for shape in shapes.values()} == {"bfloat16"}
    assert all("config.json" in shape.source for shape in shapes.values())
    for shape in shapes.values():
        sizes = shape.sizes
        width = sizes["d_qk"] if shape.op == "attention" else sizes["d_nope"] + sizes["d_rope"]
        assert sizes["softmax_scale"] == width**-0.5
    geometries = {
        (s.sizes["d_qk"], s.sizes["d_v"], s.sizes["num_heads"]) for s in shapes.values() if s.op == "attention"
    }
    assert geometries == {(192, 128, 16), (192, 128, 128), (256, 256, 20)}
    mixed = shapes["deepseek-v3-tp8-mixed"].sizes
    assert sum(mixed["query_lens"]) == 16384
    assert mixed["query_lens"] == mixed["key_lens"]


def test_a_shape_becomes_a_case_of_its_operation(tmp_path: Path) -> None:
    (shape,) = read_shapes(written(tmp_path, TABLE))
    case = shape.case(7)
    assert (case.op, case.family, case.dtype, case.seed) == ("attention", "diffuse", "bfloat16", 7)
    assert case.sizes["key_lens"] == [8]
    assert shape.case(8).id != case.id


def test_the_digest_follows_the_sizes_and_not_the_name(tmp_path: Path) -> None:
    (shape,) = read_shapes(written(tmp_path, TABLE))
    (renamed,) = read_shapes(written(tmp_path, TABLE.replace('"small"', '"tiny"')))
    (longer,) = read_shapes(written(tmp_path, TABLE.replace("[8]", "[9]")))
    (other,) = read_shapes(written(tmp_path, TABLE + 'dtype = "float16"\n'))
    assert renamed.digest == shape.digest
    assert len({shape.digest, longer.digest, other.digest}) == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("d_v = 32", "", "missing d_v, unknown none"),
        ("d_v = 32", "d_v = 32\ngroups = 2", "missing none, unknown groups"),
        ('"attention"', '"attend"', "op of a shape must be one of attention, mla_prefill"),
        ('name = "small"', "", "a shape must have a name, got None"),
        ("d_v = 32", 'd_v = "32"', "d_v must be a int, got '32'"),
        ("causal = true", "causal = 1", "causal must be a bool, got 1"),
        ("d_v = 32", 'd_v = 32\ndtype = "int8"', "dtype must be one of float32, float16, bfloat16, got 'int8'"),
        ("[[shape]]", "[[shapes]]", "must hold tables"),
        ("[[shape]]", "[[shape]", "must be valid TOML"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in TABLE
    with pytest.raises(UsageError, match=told):
        read_shapes(written(tmp_path, TABLE.replace(old, new)))


def test_two_shapes_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be its own, got 'small' twice"):
        read_shapes(written(tmp_path, TABLE + TABLE))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shapes must be a TOML file"):
        read_shapes(tmp_path / "none.toml")


def sweep(folder: Path, text: str) -> list[str]:
    (folder / "sweep.toml").write_text(text)
    points = read_sweep(folder / "sweep.toml", read_shapes(written(folder, TABLE)))
    return [f"{p.name} {p.sizes['num_heads']} {p.sizes['query_lens']} {p.sizes['key_lens']}" for p in points]


def test_a_sweep_is_the_grid_of_its_axes(tmp_path: Path) -> None:
    text = '[[sweep]]\nbase = "small"\n[sweep.axes]\nnum_heads = [2, 4]\n"query_lens, key_lens" = [[8], [16]]\n'
    assert sweep(tmp_path, text) == [
        "small: num_heads=2, query_lens, key_lens=8 2 [8] [8]",
        "small: num_heads=2, query_lens, key_lens=16 2 [16] [16]",
        "small: num_heads=4, query_lens, key_lens=8 4 [8] [8]",
        "small: num_heads=4, query_lens, key_lens=16 4 [16] [16]",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[[sweep]]\nbase = "large"\naxes = {d_v = [1]}\n', "base must be one of small, got 'large'"),
        ('[[sweep]]\nbase = "small"\nop = "kda"\naxes = {d_v = [1]}\n', "op must be that of small, attention"),
        ('[[sweep]]\nbase = "small"\n', "axes must name sizes with a list of values each, got None"),
        ('[[sweep]]\nbase = "small"\naxes = {d_v = 1}\n', "axes must name sizes with a list of values each"),
        ('[[sweep]]\nbase = "small"\naxes = {width = [1]}\n', "an axis must name sizes among .*, got 'width'"),
        ('[[sweep]]\nbase = "small"\naxes = {query_lens = [8]}\n', "query_lens must be a list, got 8"),
    ],
)
def test_a_sweep_that_is_not_understood_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        sweep(tmp_path, text)
