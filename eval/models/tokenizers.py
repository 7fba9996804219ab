"""Tokenizers: a local one of a model, or that of the server that serves it."""

from collections.abc import Callable, Sequence
from typing import Any

from ..extras import require
from ..settings import fingerprint


class HubTokenizer:
    """A tokenizer of a local folder or the hub, through transformers; no code of the repository is run."""

    def __init__(self, name: str, **source: Any) -> None:
        """Load it; ``source`` says where else than by its name it is found, such as ``gguf_file``.

        Raises:
            ModuleNotFoundError: If transformers is not installed, naming the extra.
        """
        transformers = require("transformers", extra="model")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **source)
        self.has_chat_template = bool(self._tokenizer.chat_template)

    @property
    def sha256(self) -> str:
        """Of all that turns text into tokens and back, and of the chat template."""
        inside = getattr(self._tokenizer, "backend_tokenizer", None)
        # one without a fast twin is what its vocabulary says
        rules = inside.to_str() if inside is not None else sorted(self._tokenizer.get_vocab().items())
        return fingerprint([rules, self._tokenizer.chat_template])

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids."""
        return [int(one) for one in self._tokenizer(text, add_special_tokens=special)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens; blanks are left as they are."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, text: str) -> str:
        """The text as a user's message; a model that can think is told not to."""
        messages = [{"role": "user", "content": text}]
        return str(
            self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        )


class ServerTokenizer:
    """The tokenizer of a vLLM server, behind ``/tokenize`` and ``/detokenize``; it has no chat template here.

    What the server adds around a text is learnt from an empty one, and left out when ids become text.
    """

    has_chat_template = False

    def __init__(self, post: Callable[[str, dict[str, Any]], dict[str, Any]], model: str) -> None:
        """Ask through ``post``, which takes a path and a body and returns the answer."""
        self._post, self._model = post, model
        self._special = frozenset(self.encode("", special=True))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Token ids."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": special}
        return [int(one) for one in self._post("/tokenize", body)["tokens"]]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        body = {"model": self._model, "tokens": [one for one in ids if one not in self._special]}
        return str(self._post("/detokenize", body)["prompt"])

    def chat(self, text: str) -> str:
        """There is none: a local tokenizer has it."""
        raise ValueError("a chat template needs a local tokenizer: -o tokenizer=FOLDER")
