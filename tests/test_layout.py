"""The house keeps its shape: who may import whom, what ships, who has a twin, how long a file may be."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("reference", "optimized", "harness", "eval")
MAY_IMPORT: dict[str, frozenset[str]] = {
    "reference": frozenset(),
    "optimized": frozenset(),
    "harness": frozenset({"reference", "optimized"}),
    "eval": frozenset({"reference", "optimized", "harness"}),
}
LONGEST_FILE = 400

# file that an oracle lacks -> why it has none
WITHOUT: dict[str, str] = {}


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported_modules(source: str, package: str) -> set[str]:
    """Absolute dotted names that a module of ``package`` imports, wherever in the file it does so."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def forbidden_imports(source: str, package: str) -> set[str]:
    """Rooms that a module of ``package``, such as ``assay.harness.operations``, imports and may not."""
    room = package.split(".")[1]
    modules = (name.split(".") for name in imported_modules(source, package))
    rooms = {parts[1] for parts in modules if parts[0] == "assay" and len(parts) > 1 and parts[1] in ROOMS}
    return rooms - MAY_IMPORT[room] - {room}


def package_of(path: Path, root: Path = ROOT) -> str:
    return ".".join(["assay", *path.relative_to(root).parent.parts])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_below_it(room: str) -> None:
    found = {str(path): forbidden_imports(path.read_text(), package_of(path)) for path in python_files(ROOT / room)}
    assert found, f"{room} holds no Python file"
    assert {path: rooms for path, rooms in found.items() if rooms} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "from ..reference import kda",
        "from ..reference.kda import recurrent_kda",
        "from .. import reference",
        "from assay.reference import kda",
        "from assay import reference",
        "import assay.reference",
        "import assay.reference.kda as oracle",
        "def later():\n    from ..reference import kda",
    ],
)
def test_each_form_of_a_forbidden_import_is_seen(statement: str) -> None:
    assert forbidden_imports(statement, "assay.optimized") == {"reference"}
    assert forbidden_imports(statement, "assay.harness") == set()


@pytest.mark.parametrize(
    ("statement", "package", "rooms"),
    [
        ("from ...reference import kda", "assay.optimized.external", {"reference"}),
        ("from ... import eval", "assay.harness.operations", {"eval"}),
        ("from ..eval import report", "assay.harness", {"eval"}),
        ("from ..optimized import kda", "assay.reference", {"optimized"}),
        ("from ..harness import case", "assay.optimized", {"harness"}),
        ("from .._kda_chunk import forward", "assay.optimized.external", set()),
        ("from .attention import merge_states", "assay.reference", set()),
        ("from ..reference import kda, mla_prefill", "assay.eval", set()),
        ("import reference", "assay.optimized", set()),
    ],
)
def test_relative_imports_are_resolved_from_where_they_stand(statement: str, package: str, rooms: set[str]) -> None:
    assert forbidden_imports(statement, package) == rooms


def folders_with_init(root: Path) -> set[str]:
    return {package_of(path, root) for room in ROOMS for path in (root / room).rglob("__init__.py")}


def declared_packages(root: Path) -> list[str]:
    setuptools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packages: list[str] = setuptools["packages"]
    return packages


def test_the_wheel_declares_every_package_and_no_other() -> None:
    assert sorted(declared_packages(ROOT)) == sorted(folders_with_init(ROOT))


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {package_of(path) for room in ROOMS for path in python_files(ROOT / room)}
    assert folders == folders_with_init(ROOT)


