"""OpenAI-compatible servers: what is sent, what is read, and every way in which a server can fail."""

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from eval_models import SUITE
from eval_server import START, Stub, Waits, recorded, serving
from typer.testing import CliRunner

from assay.eval import cli
from assay.eval.models import load_model
from assay.eval.models._openai_answers import Streamed, events, lines
from assay.eval.models.interface import Failure, Generated, GenerateRequest, Scored, ScoreRequest
from assay.eval.models.openai import GREEDY, OpenAIModel
from assay.eval.run_folder import RunFolder

pytest.importorskip("httpx", reason="the extra `server` is not installed")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "ASSAY_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def made(server: Stub, waits: Waits | None = None, **options: str) -> OpenAIModel:
    model = load_model("openai", {"url": server.url} | options)
    assert isinstance(model, OpenAIModel)
    model._sleep = recorded([] if waits is None else waits)
    return model


def request(text: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(prompt_ids=(START, *map(ord, text)), **{"max_new_tokens": 8} | fields)


def test_greedy_parameters_and_token_ids_are_sent_one_by_one() -> None:
    with serving() as server:
        model = made(server)
        found = model.generate([request("abcdef", stop=("\n",), min_new_tokens=1)])[0]
    body = server.bodies[0]
    assert body["prompt"] == [START, *map(ord, "abcdef")]
    assert {name: body[name] for name in GREEDY} == GREEDY
    assert (body["temperature"], body["top_p"], body["top_k"], body["repetition_penalty"]) == (0, 1, 1, 1.0)
    assert (body["max_tokens"], body["min_tokens"], body["stop"]) == (8, 1, ["\n"])
    assert isinstance(found, Generated)
    assert (found.text, found.ids, found.finish_reason) == ("fedc", tuple(map(ord, "fedc")), "length")
    assert found.gaps == (0.75, 1.75, 2.75, 3.75)
    assert found.latency_s is not None
    assert found.first_token_s is not None
    assert 0 <= found.first_token_s <= found.latency_s
    assert found.facts["usage"]["completion_tokens_details"] == {"accepted_prediction_tokens": 3}


def test_what_is_served_is_described_and_not_the_address() -> None:
    with serving() as server:
        model = made(server, flags="--kv-cache-dtype fp8")
        described = model.describe()
        assert model.context_length == 4096
        assert server.url not in json.dumps(described)
    assert described["served"] == {"id": "stub", "max_model_len": 4096}
    assert (described["version"], described["flags"], described["name"]) == ("1.2.3", "--kv-cache-dtype fp8", "stub")
    assert described["parameters"] == GREEDY


def test_a_server_without_token_ids_is_told_from_one_with_them() -> None:
    with serving(served_ids=False) as server:
        found = made(server).generate([request("abcdef")])[0]
    assert isinstance(found, Generated)
    assert found.ids == tuple(map(ord, "fedc"))
    assert found.facts["ids_from"] == "text"


def test_letters_that_part_lines_elsewhere_stay_in_their_answer() -> None:
    with serving() as server:
        found = made(server).generate([request("\u2028\u2029\u0085\u00e9")])[0]
    assert isinstance(found, Generated), found
    assert (found.text, len(server.bodies)) == ("\u00e9\u0085\u2029\u2028", 1)


def test_events_end_where_lines_do_however_they_are_packed() -> None:
    stream = 'data: {"at": 1, "text": "a\u2028b"}\r\n\r\n: a comment\ndata: {"at": 2}\n\ndata: [DONE]'

    async def packed(size: int) -> AsyncIterator[str]:
        for at in range(0, len(stream), size):
            yield stream[at : at + size]

    async def read(size: int) -> list[Any]:
        return [event async for event in events(lines(packed(size)))]

    for size in (1, 7, 30, len(stream)):
        assert asyncio.run(read(size)) == [{"at": 1, "text": "a\u2028b"}, {"at": 2}]


def test_a_letter_in_two_halves_is_one_letter() -> None:
    answer = Streamed()
    for half, end in (("\ud83d", None), ("\ude00!", None), ("\ud83d", "stop")):
        answer.add({"choices": [{"text": half, "finish_reason": end}]}, 0.0)
    answer.check()
    assert answer.text == "\U0001f600!\ufffd"


def test_answers_keep_the_order_of_their_requests_and_the_server_its_limit() -> None:
    with serving() as server:
        model = made(server, concurrency="3")
        # three requests wait for each other, so three are under way, and never four
        server.meeting = threading.Barrier(3)
        found = model.generate([request(f"{at:04d}") for at in range(9)])
    assert [one.text for one in found if isinstance(one, Generated)] == [f"{at:04d}"[::-1] for at in range(9)]
    assert server.most == 3


@pytest.mark.parametrize(
    ("fault", "wait"),
    [
        (429, 1.0),
        (500, 1.0),
        (503, 1.0),
        ((429, "7"), 7.0),
        ((429, "3600"), 60.0),
        ("cut", 1.0),
        ("garbage", 1.0),
        ("two", 1.0),
        ("abort", 1.0),
    ],
)
def test_what_may_pass_is_tried_again_after_a_wait(fault: Any, wait: float) -> None:
    waits: Waits = []
    with serving({1: fault}) as server:
        found = made(server, waits).generate([request("abcd")])[0]
    assert isinstance(found, Generated), found
    assert (found.text, len(server.bodies), waits) == ("dcba", 2, [wait])


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_is_not_tried_again(status: int) -> None:
    waits: Waits = []
    with serving({1: status}) as server:
        found = made(server, waits).generate([request("abcd")])[0]
    assert isinstance(found, Failure)
    assert (found.status, len(server.bodies), waits) == ("error", 1, [])
    assert f"the server answers {status}" in found.reason


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (500, "the server answers 500"),
        ("cut", "an event must be JSON"),
        ("abort", "the finish reason must be 'stop' or 'length', got 'abort'"),
        ("two", "a request must have one answer, got 2"),
    ],
)
def test_what_does_not_pass_is_a_failure_with_its_reason(fault: Any, reason: str) -> None:
    waits: Waits = []
    with serving(dict.fromkeys(range(1, 9), fault)) as server:
        found = made(server, waits, retries="3").generate([request("abcd")])[0]
    assert isinstance(found, Failure)
    assert found.status == "error"
    assert reason in found.reason
    assert "in the last of 4 tries" in found.reason
    assert (len(server.bodies), waits) == (4, [1.0, 2.0, 4.0])


