"""Runs as ``assay check`` would leave them, made up without judging anything."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from builders import attention_case, mla_case

from assay.harness.case import Case, plan_digest
from assay.harness.record import GateResult, Location, Record, RowErrors, Verdict

GATES = ("G4 envelope", "G5 row rms", "G5 median rms", "G6 lse", "G6 pooled scale by head", "G6 row scale")
SLOT = Location(request=1, token=12, position=40, head=1, dim=3, slot=77, got=0.5, expected=0.25)


def cases(count: int = 6) -> list[Case]:
    """Cases of ``mla_prefill`` in several families and dtypes."""
    families, dtypes = ("diffuse", "peaked", "exact-one-hot"), ("float32", "bfloat16")
    return [mla_case(families[at % 3], dtypes[at // 3 % 2], seed=at) for at in range(count)]


def rows(count: int = 28, seed: int = 0, scale: float = 0.3) -> RowErrors:
    """Errors of ``count // 2`` tokens of two heads; those of ``mla_case`` when there are 14."""
    rng, tokens = np.random.default_rng(seed), np.arange(count) // 2
    columns = {name: (scale * rng.uniform(0.1, 1.0, count)).tolist() for name in ("envelope", "rms", "alpha")}
    position = np.where(tokens < 9, 36 + tokens, tokens - 9)
    return RowErrors(token=tokens.tolist(), head=(np.arange(count) % 2).tolist(), position=position.tolist(), **columns)


def passing(case: Case, kernel: str = "mla_prefill[torch]", *, ratio: float = 0.4, **fields: Any) -> Record:
    """A record whose gates hold."""
    gates = [GateResult(gate="G1 out", ratio=0.0), GateResult(gate="G7 repeat out", ratio=0.0)]
    gates += [GateResult(gate=gate, ratio=ratio / (at + 1), where=SLOT) for at, gate in enumerate(GATES)]
    shown: dict[str, Any] = {"gates": gates, "rows": rows(seed=case.seed), "rows_judged": 28, "seconds": 0.5}
    fields = {"verdict": Verdict.PASS, **shown, **fields}
    return Record(op=case.op, kernel=kernel, case=case.to_json(), device="cpu", **fields)


def failing(case: Case, kernel: str = "mla_prefill[torch]", **fields: Any) -> Record:
    """A record that blames one element, down to its slot."""
    gates = [
        GateResult(gate="G3 exact", ratio=math.inf, where=SLOT),
        GateResult(gate="G4 envelope", ratio=12.5, where=SLOT),
        GateResult(gate="G6 lse", ratio=0.25),
    ]
    text, command = "G3 exact: inf x its limit", f"assay check {case.op} --case {case.id} --kernel 'mine.py:attend'"
    shown = {"gates": gates, "rows": rows(scale=20.0), "rows_judged": 28, "text": text, "command": command}
    return passing(case, kernel, **{"verdict": Verdict.NUMERIC, **shown, **fields})


def refused(case: Case, kernel: str = "mla_prefill[torch]", text: str = "heads of 128 only") -> Record:
    return passing(case, kernel, verdict=Verdict.UNSUPPORTED, text=text, gates=[], rows=RowErrors(), rows_judged=0)


def mixed() -> list[Record]:
    """Two kernels on six cases: passes, failures of several kinds, a refusal."""
    six = cases()
    records = [passing(case) for case in six]
    mine: dict[str, Any] = {"kernel": "attend"}
    records += [failing(six[0], **mine), passing(six[1], **mine), refused(six[2], **mine)]
    crash = "RuntimeError: \x1b[31mbad\x1b[0m <b>address</b> | & more (kernel.py:7)"
    nothing: dict[str, Any] = {"gates": [], "rows": RowErrors(), "rows_judged": 0}
    records.append(failing(six[3], **mine, verdict=Verdict.CRASH, text=crash, **nothing))
    records.append(failing(six[4], **mine, verdict=Verdict.HARNESS_ERROR, text="KeyError: 'q'", **nothing))
    records.append(passing(six[5], **mine, verdict=Verdict.WAIVED, text="known: issue 7"))
    return records


def header(planned: list[Case], **fields: Any) -> dict[str, Any]:
    base = {"tier": "smoke", "seed": 3, "kernel": None, "plan": plan_digest(planned), "cases": len(planned)}
    return base | {"device": "CPU, Triton interpreted", "versions": {"torch": "2.13.0", "triton": None}} | fields


def write_run(folder: Path, records: list[Record], **fields: Any) -> Path:
    """Write a run folder; the plan is that of the records' cases."""
    planned = [Case.from_json(case) for case in {r.case["id"]: r.case for r in records}.values()] or [attention_case()]
    lines = [json.dumps({"run": header(planned, **fields)}), *(record.to_json() for record in records)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n")
    return folder
