"""A stub of an OpenAI-compatible server on a real socket: characters as tokens, and faults on demand."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

START = 1


class Stub(ThreadingHTTPServer):
    """Serves one model; ``faults`` maps the number of a completion request, from 1, to what goes wrong with it.

    Attributes:
        faults: ``429``, ``500``, ``401`` ... as numbers; ``cut``, ``slow``, ``garbage``, ``two``, ``abort`` as words.
        bodies: Of all completion requests.
        headers: Of all requests, their names in lower case.
        most: The most requests that were under way at once.
        served_ids: Whether token ids are sent.
    """

    daemon_threads = True

    def __init__(self, faults: dict[int, Any], *, served_ids: bool = True, models: tuple[str, ...] = ("stub",)) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.faults, self.served_ids, self.models = faults, served_ids, models
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._now = 0
        self._lock = threading.Lock()
        # what a slow request waits for; set when the server closes
        self.closing = threading.Event()
        # several requests meet here when a test wants them to
        self.meeting: threading.Barrier | None = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def enter(self, body: dict[str, Any]) -> Any:
        """Count a completion request; its fault, if any."""
        with self._lock:
            self.bodies.append(body)
            self._now += 1
            self.most = max(self.most, self._now)
            return self.faults.get(len(self.bodies))

    def leave(self) -> None:
        """A completion request is done."""
        with self._lock:
            self._now -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news."""


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.path == "/v1/models":
            entries = [{"id": name, "max_model_len": 4096} for name in self.server.models]
            self._json(200, {"data": entries})
        elif self.path == "/version":
            self._json(200, {"version": "1.2.3"})
        else:
            self._json(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        if self.path == "/tokenize":
            ids = [START] * body["add_special_tokens"] + [ord(letter) for letter in body["prompt"]]
            self._json(200, {"tokens": ids})
        elif self.path == "/detokenize":
            self._json(200, {"prompt": "".join(map(chr, body["tokens"]))})
        else:
            self._complete(body)

    def _complete(self, body: dict[str, Any]) -> None:
        fault = self.server.enter(body)
        try:
            if self.server.meeting is not None:
                self.server.meeting.wait(timeout=30)
            if isinstance(fault, tuple):
                self._json(fault[0], {"error": "go away"}, {"Retry-After": fault[1]})
            elif isinstance(fault, int):
                self._json(fault, {"error": f"no: {self.headers.get('authorization', '')}"})
            elif fault == "slow":
                self.server.closing.wait(timeout=30)
            elif self.path == "/generate":
                entries = [[-0.001 * one, one, None] for one in body["input_ids"]]
                self._json(200, {"meta_info": {"input_token_logprobs": entries}})
            elif "prompt_logprobs" in body:
                self._json(200, {"choices": [{"text": "x", "prompt_logprobs": self._losses(body["prompt"], fault)}]})
            else:
                self._stream(body, fault)
        finally:
            self.server.leave()

    def _losses(self, ids: list[int], fault: Any) -> Any:
        if fault == "garbage":
            return None
        return [None, *({str(one): {"logprob": -0.001 * one, "rank": 1}} for one in ids[1:])]

    def _stream(self, body: dict[str, Any], fault: Any) -> None:
        """The last letters of the prompt, reversed, one an event."""
        answer = [one for one in body["prompt"] if one != START][-min(4, body["max_tokens"]) :][::-1]
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for at, one in enumerate(answer):
            last = at == len(answer) - 1
            choice: dict[str, Any] = {"text": chr(one), "finish_reason": "length" if last else None}
            choice["logprobs"] = {"top_logprobs": [{chr(one): -0.25, "other": -1.0 - at}]}
            if self.server.served_ids:
                choice["token_ids"] = [one]
            if fault == "abort" and last:
                choice["finish_reason"] = "abort"
            if fault == "cut" and at == 2:
                self.wfile.write(b'data: {"choi')
                return
            choices = [choice, choice] if fault == "two" else [choice]
            # letters as they are, as servers write them
            data = "nonsense" if fault == "garbage" else json.dumps({"choices": choices}, ensure_ascii=False)
            self.wfile.write(f"data: {data}\n\n".encode())
        usage = {"completion_tokens": len(answer), "completion_tokens_details": {"accepted_prediction_tokens": 3}}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _json(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(faults: dict[int, Any] | None = None, **options: Any) -> Iterator[Stub]:
    """A stub at work."""
    server = Stub(faults or {}, **options)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=30)


Waits = list[float]


def recorded(waits: Waits) -> Callable[[float], Any]:
    """A sleep that only notes how long it would have been."""

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    return sleep
