"""What a compiled kernel asks of a GPU: counted in its machine code, its PTX and its resource table."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# groups of machine instructions by the beginning of their names
_GROUPS = {
    "wgmma": ("HGMMA", "QGMMA", "IGMMA", "BGMMA"),
    "tcgen05_mma": ("UTCHMMA", "UTCQMMA", "UTCIMMA", "UTCOMMA"),
    "mma": ("HMMA", "IMMA", "DMMA", "QMMA", "OMMA"),
    "tma_loads": ("UTMALDG",),
    "tma_stores": ("UTMASTG", "UTMAREDG"),
    "cp_async": ("LDGSTS",),
    "spill_stores": ("STL",),
    "spill_loads": ("LDL",),
}


def measure(compiled: Any) -> dict[str, Any]:
    """The fields of a ``CompiledKernel`` that the gate holds fixed.

    ``stack_bytes`` is what a thread keeps in memory for want of registers; ``shared_bytes`` what the launch asks for,
    ``reserved_shared_bytes`` what the architecture adds.
    """
    opcodes, resources = _disassembled(compiled.asm["cubin"])
    ptx, metadata = compiled.asm["ptx"], compiled.metadata
    counts = Counter(opcodes)
    threads = re.search(r"\.reqntid (\d+)", ptx)
    return {
        "num_warps": metadata.num_warps,
        "num_stages": metadata.num_stages,
        "threads": int(threads.group(1)) if threads else None,
        "registers": resources["REG"],
        "stack_bytes": resources["STACK"],
        "shared_bytes": metadata.shared,
        "reserved_shared_bytes": resources["SHARED"],
        **{group: sum(counts[name] for name in names) for group, names in _GROUPS.items()},
        # each wait names how many products may still be in flight after it
        "wgmma_waits": " ".join(re.findall(r"wgmma\.wait_group\.sync\.aligned (\d+)", ptx)) or "none",
        "register_moves": counts["USETMAXREG"],
        "warp_specialization": _warp_specialization(compiled.asm),
        "instructions": len(opcodes),
    }


def opcodes_of(listing: str) -> list[str]:
    """The instruction names of a disassembly, without predicates and modifiers."""
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)", listing, flags=re.MULTILINE)


def _warp_specialization(asm: dict[str, Any]) -> str:
    """Whether loops asked for it, and whether the compiler did it: it may decline without a word."""
    # Gluon begins a step later, with partitions that its author wrote
    if "ttir" in asm and "tt.warp_specialize" not in asm["ttir"]:
        return "not asked for"
    return "on" if "ttg.warp_specialize(" in asm["ttgir"] else "asked for, not on"


def _disassembled(cubin: bytes) -> tuple[list[str], dict[str, int]]:
    """Instruction names and the resource table, by the tools that triton brings."""
    import triton

    tools = triton.knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        listing = _output(tools.nvdisasm.path, path)
        usage = _output(tools.cuobjdump.path, "-res-usage", path)
    opcodes = opcodes_of(listing)
    if not opcodes:
        raise RuntimeError("nvdisasm must list instructions, got none")
    resources = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    return opcodes, resources


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
