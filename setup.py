"""Builds the kernels into the package; everything else is in pyproject.toml.

Without a compiler the installation goes on: attention and draws then run on their
torch and numpy references.
"""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE_ROOT = Path(__file__).resolve().parent
KERNELS = runpy.run_path(str(SOURCE_ROOT / "worker" / "build_kernels.py"))


class BuildKernels(build_py):
    """build_py that compiles the kernels beside their sources before it collects files."""

    def run(self) -> None:
        try:
            built = KERNELS["build"](SOURCE_ROOT / "worker" / "csrc")
        except KERNELS["KernelBuildError"] as reason:
            print(
                f"tokend: kernels not built, the slow references will be used: {reason}",
                file=sys.stderr,
            )
        else:
            print("tokend: built " + ", ".join(path.name for path in built), file=sys.stderr)
        super().run()


setup(cmdclass={"build_py": BuildKernels})
