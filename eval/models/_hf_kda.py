"""The gated delta rule of a transformers model: its module's two functions are ours while the model computes.

They stand at the place where transformers calls kernels of others, behind the gate and the sigmoid: what arrives is
the natural log of the decay, so implementations that want the gate's logits do not serve here. Columns without a token
are zero by then, and leave a state of zeros as it is.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...optimized.kda import KdaBatch, KdaShape, kda, plan_kda, plan_kda_batch, resolve_implementation
from ...optimized.kda_step import STEP_IMPLEMENTATIONS, KdaStepPlan, kda_step, plan_kda_step

CHUNK, RECURRENT = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
# sequences that lie behind each other in one row, in the words of transformers and of its kernels
PACKED = ("cu_seqlens", "cu_seq_lens_q", "seq_idx")


class DeltaRule:
    """Serves the linear layers of one model."""

    def __init__(self, network: Any, implementation: str, note: Callable[[str], None]) -> None:
        """Find the functions; ``note`` is told what served each call, such as ``kda/torch``.

        Args:
            network: The model.
            implementation: Of ``kda``, or ``auto``. Single tokens go to ``kda_step``, by the same implementation if it
                has it.
            note: Of the calls.

        Raises:
            ValueError: If there is no such implementation.
            NotImplementedError: If no layer of the model calls them, or the implementation does not serve those.
        """
        layers = [module for module in network.modules() if _calls_both(sys.modules[type(module).__module__])]
        sizes = {(layer.num_heads, layer.head_dim) for layer in layers if hasattr(layer, "forget_gate")}
        if not sizes:
            raise NotImplementedError(f"kda must have linear layers of Kimi's form, got {type(network).__name__}")
        self._modules = {sys.modules[type(layer).__module__] for layer in layers}
        for heads, width in sizes:
            # an implementation that does not serve says so now, and not at the first sample
            some = next(network.parameters()).new_empty(1, 1, heads, width)
            resolve_implementation(implementation, _shape(some, some, normalised=True))
        self._implementation, self._note = implementation, note
        self._stepped = implementation if implementation in STEP_IMPLEMENTATIONS else "auto"
        # what the layers of one pass have in common is planned once
        self._batch: tuple[Any, KdaBatch] | None = None
        self._step: tuple[Any, KdaStepPlan] | None = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Ours are in place inside; models of the same kind that compute elsewhere keep theirs."""
        names = {CHUNK: self._chunk, RECURRENT: self._recurrent}
        kept = [(module, name, getattr(module, name)) for module in self._modules for name in names]
        try:
            for module, name, _ in kept:
                setattr(module, name, names[name])
            yield
        finally:
            for module, name, function in kept:
                setattr(module, name, function)

    def _chunk(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        chunk_size: int = 64,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """In the form of transformers: ``[B, T, H, K]`` and states ``[B, H, K, V]``; ``chunk_size`` is our own."""
        _refuse_packed(others)
        shape, rows = _shape(query, value, use_qk_l2norm_in_kernel), tuple(query.shape[:2])
        if self._batch is None or self._batch[0] != (shape, rows):
            self._batch = (shape, rows), self._planned(shape, *rows)
        batch = self._batch[1]
        out, state, _ = kda(
            *(_channels_together(tensor).flatten(0, 1) for tensor in (query, key, value, g, beta)),
            scale=shape.head_dim_k**-0.5,
            batch=batch,
            initial_state=None if initial_state is None else initial_state.to(shape.state_dtype).contiguous(),
        )
        self._note(f"kda/{batch.plan.implementation}")
        return out.unflatten(0, rows), state if output_final_state else None

    def _planned(self, shape: KdaShape, count: int, tokens: int) -> KdaBatch:
        plan = plan_kda(shape, max_tokens=count * tokens, max_sequences=count, implementation=self._implementation)
        return plan_kda_batch(torch.arange(count + 1) * tokens, plan=plan)

    def _recurrent(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One token of each row; several, or the first, as ``_chunk`` does."""
        if initial_state is None or query.shape[1] != 1:
            rest = {"initial_state": initial_state, "output_final_state": output_final_state, **others}
            return self._chunk(query, key, value, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **rest)
        _refuse_packed(others)
        shape, count = _shape(query, value, use_qk_l2norm_in_kernel), len(query)
        if self._step is None or self._step[0] != (shape, count):
            places = torch.arange(count + 1)
            plan = plan_kda_step(places, places[:-1, None], shape=shape, num_slots=count, implementation=self._stepped)
            self._step = (shape, count), plan
        # the cache writes the new states itself
        pool = initial_state.to(shape.state_dtype, copy=True, memory_format=torch.contiguous_format)
        out, state = kda_step(
            *(_channels_together(tensor[:, 0]) for tensor in (query, key, value, g, beta)),
            scale=shape.head_dim_k**-0.5,
            state_pool=pool,
            plan=self._step[1],
        )
        self._note(f"kda_step/{self._step[1].implementation}")
        return out[:, None], state if output_final_state else None


def _calls_both(module: ModuleType) -> bool:
    """Whether the layers of a Python module call the two functions."""
    return all(inspect.isfunction(getattr(module, name, None)) for name in (CHUNK, RECURRENT))


def _shape(query: Tensor, value: Tensor, normalised: bool) -> KdaShape:
    return KdaShape(
        device=query.device,
        dtype=query.dtype,
        num_heads=query.shape[2],
        num_v_heads=value.shape[2],
        head_dim_k=query.shape[3],
        head_dim_v=value.shape[3],
        gate="log",
        beta_is_logits=False,
        qk_l2norm=normalised,
        state_dtype=torch.promote_types(query.dtype, torch.float32),
    )


def _channels_together(tensor: Tensor) -> Tensor:
    """Itself, or a copy where a convolution has left the tokens beside each other, which no kernel reads."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _refuse_packed(others: dict[str, Any]) -> None:
    for name in PACKED:
        if others.get(name) is not None:
            raise NotImplementedError(f"each row must hold one sequence, got {name}")
