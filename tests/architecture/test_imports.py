"""Each folder imports only what the table in docs/architecture.md allows."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def allowed_imports(page: str) -> dict[str, tuple[set[str], set[str]]]:
    """Return the table "Allowed imports" of a page: folder → packages, packages in functions."""
    section = page.split("## Allowed imports")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)/` \| ([^|]*) \|$", section, re.MULTILINE)
    table = {}
    for folder, cell in rows:
        always, _, lazily = re.sub(r" inside (a function|functions)$", "", cell).partition("; ")
        table[folder] = (set(always.split(", ")), set(filter(None, lazily.split(", "))))
    return table


ALLOWED = allowed_imports(PAGE)
FOLDERS = sorted(ALLOWED)
KERNELS = Path("worker/cuda/kernels")
"""Files that import Triton at their top, and that others import inside functions."""
FOREIGN = ROOT / "tests" / "benchmarks" / "peers"
"""Programs that run in other virtual environments, with the packages installed there."""


def imports_of(tree: ast.Module) -> list[tuple[str, int, bool]]:
    """Return (module, line, inside a function) of every import."""
    found = []

    def visit(node: ast.AST, in_function: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.extend((name.name, child.lineno, in_function) for name in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"relative import in line {child.lineno}"
                found.append((child.module or "", child.lineno, in_function))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            visit(child, in_function or is_function)

    visit(tree, False)
    return found


def violations(folder: str, path: Path, source: str) -> list[str]:
    always, lazily = ALLOWED[folder]
    allowed = always | {folder} | set(sys.stdlib_module_names)
    if path.is_relative_to(KERNELS):
        allowed |= {"triton"}
    broken = []
    late = ".".join(KERNELS.parts)
    for module, line, in_function in imports_of(ast.parse(source)):
        if is_in(module, {late}) and not in_function:
            broken.append(f"{path}:{line} imports {module}")
        if not is_in(module, allowed) and not (in_function and is_in(module, lazily)):
            broken.append(f"{path}:{line} imports {module}")
    return broken


def is_in(module: str, packages: set[str]) -> bool:
    """Return whether a module is one of these packages or in one of them."""
    parts = module.split(".")
    return any(".".join(parts[: end + 1]) in packages for end in range(len(parts)))


@pytest.mark.parametrize("folder", FOLDERS)
def test_folder_imports_only_what_the_table_allows(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"{folder}/ has no Python files"
    broken = [
        violation
        for path in files
        for violation in violations(folder, path.relative_to(ROOT), path.read_text())
    ]
    assert broken == []


def test_the_table_has_a_row_for_each_folder() -> None:
    assert FOLDERS == ["api_server", "deploy", "engine_core", "proto", "worker"]
    assert ALLOWED["proto"] == ({"msgspec", "zmq"}, {"setproctitle"})


def test_the_check_finds_forbidden_imports() -> None:
    source = "import json\nimport torch\ndef f():\n    import gguf\n    import transformers\n"
    assert violations("engine_core", Path("x.py"), source) == [
        "x.py:2 imports torch",
        "x.py:4 imports gguf",
        "x.py:5 imports transformers",
    ]
    source = "from worker.cuda.kernels.rows import norm_row\n"
    assert violations("worker", Path("x.py"), source) == ["x.py:1 imports worker.cuda.kernels.rows"]
    assert violations("deploy", Path("x.py"), "import tokenizers") == ["x.py:1 imports tokenizers"]
    source = "from worker.models.families import FAMILIES\nfrom worker.models import spec\n"
    assert violations("deploy", Path("x.py"), source) == ["x.py:2 imports worker.models"]


def test_programs_for_other_environments_share_no_imports_with_the_product() -> None:
    programs = sorted(FOREIGN.glob("*.py"))
    assert programs
    for path in programs:
        modules = [module for module, _, _ in imports_of(ast.parse(path.read_text()))]
        assert not any(is_in(module, set(FOLDERS)) for module in modules)
    users = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "benchmarks.peers" in path.read_text()
    ]
    assert users == []


def test_arithmetic_does_not_know_the_loader() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "worker" / "models").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        if (node.module or "").startswith(("worker.loader", "worker.parallel"))
    ]
    assert found == []


def test_the_files_of_families_are_read_without_torch() -> None:
    code = (
        "import sys, worker.models.families, worker.models.vision as vision\n"
        "assert len(vision.VISION_FAMILIES) > 3\n"
        "print(*{'torch', 'numpy'} & sys.modules.keys())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert (found.stdout, found.stderr) == ("\n", "")


def test_proto_is_imported_from_this_repository() -> None:
    import proto

    assert Path(proto.__file__).parent == ROOT / "proto"