def test_a_slow_server_is_a_timeout_and_no_wrong_answer() -> None:
    with serving({1: "slow", 2: "slow"}) as server:
        found = made(server, timeout="0.2", retries="1").generate([request("abcd")])[0]
    assert isinstance(found, Failure)
    assert (found.status, found.reason) == ("timeout", "no answer within 0.2 s, in the last of 2 tries")
    with serving({1: "slow"}) as server:
        assert isinstance(made(server, timeout="0.2").generate([request("abcd")])[0], Generated)


def test_one_failure_leaves_the_others_alone() -> None:
    with serving({2: 400}) as server:
        found = made(server, concurrency="1").generate([request(text) for text in ("aaaa", "bbbb", "cccc")])
    assert [isinstance(one, Generated) for one in found] == [True, False, True]


def test_a_server_that_is_gone_is_an_error() -> None:
    with serving() as server:
        model = made(server, retries="1")
    found = model.generate([request("abcd")])[0]
    assert isinstance(found, Failure)
    assert found.status == "error"
    assert "ConnectError" in found.reason


def test_several_endpoints_take_turns_and_stand_in_for_each_other() -> None:
    with serving() as first, serving(dict.fromkeys(range(1, 99), 500)) as second:
        model = load_model("openai", {"url": f"{first.url},{second.url}"})
        assert isinstance(model, OpenAIModel)
        model._sleep = recorded([])
        found = model.generate([request(f"{at:04d}") for at in range(6)])
    assert all(isinstance(one, Generated) for one in found)
    assert (len(first.bodies), len(second.bodies)) == (6, 3)


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_log_probabilities_of_prompts_are_those_of_the_tokens_sent(flavour: str) -> None:
    with serving() as server:
        found = made(server, flavour=flavour).score([ScoreRequest(prompt_ids=(START, 97, 98), target_ids=(99, 100))])[0]
    assert isinstance(found, Scored)
    assert found.prompt == pytest.approx((-0.097, -0.098))
    assert found.target == pytest.approx((-0.099, -0.1))


