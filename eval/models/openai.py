"""Any OpenAI-compatible server, such as vLLM or SGLang, through its completions endpoint.

Prompts are sent as token ids, so that no server adds a template or a start token of its own, and the parameters of
greedy decoding are sent one by one, since servers take defaults from a model's generation settings.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..extras import require
from ..redaction import redacted
from ._openai_answers import (
    AnswerError,
    Streamed,
    TruncatedError,
    events,
    lines,
    sglang_prompt_logprobs,
    vllm_prompt_logprobs,
)
from .interface import ERROR, TIMEOUT, Failure, Generated, GenerateRequest, Scored, ScoreRequest, Tokenizer
from .tokenizers import HubTokenizer, ServerTokenizer

# read from the environment, and never written anywhere
KEYS = ("ASSAY_API_KEY", "OPENAI_API_KEY")
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "top_p": 1,
    "top_k": 1,
    "seed": 0,
    "n": 1,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
LONGEST_WAIT = 60.0


class RefusedError(RuntimeError):
    """The server refused a request, and would again."""


class BusyError(RuntimeError):
    """The server could not answer now; ``wait`` is what it asked for, in seconds, if anything."""

    def __init__(self, text: str, wait: float | None) -> None:
        """Keep the wait."""
        super().__init__(text)
        self.wait = wait


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How a server is asked.

    Attributes:
        endpoints: Base URLs that end in ``/v1``; requests take turns, and a repeated one goes to the next.
        model: Name under which the model is served.
        flavour: ``vllm`` or ``sglang``: how log-probabilities of prompts are asked for.
        concurrency: Requests under way at once.
        timeout: Seconds for one try.
        retries: Further tries after the first.
    """

    endpoints: tuple[str, ...]
    model: str
    flavour: str = "vllm"
    concurrency: int = 16
    timeout: float = 600.0
    retries: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be asked."""
        if not self.endpoints or not all(url.startswith(("http://", "https://")) for url in self.endpoints):
            raise ValueError("url must be one or more addresses with http:// or https://, parted by commas")
        if self.flavour not in ("vllm", "sglang"):
            raise ValueError(f"flavour must be vllm or sglang, got {self.flavour!r}")
        if self.concurrency < 1 or self.timeout <= 0 or self.retries < 0:
            raise ValueError("concurrency and timeout must be positive, retries at least 0")


class OpenAIModel:
    """The model behind the server."""

    def __init__(
        self,
        server: Server,
        tokenizer: Tokenizer,
        *,
        context_length: int,
        served: dict[str, Any],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Ask ``server``; ``served`` is what is known about it."""
        self.server, self.tokenizer, self.context_length = server, tokenizer, context_length
        self._served, self._sleep, self._clock = served, sleep, clock
        self._httpx = require("httpx", extra="server")

    def describe(self) -> dict[str, Any]:
        """The served model and the parameters that are sent; not the address, which may serve another one tomorrow."""
        return {"name": self.server.model, "flavour": self.server.flavour, "parameters": GREEDY, **self._served}

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """All at once, as many under way as the server is asked to take."""
        return asyncio.run(self._all(self._generate, requests))

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """Log-probabilities of prompt and target in one pass without an answer."""
        return asyncio.run(self._all(self._score, requests))

    async def _all(self, ask: Any, requests: Sequence[Any]) -> list[Any]:
        gate = asyncio.Semaphore(self.server.concurrency)
        limits = self._httpx.Limits(max_connections=self.server.concurrency)
        async with self._httpx.AsyncClient(headers=_headers(), timeout=self.server.timeout, limits=limits) as client:

            async def one(at: int, request: Any) -> Any:
                async with gate:
                    return await self._persist(client, ask, request, at)

            return list(await asyncio.gather(*(one(at, request) for at, request in enumerate(requests))))

    async def _persist(self, client: Any, ask: Any, request: Any, at: int) -> Any:
        """Ask until there is an answer, a refusal, or no try left."""
        failure = Failure(status=ERROR, reason="never asked")
        for attempt in range(self.server.retries + 1):
            endpoint = self.server.endpoints[(at + attempt) % len(self.server.endpoints)]
            wait = min(LONGEST_WAIT, 2.0**attempt)
            try:
                async with asyncio.timeout(self.server.timeout):
                    return await ask(client, endpoint, request)
            except RefusedError as error:
                return Failure(status=ERROR, reason=_said(error))
            except BusyError as error:
                failure = Failure(status=ERROR, reason=_said(error))
                wait = wait if error.wait is None else min(LONGEST_WAIT, error.wait)
            except (TimeoutError, self._httpx.TimeoutException):
                failure = Failure(status=TIMEOUT, reason=f"no answer within {self.server.timeout:g} s")
            except (TruncatedError, AnswerError, self._httpx.HTTPError, ValueError) as error:
                failure = Failure(status=ERROR, reason=_said(error))
            if attempt < self.server.retries:
                await self._sleep(wait)
        tries = self.server.retries + 1
        return Failure(status=failure.status, reason=f"{failure.reason}, in the last of {tries} tries")

    async def _generate(self, client: Any, endpoint: str, request: GenerateRequest) -> Generated:
        body = GREEDY | {
            "model": self.server.model,
            "prompt": list(request.prompt_ids),
            "max_tokens": request.max_new_tokens,
            "stop": list(request.stop),
            "logprobs": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if request.min_new_tokens:
            body["min_tokens"] = request.min_new_tokens
        began, answer = self._clock(), Streamed()
        async with client.stream("POST", f"{endpoint}/completions", json=body) as response:
            await _check(response)
            async for event in events(lines(response.aiter_text())):
                answer.add(event, self._clock())
        answer.check()
        ended = self._clock()
        facts: dict[str, Any] = {"usage": answer.usage}
        ids = answer.ids
        if ids is None:
            ids, facts["ids_from"] = self.tokenizer.encode(answer.text, special=False), "text"
        return Generated(
            text=answer.text,
            ids=tuple(ids),
            finish_reason=answer.finish_reason,
            # a gap without its token would be another one's
            gaps=tuple(answer.gaps) if len(answer.gaps) == len(ids) else (),
            latency_s=round(ended - began, 6),
            first_token_s=None if answer.first_s is None else round(answer.first_s - began, 6),
            facts=facts,
        )

    async def _score(self, client: Any, endpoint: str, request: ScoreRequest) -> Scored:
        ids = [*request.prompt_ids, *request.target_ids]
        if self.server.flavour == "sglang":
            sampling = {"max_new_tokens": 1, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            response = await client.post(f"{_root(endpoint)}/generate", json=body)
            await _check(response)
            found = sglang_prompt_logprobs(response.json(), ids)
        else:
            body = GREEDY | {"model": self.server.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
            response = await client.post(f"{endpoint}/completions", json=body)
            await _check(response)
            found = vllm_prompt_logprobs(response.json(), ids)
        at = len(request.prompt_ids) - 1
        return Scored(prompt=tuple(found[:at]), target=tuple(found[at:]))


def load(
    url: str,
    model: str = "",
    tokenizer: str = "",
    flavour: str = "vllm",
    flags: str = "",
    concurrency: str = "16",
    timeout: str = "600",
    retries: str = "5",
    context_length: str = "",
) -> OpenAIModel:
    """The model behind one or several addresses.

    Args:
        url: Base URLs that end in ``/v1``, parted by commas.
        model: Name under which the model is served; the only one if empty.
        tokenizer: Folder or hub name of a local tokenizer; the server's own if empty.
        flavour: ``vllm`` or ``sglang``.
        flags: What the server was started with, for the manifest.
        concurrency: Requests under way at once.
        timeout: Seconds for one try.
        retries: Further tries.
        context_length: Tokens of prompt and answer; what the server says if empty.
    """
    endpoints = tuple(one.strip().rstrip("/") for one in url.split(",") if one.strip())
    server = Server(
        endpoints=endpoints,
        model=model,
        flavour=flavour,
        concurrency=int(concurrency),
        timeout=float(timeout),
        retries=int(retries),
    )
    httpx = require("httpx", extra="server")

    def ask(method: str, address: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = httpx.request(method, address, json=body, headers=_headers(), timeout=server.timeout)
            response.raise_for_status()
            found: dict[str, Any] = response.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ValueError(redacted(f"{address} must answer, got {type(error).__name__}: {error}")) from error
        return found

    entries = ask("GET", f"{endpoints[0]}/models").get("data") or []
    names = [str(entry.get("id")) for entry in entries]
    if model not in names and (model or len(names) != 1):
        raise ValueError(f"model must be one that the server has, {', '.join(names) or 'none'}, got {model!r}")
    entry = next(entry for entry in entries if not model or entry.get("id") == model)
    length = context_length or entry.get("max_model_len")
    if not length:
        raise ValueError("context_length must be given where the server does not say it, got nothing")
    name = str(entry["id"])
    local = (
        HubTokenizer(tokenizer)
        if tokenizer
        else ServerTokenizer(lambda path, body: ask("POST", f"{_root(endpoints[0])}{path}", body), name)
    )
    served = {"served": {key: entry[key] for key in ("id", "root", "max_model_len") if key in entry}, "flags": flags}
    served |= {"version": _version(ask, endpoints[0]), "tokenizer": tokenizer or "of the server"}
    return OpenAIModel(replace(server, model=name), local, context_length=int(length), served=served)


def _version(ask: Any, endpoint: str) -> str:
    """The server's version; empty where it does not tell."""
    try:
        return str(ask("GET", f"{_root(endpoint)}/version").get("version", ""))
    except ValueError:
        return ""


def _root(endpoint: str) -> str:
    return endpoint.removesuffix("/v1")


def _headers() -> dict[str, str]:
    key = next((os.environ[name] for name in KEYS if os.environ.get(name)), "")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _check(response: Any) -> None:
    """Tell a refusal from a server that is busy."""
    if response.status_code < 400:
        return
    await response.aread()
    text = f"the server answers {response.status_code}: {response.text[:200]}"
    if response.status_code not in WORTH_ANOTHER_TRY:
        raise RefusedError(text)
    wait = response.headers.get("retry-after", "")
    raise BusyError(text, float(wait) if wait.replace(".", "", 1).isdigit() else None)


def _said(error: Exception) -> str:
    return str(redacted(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__))
