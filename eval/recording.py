"""Real inputs of an operation, recorded while a model reads the prompts of a task.

A prompt is read alone, and of each layer its last call is kept: that of a prompt that is read in steps has a history.
What is stored are tokens in the order of their positions, without the slots that they had in the model; heads and
queries are left out, evenly spread and from the front, until a call fits its share of the size that was asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from ..harness.captures import NUMBERS, TENSORS, write_capture
from .models import load_model
from .models.interface import Failure, GenerateRequest, Model
from .models.seam import Arguments, Seam
from .plan import draw
from .prompts import Prompt, PromptPolicy, build_prompt
from .redaction import redacted
from .settings import text_digest
from .tasks import DataSource, Loaded, Loading, Sample, load_task

LAYERS = 4
# below these a call says too little of its layer
LEAST_HEADS, LEAST_QUERIES = 2, 16
# which dimension of each tensor counts the heads that may be left out together with their keys
HEADS = {"mla_prefill": {"q": 1, "kv_b_proj": 0}, "attention": {"q": 1, "k": 1, "v": 1}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """What the command line said.

    Attributes:
        model: Name, or place of a function.
        task: Whose prompts are read.
        op: Of ``harness.captures.TENSORS``.
        out: Folder for the calls; new or empty.
        model_options: Keywords of the model.
        layers: To be recorded; a few from the first to the last if empty.
        samples: Prompts, spread over the lengths of the task.
        most_bytes: Of all calls together.
        max_tokens: Of a prompt; a longer one loses its middle.
        seed: Of the draw.
        data: Folder or archive of published data; None asks the hub.
        offline: Whether the hub is read from its cache alone.
    """

    model: str
    task: str
    op: str
    out: Path
    model_options: Mapping[str, str] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    samples: int = 8
    most_bytes: int = 64 << 20
    max_tokens: int = 2000
    seed: int = 0
    data: Path | None = None
    offline: bool = False


def record_calls(options: RecordingOptions, console: Console) -> list[Path]:
    """Record the calls; return the files that describe them.

    Raises:
        ValueError: If the options cannot be served, a prompt cannot be read, or a call fits no share of the size.
        ModuleNotFoundError: If a library is missing, naming its extra.
    """
    if options.op not in TENSORS:
        raise ValueError(f"--op must be one of {', '.join(TENSORS)}, got {options.op!r}")
    if options.out.exists() and any(options.out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, got {options.out}")
    loaded = load_task(options.task, Loading(source=DataSource(place=options.data, offline=options.offline)))
    if not loaded.samples:
        raise ValueError(f"{options.task} must have a sample that can be asked, got none")
    chosen = loaded.samples
    if options.samples < len(chosen):
        chosen = draw(chosen, options.samples, seed=f"{options.seed} {options.task}")
    # the operation is what serves the prefill; a model of yours knows by itself what does
    served = {"attention": options.op} if options.model == "hf" else {}
    model = load_model(options.model, {**served, **options.model_options})
    recorder = _Recorder(options, model, loaded)
    layers = recorder.layers(chosen[0])
    share = options.most_bytes // (len(layers) * len(chosen))
    written, total = [], 0
    for sample in chosen:
        for path in recorder.record(sample, layers, share):
            written.append(path)
            total += path.with_suffix(".safetensors").stat().st_size
            console.print(path.name, highlight=False)
    console.print(f"{len(written)} calls of {options.op}, {total / 2**20:.1f} MiB", highlight=False)
    console.print(f"assay check {options.op} --captured {options.out}", soft_wrap=True, highlight=False)
    return written


class _Recorder:
    """Has a model read prompts, and keeps what its layers are given."""

    def __init__(self, options: RecordingOptions, model: Model, loaded: Loaded) -> None:
        seam = getattr(model, "seam", None)
        if not isinstance(seam, Seam) or seam.op != options.op:
            served = f"by {seam.op}" if isinstance(seam, Seam) else "by no operation of the house"
            raise ValueError(f"the prefill of the model must be served by {options.op}, got one served {served}")
        self._options, self._model, self._loaded, self._seam = options, model, loaded, seam

    def layers(self, sample: Sample) -> list[int]:
        """Those to be recorded, found by reading the first tokens of a prompt.

        Raises:
            ValueError: If a layer that was asked for makes no call.
        """
        prompt = self._prompt(sample)
        found = sorted(self._read(prompt.ids[:LEAST_QUERIES], sample))
        missing = [layer for layer in self._options.layers if layer not in found]
        if missing or not found:
            known = ", ".join(map(str, found)) or "none"
            raise ValueError(f"--layers must be among those that call {self._options.op}, {known}, got {missing}")
        if self._options.layers:
            return sorted(self._options.layers)
        return [found[at] for at in _spread(len(found), LAYERS)]

    def record(self, sample: Sample, layers: Sequence[int], share: int) -> list[Path]:
        """Write the calls of one prompt, none larger than ``share`` bytes."""
        options, prompt = self._options, self._prompt(sample)
        calls, paths = self._read(prompt.ids, sample), []
        for layer in layers:
            tensors, heads = fitted(options.op, _tensors(options.op, calls[layer]), share)
            origin = {
                "model": redacted(self._model.describe()),
                "task": options.task,
                "data_sha256": self._loaded.sha256,
                "sample": sample.id,
                "prompt_sha256": text_digest(prompt.text),
                "prompt_tokens": len(prompt.ids),
                "layer": layer,
                "heads": heads,
            }
            numbers = {name: calls[layer][name] for name in NUMBERS[options.op]}
            name = f"{options.op}-layer{layer:03}-{options.task}-{sample.index:05}"
            paths.append(write_capture(options.out, name, options.op, tensors, numbers, origin))
        return paths

    def _prompt(self, sample: Sample) -> Prompt:
        policy = PromptPolicy(max_tokens=self._options.max_tokens)
        return build_prompt(self._loaded.task, sample, self._model.tokenizer, policy, max_target=1)

    def _read(self, ids: Sequence[int], sample: Sample) -> dict[int, Arguments]:
        """The last call of every layer while a prompt is read.

        Raises:
            ValueError: If the model cannot read it.
        """
        calls: dict[int, Arguments] = {}
        self._seam.watch = calls.__setitem__
        try:
            (answer,) = self._model.generate([GenerateRequest(prompt_ids=tuple(ids), max_new_tokens=1)])
        finally:
            self._seam.watch = None
        if isinstance(answer, Failure):
            raise ValueError(f"{self._options.task} {sample.id} must be read by the model: {answer.reason}")
        return calls


def _tensors(op: str, arguments: Arguments) -> dict[str, Tensor]:
    """The tensors of a call with one request, its cache in the order of positions."""
    tensors: dict[str, Tensor] = {name: arguments[name] for name in TENSORS[op]}
    if "slot_table" in arguments:
        row, length = int(arguments["request_rows"][0]), int(arguments["context_lens"][0])
        slots = arguments["slot_table"][row, :length].long()
        tensors |= {name: tensors[name][slots] for name in ("kv_c", "k_pe")}
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def fitted(op: str, tensors: dict[str, Tensor], most: int) -> tuple[dict[str, Tensor], list[int]]:
    """The tensors of a call with as many heads and queries as fit into ``most`` bytes, and the heads that are left.

    Query heads that share a key head stay together. Heads are halved first, then queries, of which the last stay.

    Raises:
        ValueError: If it does not fit with the least of both.
    """
    axes = HEADS[op]
    counts = {name: tensors[name].shape[axis] for name, axis in axes.items()}
    groups = min(counts.values())
    kept, queries = groups, len(tensors["q"])
    while True:
        chosen, found = torch.tensor(_spread(groups, kept)), dict(tensors)
        for name, axis in axes.items():
            width = counts[name] // groups
            heads = (chosen[:, None] * width + torch.arange(width)).flatten()
            found[name] = tensors[name].index_select(axis, heads)
        found["q"] = found["q"][len(found["q"]) - queries :]
        size = sum(tensor.nbytes for tensor in found.values())
        if size <= most:
            width = counts["q"] // groups
            return found, (chosen[:, None] * width + torch.arange(width)).flatten().tolist()
        if kept > LEAST_HEADS:
            kept = max(LEAST_HEADS, kept // 2)
        elif queries > LEAST_QUERIES:
            queries = max(LEAST_QUERIES, queries // 2)
        else:
            raise ValueError(f"a call must fit its share of --max-mib, {most} bytes, got {size} at the least")


def _spread(count: int, wanted: int) -> list[int]:
    """So many of ``0 .. count - 1``, evenly spread, both ends among them; all if there are fewer."""
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [0]
    return [round(at * (count - 1) / (wanted - 1)) for at in range(wanted)]
