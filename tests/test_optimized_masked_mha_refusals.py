"""What the Triton kernel of masked attention is not asked for."""

import pytest
import torch

from assay.optimized import _masked_mha_triton as host
from assay.optimized.attention import AttentionShape


def test_what_triton_cannot_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        num_heads=4,
        num_kv_heads=4,
        head_dim_qk=192,
        head_dim_v=128,
    )
    monkeypatch.setattr(host, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
    assert "fail to compile the kernel for compute capability 10" in (host.refusal(shape, 1) or "")
