"""Kernels of Triton compiled for Hopper, which takes no GPU, in a process of their own.

Where a kernel has run in Triton's interpreter, its language stays changed.
"""

import importlib
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """What is to be compiled.

    maker: "module:name" of what makes the kernel, or something that has it. signature: types
    of its pointers and numbers. constants: its compile-time parameters. options: of the
    compiler.
    """

    maker: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, Any] = {}


def compiled(kernels: list[Kernel]) -> list[str]:
    """The PTX of each; raises CalledProcessError where one does not compile."""
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
    maker: str, signature: dict[str, str], constants: dict[str, Any], options: dict[str, Any]
) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = maker.split(":")
    made = getattr(importlib.import_module(module), name)()
    kernel = getattr(made, "kernel", None) or made
    source = ASTSource(
        kernel, signature | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert found.asm["cubin"]
    ptx: str = found.asm["ptx"]
    return ptx


if __name__ == "__main__":
    print(json.dumps([_compile(*each) for each in json.load(sys.stdin)]))
