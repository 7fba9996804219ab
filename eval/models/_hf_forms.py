"""Forms that a model is converted to: which frequencies keep RoPE, or sizes of a latent layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..mla_conversion import GqaWeights, MlaWeights, convert_to_mla
from ..mla_geometry import DEEPSEEK_V3, MlaSizes, choose_components, convert_to_sizes, mean_cosine, mix_heads

# a lossless conversion leaves the part without RoPE empty, and kernels want one: zeros change no logit
LEAST_NOPE = 16
# distances that a sized form is made for
HORIZON = 1024
DEEPSEEK = "deepseek"

Covariances = Callable[[], list[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A converted layer; ``value_basis`` is that of ``convert_to_sizes``, or None where values are as they were."""

    mla: MlaWeights
    value_basis: Tensor | None = None

    def output(self, o_proj: Tensor) -> Tensor:
        """The output projection ``[E, H * D]`` of the original for the values of this layer, ``[E, H * Dv]``."""
        if self.value_basis is None:
            return o_proj
        heads, _, width = self.value_basis.shape
        return torch.einsum("ehd,hvd->ehv", o_proj.unflatten(1, (heads, width)), self.value_basis).flatten(1)


class Form(Protocol):
    """What all layers of a model become; ``name`` tells it from others in the name of a file."""

    @property
    def name(self) -> str:
        """Letters and digits."""

    def describe(self) -> dict[str, int | str]:
        """As it was asked for."""

    def layers(self, layers: Sequence[GqaWeights], covariances: Covariances) -> list[Layer]:
        """Convert them, float64.

        Args:
            layers: Of the model.
            covariances: Gives the mean of ``x x^T`` over the inputs of each, ``[E, E]``.

        Raises:
            ValueError: If the form does not hold them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Frequencies:
    """The fastest ``count`` frequencies keep RoPE, of all KV heads; all of them is lossless."""

    count: int

    @property
    def name(self) -> str:
        """The count."""
        return str(self.count)

    def describe(self) -> dict[str, int | str]:
        """The count."""
        return {"rope_frequencies": self.count}

    def layers(self, layers: Sequence[GqaWeights], covariances: Covariances) -> list[Layer]:
        """Each for itself, by its weights alone."""
        return [Layer(mla=_widened(convert_to_mla(one, rope_frequencies=self.count))) for one in layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Latent layers of given sizes; what they cannot hold is lost."""

    sizes: MlaSizes

    @classmethod
    def of(cls, text: str) -> "Sized":
        """``deepseek``, or ``R/Dn/Dr/Dv``.

        Raises:
            ValueError: If it is neither.
        """
        if text == DEEPSEEK:
            return cls(sizes=DEEPSEEK_V3)
        numbers = text.split("/")
        if len(numbers) != 4 or not all(one.isdecimal() for one in numbers):
            raise ValueError(f"geometry must be {DEEPSEEK} or four sizes R/Dn/Dr/Dv, got {text!r}")
        rank, d_nope, d_rope, d_v = map(int, numbers)
        return cls(sizes=MlaSizes(kv_lora_rank=rank, d_nope=d_nope, d_rope=d_rope, d_v=d_v))

    @property
    def name(self) -> str:
        """The sizes."""
        sizes = self.sizes
        return f"{sizes.kv_lora_rank}-{sizes.d_nope}-{sizes.d_rope}-{sizes.d_v}"

    def describe(self) -> dict[str, int | str]:
        """The sizes."""
        return {"geometry": self.name.replace("-", "/")}

    def layers(self, layers: Sequence[GqaWeights], covariances: Covariances) -> list[Layer]:
        """All keep the same components, as they share their frequencies."""
        inv_freq = layers[0].inv_freq
        mixes = [mix_heads(one, seen) for one, seen in zip(layers, covariances(), strict=True)]
        energies = [energy for _, energy in mixes]
        kept = choose_components(energies, inv_freq, count=self.sizes.d_rope // 2, horizon=HORIZON)
        damping = mean_cosine(inv_freq, horizon=HORIZON)
        found = []
        for seed, (one, (axes, _)) in enumerate(zip(layers, mixes, strict=True)):
            mla, basis = convert_to_sizes(one, axes, kept=kept, damping=damping, sizes=self.sizes, seed=seed)
            found.append(Layer(mla=mla, value_basis=basis))
        return found


def _widened(mla: MlaWeights) -> MlaWeights:
    """The same layer with a part without RoPE: columns of zeros where there is none."""
    d_nope = mla.q_proj.shape[1] - mla.rope_proj.shape[0]
    if d_nope:
        return mla
    heads, _, hidden = mla.q_proj.shape
    rank = mla.latent_proj.shape[0]
    return MlaWeights(
        q_proj=torch.cat([mla.q_proj.new_zeros(heads, LEAST_NOPE, hidden), mla.q_proj], dim=1),
        latent_proj=mla.latent_proj,
        rope_proj=mla.rope_proj,
        kv_b_proj=torch.cat([mla.kv_b_proj.new_zeros(heads, LEAST_NOPE, rank), mla.kv_b_proj], dim=1),
        inv_freq=mla.inv_freq,
        softmax_scale=mla.softmax_scale,
    )
