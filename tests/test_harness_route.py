"""``assay route``: its answers, exit codes, and the table that a calibration makes of times."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from assay.harness import cli, route_calibrate, route_command
from assay.harness.route_calibrate import NATIVE_QUERIES, QUERY_LENS, SEQ_LENS, Timing, calibrated
from assay.optimized.routing import Deployment, RoutingTable, Step, find_geometry, load_table, route

GLM5 = find_geometry("glm5")


def said(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["route", *arguments])
    return result.exit_code, re.sub(r"\s+", " ", result.output)


@pytest.mark.parametrize(
    ("arguments", "path", "reasons"),
    [
        (
            "--geometry glm5.3-flash --tp 4 --q 4096 --seq 16384",
            "native_heads 16 heads instead of 64 for 4096 queries",
            ["not dense_mha max_seq_len 16384 > topk 2048", "not sparse_mqa native_heads comes before it"],
        ),
        (
            "--geometry deepseek-v3.2 --tp 8 --q 4096,1 --seq 8000,90000 --device-family 100 --flash-attention 4",
            "masked_mha max_query_len 4096 >= 1024 for max_seq_len 8000 <= 8192",
            ["not dense_mha max_seq_len 8000 > topk 2048"],
        ),
        ("--geometry glm-5 --tp 8 --q 2048 --seq 2048", "dense_mha max_seq_len 2048 <= topk 2048", []),
        (
            "--geometry deepseek-v4-flash --tp 8 --q 4096 --seq 9000 --no-native",
            "sparse_mqa 8 heads, padded to 64",
            ["not native_heads switched off", "(448, 64, 512) is not among"],
        ),
        (
            "--geometry deepseek-v4-flash --tp 8 --q 40 --seq 9000 --native-min-queries 0",
            "native_heads 8 heads instead of 64 for 40 queries",
            [],
        ),
        ("--geometry glm5 --q 9 --seq 9 --force mqa", "sparse_mqa 64 heads, padded to 64 (forced: mqa)", []),
        ("--geometry glm5 --q 1,1 --seq 9,9", "none no request has more than 1 queries", []),
    ],
)
def test_an_answer_with_its_reasons(
    arguments: str, path: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_command, "_family", lambda: 90)
    code, output = said(*arguments.split())
    assert code == 0, output
    for text in (path, *reasons):
        assert text in output


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ("--geometry glm9 --q 5 --seq 5", 2, "geometry must be one of deepseek-v3.2"),
        ("--geometry glm5", 2, "--q and --seq must be given unless --calibrate is"),
        ("--geometry glm5 --q 5,x --seq 5", 2, "--q must be whole numbers with commas between, got '5,x'"),
        ("--geometry glm5 --q 5 --seq 4", 2, "query_lens must be 1 to the seq_len"),
        ("--geometry glm5 --q 5 --seq 5 --force Dense", 2, "force must be one of dense, masked, mqa"),
        ("--geometry glm5 --q 5 --seq 5 --native-min-queries -1", 2, "native_min_queries must not be negative"),
        ("--geometry glm5 --q 5 --seq 5 --native-min-queries few", 2, "native-min-queries"),
        ("--geometry glm5 --q 5 --seq 5 --table no.json", 2, "table must be vllm or a JSON file"),
        ("--geometry glm5 --q 5 --seq 5 --tp 3", 2, "tp must divide the 64 heads of glm5, got 3"),
        ("--geometry glm5 --q 5000 --seq 5000 --force dense", 1, "dense_mha is forced and cannot serve glm5"),
    ],
)
def test_bad_input_and_what_cannot_serve(arguments: str, code: int, text: str) -> None:
    result = CliRunner().invoke(cli.app, ["route", *arguments.split()])
    assert result.exit_code == code
    assert text in re.sub(r"\s+", " ", result.output + result.stderr)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to calibrate")
def test_calibration_needs_a_gpu() -> None:
    result = CliRunner().invoke(cli.app, ["route", "--geometry", "glm5", "--calibrate"])
    assert result.exit_code == 3
    assert "needs a CUDA device" in result.stderr


def table_of(clocked: route_calibrate.Clocked) -> RoutingTable:
    return calibrated(GLM5, tp=8, device_family=90, backend="B", name="here", source="a test", clocked=clocked)


def test_a_threshold_is_where_a_path_begins_to_be_faster() -> None:
    asked = []

    def clocked(path: str, query_len: int, seq_len: int) -> Timing:
        asked.append((path, query_len, seq_len))
        if path == "sparse_mqa":
            return query_len / 1000
        if path == "native_heads":
            return 0.5 + query_len / 4000
        # the work grows with the context, and a mask is not worth building for a few queries
        return 0.4 + query_len * seq_len / 1.2e7

    table = table_of(clocked)
    (row,) = table.masked
    # by hand: 0.4 + q s / 1.2e7 < q / 1000, at the lengths that were tried
    assert row.min_query_lens == (1024, 2048, None, None)
    # 0.5 + q / 4000 < q / 1000 from 667 queries on
    assert table.native.min_queries == 1024
    assert (table.native.device_families, table.native.widths, table.native.max_heads) == ((90,), (576,), 8)
    assert {(query_len, seq_len) for path, query_len, seq_len in asked if path == "masked_mha"} == {
        (query_len, seq_len) for seq_len in SEQ_LENS for query_len in QUERY_LENS if query_len <= seq_len
    }
    deployment = Deployment(device_family=90, tp=8, backend="B")
    answers = {
        length: route(GLM5, Step(query_lens=(length,), seq_lens=(4096,)), deployment, table=table).path
        for length in (1000, 1023, 1024, 1025)
    }
    assert answers == {1000: "sparse_mqa", 1023: "sparse_mqa", 1024: "masked_mha", 1025: "masked_mha"}


def test_what_is_faster_here_and_slower_there_counts_from_the_last_slower_one_on() -> None:
    slower = {256, 1024}
    table = table_of(lambda path, q, s: {"sparse_mqa": 1.0}.get(path, 2.0 if q in slower else 0.5))
    assert table.native.min_queries == 2048
    assert table.masked[0].min_query_lens == (2048, 2048, 2048, 2048)
    never = table_of(lambda path, q, s: 1.0 if path == "sparse_mqa" else 1.5)
    assert never.native.device_families == ()
    assert never.masked[0].min_query_lens == (None,) * 4


def test_a_path_that_does_not_serve_is_not_in_the_table() -> None:
    table = table_of(lambda path, q, s: 1.0 if path == "sparse_mqa" else "not here")
    assert (table.masked, table.masked_geometries, table.native.device_families) == ((), (), ())
    answer = route(GLM5, Step(query_lens=(9000,), seq_lens=(9000,)), Deployment(device_family=90, tp=8), table=table)
    assert answer.path == "sparse_mqa"
    assert "is not among" in answer.refused["masked_mha"]
    with pytest.raises(NotImplementedError, match="sparse_mqa must serve to be compared with, got: not here"):
        table_of(lambda path, q, s: "not here" if path == "sparse_mqa" else 1.0)


def test_a_calibrated_table_can_be_read_again(tmp_path: Path) -> None:
    table = table_of(lambda path, q, s: 1.0 if path == "sparse_mqa" else 0.5)
    assert table.native.min_queries == NATIVE_QUERIES[0]
    path = tmp_path / "here.json"
    path.write_text(json.dumps(dataclasses.asdict(table)))
    assert load_table(path) == table


@pytest.mark.gpu
def test_this_gpu_is_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route_calibrate, "SEQ_LENS", (4096, 8192))
    monkeypatch.setattr(route_calibrate, "NATIVE_QUERIES", (256, 2048, 8192))
    out = tmp_path / "table.json"
    code, output = said("--geometry", "glm5.3-flash", "--tp", "8", "--calibrate", "--out", str(out))
    assert code == 0, output
    table = load_table(out)
    print(json.dumps(dataclasses.asdict(table)))
    assert torch.cuda.get_device_name() in table.source
    if torch.cuda.get_device_capability() == (9, 0):
        # eight heads instead of 64: native heads must win somewhere
        assert table.native.device_families == (90,)
        code, output = said(
            "--geometry", "glm5.3-flash", "--tp", "8", "--q", "8192", "--seq", "32768", "--table", str(out)
        )
        assert "native_heads 8 heads instead of 64" in output
