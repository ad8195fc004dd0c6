"""Builds the compiled parts into the package; everything else is in pyproject.toml.

Without a compiler the installation goes on: attention and draws then run on their
torch and numpy references, block hashes on hashlib, and the scheduler is interpreted.
"""

import runpy
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE_ROOT = Path(__file__).resolve().parent
BUILDERS = (
    ("engine_core/build_native.py", "csrc", "NativeBuildError"),
    ("engine_core/build_compiled.py", "compiled_modules", "CompiledBuildError"),
    ("worker/build_kernels.py", "csrc", "KernelBuildError"),
)
"""Scripts that import nothing of the package: the folder beside them for their
`build(folder)`, and what it raises. An editable installation is for this machine alone: it
takes `build_here(folder)` where there is one."""


class BuildCompiledParts(build_py):
    """build_py that compiles beside the sources before it collects files."""

    def run(self) -> None:
        for script, folder, error in BUILDERS:
            path = SOURCE_ROOT / script
            builder = runpy.run_path(str(path))
            build = builder["build"]
            if self.editable_mode:
                build = builder.get("build_here", build)
            try:
                built = build(path.parent / folder)
            except builder[error] as reason:
                print(f"tokend: {script}: slower without it: {reason}", file=sys.stderr)
            else:
                print("tokend: built " + ", ".join(each.name for each in built), file=sys.stderr)
        super().run()


setup(cmdclass={"build_py": BuildCompiledParts})
