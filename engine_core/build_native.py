"""Compiles csrc/ into small C libraries: block hashes, and the index of token sequences.

Without them the engine hashes blocks in Python and has no drafts from earlier tokens. Runs at
installation (setup.py), or with `python -m engine_core.build_native`. It imports only the standard
library, so that it works before the package is installed.
"""

import hashlib
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Final

SOURCE_DIR: Final = Path(__file__).resolve().parent / "csrc"
BLOCK_HASH: Final = SOURCE_DIR / "block_hash.c"
SUFFIX_INDEX: Final = SOURCE_DIR / "suffix_index.c"
"""An extension module of Python, by its stable ABI: for 3.11 and newer."""

_FLAGS: Final = (
    *("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    "-Werror=implicit-function-declaration",
)
"""The libraries check CPU features at run time, so that one library serves all CPUs."""


class NativeBuildError(Exception):
    """The compiler is missing or failed; the message says why."""


def library(source: Path, folder: Path = SOURCE_DIR) -> Path:
    """Return the path of a library; a digest of its source in it prevents loading an old one."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + source.read_bytes()).hexdigest()[:8]
    return folder / f"libtokend_{source.stem}_{digest}.so"


def build(output_dir: Path) -> list[Path]:
    """Compile into output_dir what is not up to date; return the libraries.

    Removes libraries of other sources. Raises NativeBuildError.
    """
    return [_build(source, output_dir) for source in (BLOCK_HASH, SUFFIX_INDEX)]


def _build(source: Path, output_dir: Path) -> Path:
    target = library(source, output_dir)
    for stale in set(output_dir.glob(f"libtokend_{source.stem}_*.so")) - {target}:
        stale.unlink()
    if not target.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        _compile(source, target)
    return target


def _compile(source: Path, target: Path) -> None:
    """Compile to a temporary file and rename it, so that a running process keeps its library."""
    import subprocess  # not at the top: every engine imports this module

    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NativeBuildError("no C compiler: neither cc nor gcc is on the PATH")
    headers = sysconfig.get_paths()["include"]
    if source == SUFFIX_INDEX and not Path(headers, "Python.h").exists():
        raise NativeBuildError(
            f"Python.h is not in {headers}: no drafts from earlier tokens. Debian and "
            "Ubuntu have it in the package python3-dev, Fedora and RHEL in python3-devel"
        )
    partial = target.with_suffix(".partial")
    command = [compiler, *_FLAGS, f"-I{headers}", "-o", str(partial), str(source)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        first = (finished.stderr.strip().splitlines() or ["no message"])[0]
        raise NativeBuildError(f"{Path(compiler).name} failed: {first}")
    partial.replace(target)


if __name__ == "__main__":
    try:
        print(*build(SOURCE_DIR), sep="\n")
    except NativeBuildError as reason:
        sys.exit(f"native code not built: {reason}")
