"""Compiles the scheduler and the KV cache into C extensions with mypyc.

The time of a step is spread evenly over plain typed Python; compiled, the same files take half as
long. The extensions are written to a folder named after a digest of their sources, so that an
edited source is never shadowed by an old extension (see `compiled.py`).

Runs at installation (setup.py), or with `python -m engine_core.build_compiled`. It imports only
the standard library, so that it works before the package is installed. mypyc is part of mypy,
which is installed for the time of the build.
"""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Final

PACKAGE: Final = Path(__file__).resolve().parent
OUTPUT: Final = PACKAGE / "compiled_modules"
SUFFIX: Final = EXTENSION_SUFFIXES[0]
"""Names the Python version and the machine, as in .cpython-311-x86_64-linux-gnu.so."""

_HOT: Final = (
    *(
        "block_hashing.py",
        "request.py",
        "kv_cache/*.py",
        "speculation/*.py",
        "scheduler/*.py",
        "scheduler/queues/*.py",
    ),
    *("scheduler/features/*.py", "scheduler/features/retention/*.py"),
    *("kv_connector/offload/tracking.py", "kv_connector/offload/planners.py"),
)
"""Modules to compile. Not the connectors, ledgers and policies: an interpreted class may extend
those, and cannot extend a compiled class."""
_INTERPRETED: Final = ("outside.py",)
"""Names of files between them with what classes from outside extend."""
_TYPES_OF: Final = ("engine_core", "proto")
"""Packages whose sources the compiler reads."""

_MYPY_FLAGS: Final = ("--config-file=", "--ignore-missing-imports")
_ENVIRONMENT: Final = {"MYPYC_OPT_LEVEL": "1", "MYPYC_DEBUG_LEVEL": "0"}
"""Higher levels double or triple the compile time, without a measurable gain."""


class CompiledBuildError(Exception):
    """mypyc or the C compiler is missing or failed; the message says why."""


def hot_modules() -> list[Path]:
    """Return the files to compile, in a fixed order."""
    found = [path for pattern in _HOT for path in sorted(PACKAGE.glob(pattern))]
    return [path for path in found if path.name not in ("__init__.py", *_INTERPRETED)]


def folder_of_sources(output_dir: Path = OUTPUT) -> Path:
    """Return the folder for the extensions of the present sources."""
    digest = hashlib.sha256(" ".join(_MYPY_FLAGS + tuple(_ENVIRONMENT.values())).encode())
    for path in [*hot_modules(), *sorted((PACKAGE.parent / "proto").rglob("*.py"))]:
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return output_dir / digest.hexdigest()[:12]


def build(output_dir: Path = OUTPUT) -> list[Path]:
    """Compile into output_dir, unless it is up to date; return the folder of the extensions.

    Removes folders of other sources. Raises CompiledBuildError.
    """
    target = folder_of_sources(output_dir)
    for stale in set(output_dir.glob("*")) - {target}:
        shutil.rmtree(stale)
    if not any(target.glob(f"*{SUFFIX}")):
        shutil.rmtree(target, ignore_errors=True)
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            _compile(Path(folder), target)
    return [target]


def _compile(work: Path, target: Path) -> None:
    """Compile copies in the folder `work`, then move all extensions to `target` at once."""
    if importlib.util.find_spec("mypyc") is None:
        raise CompiledBuildError("mypyc is not installed; it is part of the package mypy")
    root = PACKAGE.parent
    for path in (path for name in _TYPES_OF for path in (root / name).rglob("*.py")):
        copy = work / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    modules = [str(path.relative_to(root)) for path in hot_modules()]
    finished = subprocess.run(
        [sys.executable, "-m", "mypyc", *_MYPY_FLAGS, *modules],
        cwd=work,
        env=os.environ | _ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        lines = (finished.stdout + finished.stderr).strip().splitlines()
        errors = [line for line in lines if "error:" in line.lower()] or lines or ["no message"]
        raise CompiledBuildError(f"mypyc failed: {errors[0]}")
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    built = [*work.glob(f"*{SUFFIX}"), *(work / PACKAGE.name).rglob(f"*{SUFFIX}")]
    for path in built:
        moved = partial / path.relative_to(work)
        moved.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, moved)
    partial.rename(target)


if __name__ == "__main__":
    try:
        print(*build(), sep="\n")
    except CompiledBuildError as reason:
        sys.exit(f"scheduler not compiled: {reason}")
