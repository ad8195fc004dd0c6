"""A copy of the source tree with a Python of its own that imports from the copy alone.

    folder/tree/    the files that git tracks or would, and the compiled kernels
    folder/venv/    python and tokend; the packages come from the environment of this process

A daemon that a test starts runs `venv/bin/tokend`, and its processes run the same python, so
all of it is the copy, also where a test changes the environment variables.

The scheduler of a copy is interpreted: its compiled form belongs to the sources it was made of.
Of the kernels there is only the variant that this machine loads.
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
from worker import build_kernels

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = ("proto", "engine_core", "worker", "api_server", "deploy")
_KERNEL_SOURCES: Final = "worker/csrc/"
_HASH_SOURCES: Final = "engine_core/csrc/"
_BUILD_KERNELS: Final = "from worker.build_kernels import *; build_here(SOURCE_DIR)"
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
    """A copy could not be made as it must be; the message says why."""


@dataclass(frozen=True, slots=True)
class TreeCopy:
    """folder: of the copy, with its Python."""

    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "tree"

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def environment(self) -> dict[str, str]:
        """That of this process, without what would lead to another tree."""
        return {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "TOKEND_TEST_COMPILED")
        }

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Output of its Python; raises SetupError where that fails."""
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
        """Raise SetupError unless all packages are those of the copy, wherever Python starts."""
        found = self.run("-P", "-c", _SHOW_FILES, cwd=Path("/")).split()
        expected = [str(self.root / name) for name in PACKAGES]
        if found != expected:
            raise SetupError(f"the copy would run {found} instead of {expected}")


def copy_working_tree(folder: Path) -> TreeCopy:
    """A copy of the working tree as it stands, also of what is not committed."""
    copy = TreeCopy(folder)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    libraries = [
        build_kernels.best_variant().library(build_kernels.SOURCE_DIR),
        build_native.library(build_native.SOURCE.parent),
    ]
    names += [str(path.relative_to(ROOT)) for path in libraries if path.exists()]
    for name in names:
        if (ROOT / name).is_file():
            (copy.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy.root / name)
    make_python(copy)
    copy.check_imports()
    _build(copy)
    # Each further copy takes the bytecode along: compiling it takes longer than copying.
    copy.run("-m", "compileall", "-q", *PACKAGES, "tests")
    return copy


def copy_with_fault(base: TreeCopy, fault: Fault, folder: Path) -> TreeCopy:
    """A copy of an unmodified copy with one fault in it, rebuilt where that is compiled."""
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
    """The Python of a copy, and the command tokend beside it."""
    venv.EnvBuilder(symlinks=True, with_pip=False).create(copy.folder / "venv")
    paths = sysconfig.get_paths(vars={"base": str(copy.folder / "venv")}, scheme="venv")
    packages = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    lines = [str(copy.root), *(f"import site; site.addsitedir({path!r})" for path in packages)]
    (Path(paths["purelib"]) / "copy.pth").write_text("\n".join(lines) + "\n")
    script = copy.python.parent / "tokend"
    script.write_text(_TOKEND.format(python=copy.python))
    script.chmod(0o755)


def _build(copy: TreeCopy) -> None:
    """What is missing of the libraries; their names carry a digest of their sources."""
    copy.run("-c", _BUILD_KERNELS)
    copy.run("-m", "engine_core.build_native")


def adopt_orphans() -> None:
    """Become the parent of what a test leaves behind, so that `end_descendants` finds it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants() -> None:
    """Kill every process that descends from this one."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=10.0)
