"""Models behind one interface: generate, score, describe.

A model is named by one of ``MODELS``, or by ``module:function`` or ``file.py:function`` of yours. The function takes
the options of the command line as keywords and returns an object of the form ``interface.Model``.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .interface import Model

# name -> module of this package; each is imported only when it is asked for
MODELS = {"ngram": "ngram", "openai": "openai", "hf": "hf"}


class ModelError(ValueError):
    """A model that cannot be found or made; the text says which and why."""


def load_model(name: str, options: Mapping[str, Any]) -> Model:
    """Make a model.

    Args:
        name: Of ``MODELS``, or ``module:function``, or ``file.py:function``.
        options: Keywords of its function.

    Raises:
        ModelError: If there is none of that name, it does not take the options, or it returns something else.
    """
    make = _maker(name)
    try:
        model = make(**options)
    except TypeError as error:
        raise ModelError(f"{name} must take the options {', '.join(options) or 'none'}, got {error}") from error
    if not isinstance(model, Model):
        raise ModelError(f"{name} must return a model with tokenizer, generate, score and describe, got {type(model)}")
    return model


def _maker(name: str) -> Callable[..., Any]:
    if name in MODELS:
        made: Callable[..., Any] = importlib.import_module(f".{MODELS[name]}", __name__).load
        return made
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise ModelError(f"a model must be one of {', '.join(MODELS)}, or module:function, got {name!r}")
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as error:
        raise ModelError(f"a model must be in a module that imports, got {place}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise ModelError(f"{place} must have a function {function}, got {found!r}")
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location(f"assay_model_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"not a Python file: {path}")
    module = importlib.util.module_from_spec(spec)
    # dataclasses of the file look themselves up
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
