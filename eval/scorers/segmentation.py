"""Chinese text as words: jieba's default dictionary and settings, which the published scores rest on."""

import logging
import tempfile
import warnings
from functools import cache
from typing import Any

from ..extras import require


def segment(text: str) -> list[str]:
    """The tokens of a text; joined they are the text again.

    Raises:
        ModuleNotFoundError: If jieba is not installed, naming the extra.
    """
    return list(_tokenizer().cut(text, cut_all=False))


@cache
def _tokenizer() -> Any:
    # its sources hold escapes that newer Pythons warn about
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        jieba = require("jieba", extra="chinese")
    jieba.setLogLevel(logging.WARNING)
    tokenizer = jieba.Tokenizer()
    # jieba keeps its dictionary, marshalled, in the folder for temporary files, where anybody may have put another one
    with tempfile.TemporaryDirectory(prefix="assay-jieba-") as folder:
        tokenizer.tmp_dir = folder
        tokenizer.initialize()
    return tokenizer
