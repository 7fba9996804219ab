"""What a run was made with: settings that bind its continuation, and those that two runs must share."""

import hashlib
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .models.interface import Model
from .plan import Plan
from .redaction import redacted
from .run_folder import SCHEMA
from .scorers import find_scorer
from .settings import fingerprint
from .suite import Suite, suite_content

PACKAGES = ("kernel-assay", "torch", "triton", "transformers", "tokenizers", "datasets", "scipy", "numpy", "jieba")
# how a model is asked in batches changes no question: a repetition may ask in other ones
FREE_IN_COMPARISON = ("batch_size", "batch_tokens", "seed", "limit", "most_failures")
_GIT_SECONDS = 10


def make_manifest(
    suite: Suite,
    model: Model,
    plan: Plan,
    *,
    label: str,
    factors: dict[str, str],
    options: dict[str, str],
    kernels: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The manifest, without secrets.

    Args:
        suite: As it is run, options of the command line included.
        model: The model.
        plan: What is asked.
        label: As reports call the run.
        factors: Named factors of the run, such as ``kernel``.
        options: Of the model, as the command line had them.
        kernels: That must serve every sample.
    """
    content, scorers = suite_content(suite), {name: _scorers(plan, name) for name in plan.loaded}
    data = {name: {"sha256": one.sha256, "files": one.files} for name, one in plan.loaded.items()}
    described = redacted(model.describe())
    settings = {
        "suite": content,
        "model": described,
        "data": {name: one["sha256"] for name, one in data.items()},
        "samples": fingerprint([[item.task, item.id, item.prompt_sha256, item.broken] for item in plan.items]),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "wrapped": list(plan.wrapped),
        "kernels": list(kernels),
        "sources": _sources(),
    }
    comparable = {
        "schema": SCHEMA,
        "suite": content | {"asking": _without(content["asking"], FREE_IN_COMPARISON), "description": ""},
        "scorers": scorers,
        "data": settings["data"],
        "wrapped": list(plan.wrapped),
        "unloaded": sorted(plan.unloaded),
    }
    manifest = {
        "schema": SCHEMA,
        "label": label,
        "factors": factors,
        "fingerprint": fingerprint(settings),
        "model": described,
        "settings": settings,
        "comparable": comparable,
        "suite": content,
        "tasks": {
            name: {
                "samples": sum(item.task == name for item in plan.items),
                "broken": sum(item.task == name and bool(item.broken) for item in plan.items),
                "origin": one.origin,
                "kind": one.task.origin,
                "scorers": scorers[name],
                **data[name],
            }
            for name, one in plan.loaded.items()
        },
        "unloaded": plan.unloaded,
        "notes": [note for one in plan.loaded.values() for note in one.notes],
        "environment": {"argv": sys.argv[1:], "options": options, "git": _git(), "platform": platform.platform()},
    }
    return dict(redacted(manifest))


def _scorers(plan: Plan, name: str) -> list[str]:
    return [find_scorer(scorer).id for scorer in plan.loaded[name].task.scorers]


def _without(content: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in names}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _sources() -> str:
    """Digest of the rooms whose code answers: half of a run must not come from other kernels than the rest."""
    root, found = Path(__file__).resolve().parent.parent, hashlib.sha256()
    for room in ("eval", "optimized", "reference"):
        for path in sorted((root / room).rglob("*.py")):
            found.update(f"{path.relative_to(root).as_posix()} ".encode() + path.read_bytes())
    return found.hexdigest()


def _git() -> str:
    """The commit of a checkout, marked where files differ from it; empty for an installed package."""
    folder = Path(__file__).resolve().parent.parent
    if not (folder / ".git").exists():
        return ""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
