"""An engine runs the compiled scheduler only if it was built from the present sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core import build_compiled, compiled
from engine_core.build_compiled import SUFFIX, CompiledBuildError, folder_of_sources

ASK = """
from engine_core.compiled import use_compiled
print(use_compiled())
import engine_core.scheduler.scheduler, engine_core.kv_cache.pool, engine_core.core
print(engine_core.scheduler.scheduler.__file__)
print(engine_core.kv_cache.pool.__file__)
print(engine_core.core.__file__)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a copy of the sources instead of the package."""
    for name in ("engine_core", "proto"):
        source = build_compiled.PACKAGE.parent / name
        ignored = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(source, tmp_path / name, ignore=ignored)
    monkeypatch.setattr(build_compiled, "PACKAGE", tmp_path / "engine_core")
    return tmp_path / "engine_core"


def test_modules_of_a_step_are_compiled() -> None:
    names = {path.relative_to(build_compiled.PACKAGE).as_posix() for path in
             build_compiled.hot_modules()}  # fmt: skip
    assert {"request.py", "kv_cache/pool.py", "scheduler/queues/policies.py"} <= names
    assert {"scheduler/scheduler.py", "scheduler/features/retention/agent_sessions.py"} <= names
    assert "kv_connector/offload/planners.py" in names
    assert not any(name.endswith("__init__.py") for name in names)


@pytest.mark.parametrize(
    "edited", ["scheduler/scheduler.py", "../proto/messages/scheduler_output.py"]
)
def test_an_edited_source_belongs_to_another_folder(package: Path, edited: str) -> None:
    before = folder_of_sources()
    with (package / edited).open("a") as file:
        file.write("# another thought\n")
    assert folder_of_sources() != before


def test_an_edit_elsewhere_changes_nothing(package: Path) -> None:
    before = folder_of_sources()
    (package / "outbox.py").write_text("")
    assert folder_of_sources() == before


def test_sources_without_extensions_are_interpreted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiled, "folder_of_sources", lambda: tmp_path / "none")
    before = list(sys.meta_path)
    assert compiled.use_compiled() is False
    assert sys.meta_path == before


def test_only_what_lies_in_the_folder_is_found(tmp_path: Path) -> None:
    extension = tmp_path / "engine_core" / "scheduler" / "queues" / f"policies{SUFFIX}"
    extension.parent.mkdir(parents=True)
    extension.touch()
    finder = compiled.CompiledFinder(tmp_path)
    spec = finder.find_spec("engine_core.scheduler.queues.policies")
    assert spec is not None
    assert spec.origin == str(extension)
    assert finder.find_spec("engine_core.scheduler.queues.fair") is None
    assert finder.find_spec("engine_core.scheduler.queues") is None


def test_without_mypyc_the_reason_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(build_compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CompiledBuildError, match="part of the package mypy"):
        build_compiled.build(tmp_path)


def test_what_mypyc_refuses_is_named_and_leaves_nothing(package: Path, tmp_path: Path) -> None:
    for path in build_compiled.hot_modules():
        path.unlink()
    (package / "request.py").write_text("count: int = 'many'\n")
    output = tmp_path / "out"
    with pytest.raises(CompiledBuildError, match=r"request\.py:1: error"):
        build_compiled.build(output)
    assert list(output.iterdir()) == []


def test_extensions_of_other_sources_are_removed(tmp_path: Path) -> None:
    stale, current = tmp_path / "0123456789ab", folder_of_sources(tmp_path)
    for folder in (stale, current):
        folder.mkdir()
        (folder / f"x__mypyc{SUFFIX}").touch()
    assert build_compiled.build(tmp_path) == [current]
    assert list(tmp_path.iterdir()) == [current]


@pytest.mark.skipif(
    not folder_of_sources().is_dir(), reason="the scheduler is not compiled from these sources"
)
def test_an_engine_loads_the_compiled_modules() -> None:
    ran = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    answer, *files = ran.stdout.split()
    assert answer == "True"
    assert [file.endswith(SUFFIX) for file in files] == [True, True, False]
