"""Compiles csrc/ into one small C library, which the engine can do without.

Owns the compiler command. Runs at installation (setup.py) and by hand
(`python -m engine_core.build_native`); imports nothing but the standard library, so
that it works before the package is installed.
"""

import hashlib
import shutil
import sys
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).resolve().parent / "csrc" / "block_hash.c"

_FLAGS: Final = ("-std=c11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra")
"""What a CPU may lack is asked for at run time, so there is one library for all of them."""


class NativeBuildError(Exception):
    """No compiler, or it refused; the message says which and why."""


def library(folder: Path) -> Path:
    """Where the library belongs. The name carries a digest of what it is compiled from,
    so that one of older sources is never loaded."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode() + SOURCE.read_bytes()).hexdigest()[:8]
    return folder / f"libtokend_{SOURCE.stem}_{digest}.so"


def build(output_dir: Path) -> list[Path]:
    """Compile into output_dir, unless that is done; returns the libraries.

    Libraries of other sources are removed. Raises NativeBuildError.
    """
    target = library(output_dir)
    for stale in set(output_dir.glob(f"libtokend_{SOURCE.stem}_*.so")) - {target}:
        stale.unlink()
    if not target.exists():
        output_dir.mkdir(parents=True, exist_ok=True)
        _compile(target)
    return [target]


def _compile(target: Path) -> None:
    """Beside the target, then moved there, so that a running process keeps its library."""
    import subprocess  # every engine imports this module, and compiles nothing

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
