"""Compiles Triton kernels for Hopper in a process of its own; needs no GPU.

A process that has run a kernel in Triton's interpreter cannot compile any more.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

_OF_LAUNCHES = {"grid", "warmup", "stream", "device", "device_type", "num_warps", "num_stages"}
"""Names that a launch refuses or reads itself, which compilation alone does not notice."""


class Kernel(NamedTuple):
    """A kernel to compile.

    name: "module.name", of a module of worker.cuda.kernels. signature: types of its pointers and
    numbers. constants: compile-time parameters. options: of the compiler.
    """

    name: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = {}


def compiled(kernels: list[Kernel]) -> list[str]:
    """Return the PTX of every kernel; raises CalledProcessError if one does not compile."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.worker.ahead_of_time"],
        input=json.dumps(kernels),
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: list[str] = json.loads(result.stdout)
    return found


def _compile(
    name: str, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, function = name.partition(".")
    kernel = getattr(importlib.import_module(f"worker.cuda.kernels.{module}"), function)
    reserved = _OF_LAUNCHES & set(kernel.arg_names)
    assert not reserved, f"a launch takes {reserved} for its own settings"
    source = ASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    ptx: str = found.asm["ptx"]
    return ptx


if __name__ == "__main__":
    print(json.dumps([_compile(*each) for each in json.load(sys.stdin)]))
