"""Compiles FlashInfer's kernels ahead of time, on a machine with nvcc and no GPU.

    python -m worker.cuda.build_flashinfer FOLDER [--head-dims 64 128] [--windows] [--soft-cap]
                                      [--fp8] [--latent] [--experts] [--fp8-blocks]
    python -m worker.cuda.build_flashinfer FOLDER --for-tests

Makes FOLDER/flashinfer_jit_cache, a package that the library looks for: with FOLDER on
PYTHONPATH it loads the kernels from there, and with FLASHINFER_DISABLE_JIT=1 from nowhere
else. The build of the library needs the CUDA toolkit itself, not a wrapper of its compiler, a
libcuda.so to link with, and headers that its sources include without using them.
"""

import argparse
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from proto.errors import ConfigError
from worker.cuda.flashinfer_library import HEAD_DIMS, VERSION, latent_module

PACKAGE: Final = "flashinfer_jit_cache"
UNUSED_HEADERS: Final = ("cublasLt.h", "cublas_v2.h", "curand_kernel.h")
"""Included by the sources of most modules, which use nothing of them. Those of mixtures of experts
and of FP8 in blocks do, and need nvrtc.h and libnvrtc too."""
TOOLKITS: Final = Path("/usr/local")
EIGHT_BITS: Final = "float8_e4m3fn"


class FlashInferVariant(NamedTuple):
    """The parameters of a module of attention kernels. kv_dtype: empty if it is `dtype`."""

    head_dim: int
    dtype: str = "bfloat16"
    kv_dtype: str = ""
    window: bool = False
    soft_cap: bool = False


TEST_VARIANTS: Final = (
    FlashInferVariant(64),
    FlashInferVariant(128),
    FlashInferVariant(64, "float16"),
    FlashInferVariant(64, kv_dtype=EIGHT_BITS),
    FlashInferVariant(64, window=True),
    FlashInferVariant(64, soft_cap=True),
    FlashInferVariant(64, window=True, soft_cap=True),
    # A model with windows plans its layers without one too.
    FlashInferVariant(256, window=True),
    FlashInferVariant(256),
)
"""The variants that tests and benchmarks on a GPU run."""
INIT: Final = f'''"""Kernels of FlashInfer {VERSION}, compiled ahead of time."""

from pathlib import Path

__version__ = "{VERSION}+tokend"


def get_jit_cache_dir() -> str:
    """Where the library finds NAME/NAME.so."""
    return str(Path(__file__).parent / "jit_cache")
'''


def find_toolkit(root: Path = TOOLKITS) -> Path:
    """Return the newest CUDA toolkit with nvcc; raise ConfigError if there is none."""
    found = [
        folder
        for folder in root.glob("cuda*")
        if (folder / "include/cuda_runtime.h").exists() and (folder / "bin/nvcc").exists()
    ]
    if not found:
        raise ConfigError(f"no CUDA toolkit with nvcc in {root}/cuda*")
    return max(
        found, key=lambda folder: [int(n) for n in folder.name[5:].split(".") if n.isdigit()]
    )


def build_environment(work: Path, toolkit: Path, arch: str, jobs: int) -> dict[str, str]:
    """Return environment variables for the library's build; create their files in `work`.

    Headers that the toolkit lacks are empty.
    """
    headers, stubs = work / "headers", work / "stubs"
    for folder in (headers, stubs):
        folder.mkdir(parents=True, exist_ok=True)
    for name in UNUSED_HEADERS:
        if not (toolkit / "include" / name).exists():
            (headers / name).touch()
    stub = stubs / "libcuda.so"
    if not stub.exists():
        subprocess.run(["gcc", "-shared", "-o", stub, "-x", "c", os.devnull], check=True)
    return {
        "CUDA_HOME": str(toolkit),
        "FLASHINFER_CUDA_ARCH_LIST": arch,
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_EXTRA_CUDAFLAGS": f"-I{headers}",
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{stubs}",
        "MAX_JOBS": str(jobs),
    }


def variants(options: argparse.Namespace) -> list[FlashInferVariant]:
    if options.for_tests:
        return list(TEST_VARIANTS)
    kv_dtypes = ["", EIGHT_BITS] if options.fp8 else [""]
    windows = (False, True) if options.windows else (False,)
    soft_caps = (False, True) if options.soft_cap else (False,)
    every = itertools.product(options.head_dims, kv_dtypes, windows, soft_caps)
    return [
        FlashInferVariant(head_dim, options.dtype, kv_dtype, window, soft_cap)
        for head_dim, kv_dtype, window, soft_cap in every
    ]