def test_an_undeclared_package_is_seen(tmp_path: Path) -> None:
    for folder in (*ROOMS, "eval/tasks"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    listed = ", ".join(f'"assay.{room}"' for room in ROOMS)
    (tmp_path / "pyproject.toml").write_text(f"[tool.setuptools]\npackages = [{listed}]\n")
    assert folders_with_init(tmp_path) - set(declared_packages(tmp_path)) == {"assay.eval.tasks"}


def stay_behind(root: Path) -> list[str]:
    """Data files that no pattern of the package data takes into the wheel; pages for readers of the source may stay."""
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    left = []
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*") if path.is_file()):
        if path.suffix in (".py", ".pyc", ".md"):
            continue
        package = next(folder for folder in path.parents if (folder / "__init__.py").is_file())
        name = ".".join(("assay", *package.relative_to(root).parts))
        patterns = [*declared.get("*", []), *declared.get(name, [])]
        if not any(path in package.glob(pattern) for pattern in patterns):
            left.append(str(path.relative_to(root)))
    return left


def test_every_data_file_ships() -> None:
    assert stay_behind(ROOT) == []


def test_a_data_file_left_behind_is_seen(tmp_path: Path) -> None:
    (tmp_path / "harness" / "captured").mkdir(parents=True)
    for name in ("__init__.py", "faults.json", "captured/a.safetensors", "captured/a.json", "captured/README.md"):
        (tmp_path / "harness" / name).touch()
    patterns = '["*.json", "captured/*.safetensors"]'
    (tmp_path / "pyproject.toml").write_text(f'[tool.setuptools.package-data]\n"*" = {patterns}\n')
    assert stay_behind(tmp_path) == ["harness/captured/a.json"]


def test_every_room_is_typed() -> None:
    assert [room for room in ROOMS if not (ROOT / room / "py.typed").is_file()] == []


def companions(operation: str) -> list[str]:
    """Files that the oracle ``reference/<operation>.py`` calls for."""
    return [
        f"optimized/{operation}.py",
        f"harness/operations/{operation}.py",
        f"tests/test_reference_{operation}.py",
        f"tests/test_optimized_{operation}.py",
    ]


def missing_companions(root: Path, excused: dict[str, str]) -> list[str]:
    """Companions that are neither there nor excused."""
    operations = sorted(path.stem for path in (root / "reference").glob("[!_]*.py"))
    wanted = [name for operation in operations for name in companions(operation)]
    return [name for name in wanted if not (root / name).is_file() and name not in excused]


def test_every_oracle_has_a_twin_a_judge_and_tests_or_a_stated_reason() -> None:
    assert missing_companions(ROOT, WITHOUT) == []


def test_a_reason_names_a_file_that_is_missing_indeed() -> None:
    assert [name for name in WITHOUT if (ROOT / name).exists()] == []


def test_a_missing_twin_is_seen_unless_excused(tmp_path: Path) -> None:
    for name in ("reference/kda.py", "reference/_kda_gate.py", "reference/__init__.py", *companions("kda")[1:]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert missing_companions(tmp_path, {}) == ["optimized/kda.py"]
    assert missing_companions(tmp_path, {"optimized/kda.py": "no twin yet"}) == []


def too_long(paths: list[Path]) -> list[str]:
    return [path.name for path in paths if len(path.read_text().splitlines()) > LONGEST_FILE]


def test_no_file_is_too_long() -> None:
    paths = [path for folder in (*ROOMS, "tests") for path in python_files(ROOT / folder)]
    assert too_long(paths) == []


def test_a_file_of_one_line_too_many_is_seen(tmp_path: Path) -> None:
    short, long = tmp_path / "short.py", tmp_path / "long.py"
    short.write_text("x = 1\n" * LONGEST_FILE)
    long.write_text("x = 1\n" * (LONGEST_FILE + 1))
    assert too_long([short, long]) == ["long.py"]


def homeless(paths: list[Path]) -> list[Path]:
    """Files whose name or folder says only that nobody knew where they belong."""
    words = {"utils", "util", "common", "helpers", "misc"}
    return [path for path in paths if words & {*path.parts[:-1], path.stem.strip("_")}]


def test_every_file_has_a_home() -> None:
    paths = [path.relative_to(ROOT) for folder in (*ROOMS, "tests") for path in python_files(ROOT / folder)]
    assert homeless(paths) == []


def test_a_file_without_a_home_is_seen() -> None:
    planted = [Path("harness/utils.py"), Path("eval/common/io.py"), Path("harness/_utils.py")]
    assert homeless([*planted, Path("harness/commons.py")]) == planted


def readme_commands() -> list[str]:
    """The marked commands of the README, read in another way than ``.ci/run`` does."""
    text = (ROOT / "README.md").read_text()
    return re.findall(r"^<!-- ci: (?:tests|main) -->\n```(?:\w+)?\n([^\n]+)\n```$", text, flags=re.MULTILINE)


def test_ci_runs_the_two_commands_of_the_readme() -> None:
    listed = subprocess.run(["bash", str(ROOT / ".ci" / "run"), "--list"], capture_output=True, text=True, check=True)
    commands = listed.stdout.splitlines()
    assert sorted(commands) == sorted(readme_commands())
    assert [command.split()[-1] for command in commands] == ["py", "check"]


def test_ci_fails_where_the_readme_lost_a_command(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text("<!-- ci: tests -->\n```bash\ntrue\n```\n")
    listed = subprocess.run(["bash", ".ci/run", "--list"], cwd=tmp_path, capture_output=True, text=True)
    assert listed.returncode != 0
    assert "README.md must hold one command below <!-- ci: main -->, got 0" in listed.stderr


@pytest.mark.skipif("TOX_ENV_NAME" not in os.environ, reason="only tox installs a wheel")
def test_tox_tests_the_wheel_and_not_the_checkout() -> None:
    import assay.reference

    assert Path(assay.reference.__file__ or "").is_relative_to(sys.prefix)
