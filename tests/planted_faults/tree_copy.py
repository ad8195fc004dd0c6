"""A copy of the source tree with a virtual environment that imports only from the copy.

    folder/tree/    the files that git tracks or would, and the compiled kernels
    folder/venv/    python and tokend; the packages come from the environment of this process

A daemon that a test starts runs `venv/bin/tokend`, and its processes run the same python, so
all of them run the copy, even if a test changes the environment variables.

The scheduler of a copy is interpreted, because compiled modules match unmodified sources only.
Only the variant of the kernels that this machine loads is built.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from engine_core import build_native
from tests.planted_faults.faults import Fault
from worker.cpu import build_kernels

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("proto", "engine_core", "worker", "api_server", "deploy")
_KERNEL_SOURCES: Final = "worker/csrc/"
_HASH_SOURCES: Final = "engine_core/csrc/"
_BUILD_KERNELS: Final = "from worker.cpu.build_kernels import *; build_here(SOURCE_DIR)"
_SHOW_FILES: Final = f"import {', '.join(PACKAGES)}\nfor each in ({', '.join(PACKAGES)}): " + (
    "print(each.__path__[0])"
)
_TOKEND: Final = """#!{python}
import sys
from deploy.cli import main
sys.exit(main())
"""
_PR_SET_CHILD_SUBREAPER: Final = 36


class SetupError(Exception):
    """A copy could not be made; the message says why."""


@dataclass(frozen=True, slots=True)
class TreeCopy:
    """The folder of a copy, with its source tree and virtual environment."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "tree"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of this process, without those that lead Python to another tree."""
        return {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TOKEND_TEST_COMPILED")
        }

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run the copy's Python and return its output; raise SetupError if it fails."""
        finished = subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd or self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode != 0:
            raise SetupError(f"{' '.join(arguments)}: {finished.stdout}{finished.stderr}")
        return finished.stdout

    def check_imports(self) -> None:
        """Raise SetupError unless Python imports all packages from the copy in any folder."""
        found = self.run("-P", "-c", _SHOW_FILES, cwd=Path("/")).split()
        expected = [str(self.root / name) for name in PACKAGES]
        if found != expected:
            raise SetupError(f"the copy would run {found} instead of {expected}")


def copy_working_tree(folder: Path) -> TreeCopy:
    """Copy the working tree, uncommitted changes included."""
    copy = TreeCopy(folder)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    variants = build_kernels.usable_variants(
        build_kernels.machine_variants(), build_kernels.cpu_flags()
    )
    libraries = [
        *(variant.library(build_kernels.SOURCE_DIR) for variant in variants),
        build_native.library(build_native.BLOCK_HASH),
        build_native.library(build_native.SUFFIX_INDEX),
    ]
    names += [str(path.relative_to(ROOT)) for path in libraries if path.exists()]
    for name in names:
        if (ROOT / name).is_file():
            (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy.root / name)
    make_python(copy)
    copy.check_imports()
    _build(copy)
    # Later copies include the bytecode, since compiling takes longer than copying.
    copy.run("-m", "compileall", "-q", *PACKAGES, "tests")
    return copy


def copy_with_fault(base: TreeCopy, fault: Fault, folder: Path) -> TreeCopy:
    """Copy an unmodified copy, apply a fault, and rebuild libraries whose sources it changes."""
    copy = TreeCopy(folder)
    shutil.copytree(base.root, copy.root, symlinks=True)
    make_python(copy)
    copy.check_imports()
    path = copy.root / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SetupError(f"{fault.name}: `old` occurs {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new))
    if fault.file.startswith((_KERNEL_SOURCES, _HASH_SOURCES)):
        _build(copy)
    return copy


def make_python(copy: TreeCopy) -> None:
    """Create the virtual environment of a copy, with the command `tokend`."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(copy.folder / "venv")
    paths = sysconfig.get_paths(vars={"base": str(copy.folder / "venv")}, scheme="venv")
    packages = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    lines = [str(copy.root), *(f"import site; site.addsitedir({path!r})" for path in packages)]
    (Path(paths["purelib"]) / "copy.pth").write_text("\n".join(lines) + "\n")
    script = copy.python.parent / "tokend"
    script.write_text(_TOKEND.format(python=copy.python))
    script.chmod(0o755)


def _build(copy: TreeCopy) -> None:
    """Build missing libraries; their names contain a digest of their sources."""
    copy.run("-c", _BUILD_KERNELS)
    copy.run("-m", "engine_core.build_native")


def adopt_orphans() -> None:
    """Become the parent of orphaned processes of tests, so that `end_descendants` finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill all descendants of this process."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10.0)
