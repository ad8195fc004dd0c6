"""Builds the compiled parts into the package; everything else is in pyproject.toml.

Without a compiler the installation goes on: attention and draws then run on their
torch and numpy references, block hashes on hashlib, and the scheduler is interpreted.
With TOKEND_REQUIRE_COMPILED=1 (`make wheel`) it ends instead.

A wheel has the kernels of every CPU of its kind, and serves any Python from 3.11 on: its libraries
use no Python, or the stable ABI. Only the compiled scheduler belongs to the Python that builds the
wheel; under another one it is interpreted.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE_ROOT = Path(__file__).resolve().parent
BUILDERS = (
    ("engine_core/build_native.py", "engine_core/csrc", "NativeBuildError"),
    ("engine_core/build_compiled.py", "engine_core/compiled_modules", "CompiledBuildError"),
    ("worker/cpu/build_kernels.py", "worker/csrc", "KernelBuildError"),
)
"""Scripts that import nothing of the package: the folder for their
`build(folder)`, and what it raises. An editable installation is for this machine alone: it
takes `build_here(folder)` where there is one."""


class BuildCompiledParts(build_py):
    """build_py that compiles beside the sources before it collects files."""

    def run(self) -> None:
        for script, folder, error in BUILDERS:
            builder = runpy.run_path(str(SOURCE_ROOT / script))
            build = builder["build"]
            if self.editable_mode:
                build = builder.get("build_here", build)
            try:
                built = build(SOURCE_ROOT / folder)
            except builder[error] as reason:
                if os.environ.get("TOKEND_REQUIRE_COMPILED") == "1":
                    raise
                print(f"tokend: {script}: slower without it: {reason}", file=sys.stderr)
            else:
                print("tokend: built " + ", ".join(each.name for each in built), file=sys.stderr)
        super().run()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python (see above)."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    """Has libraries for one platform, although setuptools builds none of them."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildCompiledParts, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