def attention_spec(variant: FlashInferVariant) -> Any:
    """Return the library's spec of a module for prefills and for decodes on tensor cores."""
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    dtype = getattr(torch, variant.dtype)
    kv_dtype = getattr(torch, variant.kv_dtype or variant.dtype)
    return gen_batch_prefill_module(
        "fa2",
        dtype,
        kv_dtype,
        dtype,
        torch.int32,
        variant.head_dim,
        variant.head_dim,
        0,  # positions are in the keys
        variant.window,
        variant.soft_cap,
        False,  # products of queries and keys are summed in float32
    )


def specs(options: argparse.Namespace) -> Iterator[Any]:
    """Yield the library's specs of all modules to build."""
    from flashinfer.jit import activation, cascade, norm, page, rope

    if options.page:
        yield page.gen_page_module()
    if options.rows or options.for_tests:
        yield norm.gen_norm_module()
        yield rope.gen_rope_module()
        for name in ("silu", "gelu_tanh"):
            yield activation.gen_act_and_mul_module(name)
    if options.cascade or options.for_tests:
        yield cascade.gen_cascade_module()
    if options.experts:
        from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

        yield gen_cutlass_fused_moe_sm90_module()
    if options.fp8_blocks or options.for_tests:
        from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module

        yield gen_fp8_blockscale_gemm_sm90_module()
    yield from map(attention_spec, variants(options))
    if options.latent or options.for_tests:
        yield latent_module(getattr(torch, options.dtype))


def pack(libraries: list[Path], folder: Path) -> Path:
    """Write a package that contains these libraries; return its folder."""
    package = folder / PACKAGE
    for library in libraries:
        place = package / "jit_cache" / library.stem
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, place)
    (package / "__init__.py").write_text(INIT)
    return package


def parser() -> argparse.ArgumentParser:
    words = argparse.ArgumentParser("python -m worker.cuda.build_flashinfer", description=__doc__)
    words.add_argument("folder", type=Path)
    words.add_argument("--arch", default="9.0a", help="compute capability; 9.0a is Hopper")
    words.add_argument("--cuda-home", type=Path, help="the CUDA toolkit; default: found")
    words.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    words.add_argument("--head-dims", type=int, nargs="*", choices=HEAD_DIMS, default=[64, 128])
    words.add_argument("--windows", action="store_true", help="also for layers with a window")
    words.add_argument(
        "--soft-cap", action="store_true", help="also for scores with a soft cap, as Gemma 2's"
    )
    words.add_argument("--fp8", action="store_true", help="also for K and V of 8 bits")
    words.add_argument("--latent", action="store_true", help="also for latent KV, as DeepSeek's")
    words.add_argument("--cascade", action="store_true", help="merging of a shared prefix")
    words.add_argument("--experts", action="store_true", help="mixtures of experts, on Hopper")
    words.add_argument(
        "--fp8-blocks", action="store_true", help="weights in FP8 with a scale a block, on Hopper"
    )
    words.add_argument(
        "--no-rows", action="store_false", dest="rows", help="without norms, gates and rotations"
    )
    words.add_argument(
        "--for-tests",
        action="store_true",
        help="build the modules of the GPU tests; the other selection flags are ignored",
    )
    words.add_argument("--page", action="store_true", help="a small module, to try the toolchain")
    words.add_argument("--jobs", type=int, default=2, help="number of parallel compilers")
    return words


def main(arguments: list[str]) -> None:
    """Build all modules, printing a line for each, and pack them."""
    options = parser().parse_args(arguments)
    folder = options.folder.resolve()
    toolkit = options.cuda_home or find_toolkit()
    # The library reads these when it is imported.
    os.environ.update(build_environment(folder / "work", toolkit, options.arch, options.jobs))
    libraries = []
    for spec in specs(options):
        started = time.monotonic()
        spec.build(verbose=False)
        library = Path(spec.jit_library_path)
        libraries.append(library)
        seconds, size = time.monotonic() - started, library.stat().st_size / 1e6
        print(f"{spec.name}  {size:.2f} MB  {seconds:.0f} s", flush=True)
    print(f"{pack(libraries, folder)}: {len(libraries)} modules")


if __name__ == "__main__":
    main(sys.argv[1:])
