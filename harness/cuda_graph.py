"""Record a CUDA graph, and leave the device as it was when that fails."""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def record_graph(run: Callable[[], Result], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture one call; return the graph and the results whose memory a replay writes.

    After a failed capture torch's generator takes itself for captured still, and every draw on the device raises: it is
    given a copy of its state from before.

    Raises:
        RuntimeError: If the call cannot be captured; the device is idle then, and usable.
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    before = generator.clone_state()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            results = run()
    except RuntimeError:
        torch.cuda.synchronize(device)
        generator.graphsafe_set_state(before)
        raise
    return graph, results