def test_a_server_without_log_probabilities_says_so() -> None:
    with serving(dict.fromkeys(range(1, 9), "garbage")) as server:
        found = made(server, retries="0").score([ScoreRequest(prompt_ids=(START, 97), target_ids=(99,))])[0]
    assert isinstance(found, Failure)
    assert "prompt_logprobs must be given for 3 tokens, got 0" in found.reason


def test_the_servers_tokenizer_leaves_out_what_it_adds() -> None:
    with serving() as server:
        tokenizer = made(server).tokenizer
        assert tokenizer.encode("ab", special=True) == [START, 97, 98]
        assert tokenizer.encode("ab", special=False) == [97, 98]
        assert tokenizer.decode([START, 97, 98]) == "ab"
        assert not tokenizer.has_chat_template
        with pytest.raises(ValueError, match="a chat template needs a local tokenizer"):
            tokenizer.chat("ab")


def test_keys_come_from_the_environment_and_go_nowhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = "sk-very-secret-12345"
    monkeypatch.setenv("OPENAI_API_KEY", key)
    suite = tmp_path / "tiny.toml"
    suite.write_text(SUITE.format(asking=""))
    with serving({5: 400}) as server:
        arguments = ["run", str(suite), "--model", "openai", "-o", f"url={server.url}", "--out", str(tmp_path / "run")]
        result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, arguments)
    # the stub sends the key back in its refusal
    assert result.exit_code == 5, result.output
    assert {header.get("authorization") for header in server.headers} == {f"Bearer {key}"}
    assert key not in result.output
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert key.encode() not in path.read_bytes(), path
    records = [
        one for task in RunFolder(tmp_path / "run").tasks() for one in RunFolder(tmp_path / "run").attempts(task)
    ]
    assert [one["error"] for one in records if one["status"] != "ok"] == [
        'RefusedError: the server answers 400: {"error": "no: Bearer [redacted]"}',
    ]


def test_a_local_tokenizer_runs_no_code_of_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    class Local:
        chat_template = "{{ messages }}"

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            seen["encode"] = options
            return {"input_ids": [START, *map(ord, text)] if options["add_special_tokens"] else list(map(ord, text))}

        def decode(self, ids: list[int], **options: Any) -> str:
            seen["decode"] = options
            return "".join(map(chr, ids))

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            seen["chat"] = options
            return f"<|user|>{messages[0]['content']}<|assistant|>"

    def from_pretrained(name: str, **options: Any) -> Local:
        seen["load"] = (name, options)
        return Local()

    fake = SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))
    monkeypatch.setitem(sys.modules, "transformers", fake)
    with serving() as server:
        model = made(server, tokenizer="some/folder")
    assert seen["load"] == ("some/folder", {"trust_remote_code": False})
    assert model.tokenizer.has_chat_template
    assert model.tokenizer.chat("hi") == "<|user|>hi<|assistant|>"
    assert seen["chat"] == {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert model.tokenizer.encode("a", special=True) == [START, 97]
    assert model.tokenizer.decode([97]) == "a"
    assert seen["decode"]["skip_special_tokens"] is True
    assert model.describe()["tokenizer"] == "some/folder"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "other"}, "model must be one that the server has, stub, got 'other'"),
        ({"flavour": "trt"}, "flavour must be vllm or sglang, got 'trt'"),
        ({"concurrency": "0"}, "concurrency and timeout must be positive"),
        ({"url": "localhost:8000"}, "url must be one or more addresses with http"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, str], message: str) -> None:
    with serving() as server, pytest.raises(ValueError, match=message):
        load_model("openai", {"url": server.url} | options)


def test_a_server_of_two_models_wants_a_name() -> None:
    with serving(models=("one", "two")) as server:
        with pytest.raises(ValueError, match="model must be one that the server has, one, two, got ''"):
            load_model("openai", {"url": server.url})
        assert load_model("openai", {"url": server.url, "model": "two"}).describe()["name"] == "two"
    with pytest.raises(ValueError, match=r"/models must answer, got ConnectError"):
        load_model("openai", {"url": server.url})
