"""Compiles csrc/ into a small C library; without it the engine hashes blocks in Python.

Runs at installation (setup.py), or with `python -m engine_core.build_native`. It imports only the
standard library, so that it works before the package is installed.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parent / "csrc" / "block_hash.c"

_FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
"""The library checks CPU features at run time, so that one library serves all CPUs."""


class NativeBuildError(Exception):
    """The compiler is missing or failed; the message says why."""


def library(folder: Path) -> Path:
    """Return the path of the library; a digest of its sources in it prevents loading an old one."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:8]
    return folder / f"libtokend_{SOURCE.stem}_{digest}.so"


def build(output_dir: Path) -> list[Path]:
    """Compile into output_dir, unless it is up to date; return the libraries.

    Removes libraries of other sources. Raises NativeBuildError.
    """
    target = library(output_dir)
    for stale in set(output_dir.glob(f"libtokend_{SOURCE.stem}_*.so")) - {target}:
        stale.unlink()
    if not target.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        _compile(target)
    return [target]


def _compile(target: Path) -> None:
    """Compile to a temporary file and rename it, so that a running process keeps its library."""
    import subprocess  # not at the top: every engine imports this module

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NativeBuildError("no C compiler: neither cc nor gcc is on the PATH")
    partial = target.with_suffix(".partial")
    command = [compiler, *_FLAGS, "-o", str(partial), str(SOURCE)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        first = (finished.stderr.strip().splitlines() or ["no message"])[0]
        raise NativeBuildError(f"{Path(compiler).name} failed: {first}")
    partial.replace(target)


if __name__ == "__main__":
    try:
        print(*build(SOURCE.parent), sep="\n")
    except NativeBuildError as reason:
        sys.exit(f"native code not built: {reason}")
