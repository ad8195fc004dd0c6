"""Loads FlashInfer's kernels before the weights, so that no step has to load one.

The library makes a module of each kind of kernel when it is called first: the prebuilt one
of the package flashinfer_jit_cache, or one that nvcc compiles for up to two minutes. A host that
has neither is refused here, within seconds of its start.
"""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch

from proto.errors import ConfigError
from proto.settings.config import DeviceConfig
from worker.cuda.attention.flashinfer import EIGHT_BITS, load_library, refuse_unsupported
from worker.cuda.attention.flashinfer_ragged import padded_dim
from worker.cuda.flashinfer_library import VERSION, latent_module
from worker.cuda.layers.flashinfer_kernels import (
    GATES,
    SIXTEEN_BITS,
    has_prebuilt_experts,
    import_flashinfer,
    installed_version,
    is_hopper,
)
from worker.models.mlp import MlpSpec
from worker.models.moe import MoeSpec
from worker.models.spec import ModelSpec

logger = logging.getLogger("tokend.worker")

_TOOLKIT: Final = "/usr/local/cuda"


def load_modules(
    config: DeviceConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    progress: Callable[[float], None],
    *,
    fp8_blocks: bool = False,
) -> None:
    """Load every module that a step of this model calls; none if FlashInfer is not used.

    progress: called with the finished part. fp8_blocks: whether it multiplies weights in FP8 with a
    scale a block. Raises ConfigError if the library is requested and is
    not installed or does not support the model, and if a module is neither prebuilt nor can be
    compiled.
    """
    has_attention = _attends(config, spec, dtype, kv_dtype)
    if installed_version() != VERSION or dtype not in SIXTEEN_BITS:
        return
    import_flashinfer()
    needed = list(_modules(config, spec, dtype, kv_dtype if has_attention else None, fp8_blocks))
    missing = [module for module in needed if not module.is_aot]
    if missing and (reason := why_not_compiled()):
        names = ", ".join(module.name for module in missing)
        command = build_command(config, spec, dtype, kv_dtype, fp8_blocks)
        raise ConfigError(
            f"FlashInfer's kernels ({names}) are not prebuilt "
            f"and cannot be compiled, {reason}: install flashinfer-jit-cache {VERSION}, or run "
            f"`{command}` where nvcc is and put FOLDER on PYTHONPATH",
            "attention_backend",
        )
    if missing:
        # ninja comes with the library, into the folder of this Python.
        os.environ["PATH"] = _search_path()
        logger.info("compiling %d modules of FlashInfer, minutes each; once", len(missing))
    for done, module in enumerate(needed):
        _load(module)
        progress((done + 1) / len(needed))


def why_not_compiled() -> str | None:
    """Return what this host lacks to compile a module; None if it can."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        return "FLASHINFER_DISABLE_JIT is set"
    for program in (_nvcc(), "ninja", os.environ.get("CXX", "c++")):
        if shutil.which(program, path=_search_path()) is None:
            return f"there is no {program}"
    return None


def build_command(
    config: DeviceConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    fp8_blocks: bool = False,
) -> str:
    """Return the command that prebuilds the modules of load_modules."""
    words = ["python -m worker.cuda.build_flashinfer FOLDER"]
    words.append(f"--dtype {str(dtype).removeprefix('torch.')} --head-dims")
    shape = spec.attention_shape
    words.append("--latent" if shape.latent_dim else str(_kernel_dim(spec)))
    if any(spec.windows):
        words.append("--windows")
    if spec.attention_shape.soft_cap:
        words.append("--soft-cap")
    if kv_dtype == EIGHT_BITS:
        words.append("--fp8")
    if config.cascade_attention_from:
        words.append("--cascade")
    if fp8_blocks:
        words.append("--fp8-blocks")
    return " ".join(words)


def _attends(
    config: DeviceConfig, spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype
) -> bool:
    """Return whether attention runs on FlashInfer; raises ConfigError if it must and cannot."""
    if config.attention_backend not in ("auto", "flashinfer") or not spec.has_attention:
        return False
    shape = spec.attention_shape
    try:
        refuse_unsupported(shape, dtype, kv_dtype)
        load_library()
    except ConfigError:
        if config.attention_backend == "flashinfer":
            raise
        return False
    return True


def _modules(
    config: DeviceConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    fp8_blocks: bool,
) -> Iterator[Any]:
    """Yield the library's descriptions of the modules; kv_dtype: None without attention."""
    from flashinfer.jit import activation, cascade, norm, rope
    from flashinfer.jit.attention.modules import gen_batch_prefill_module

    yield norm.gen_norm_module()
    mlps = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MlpSpec | MoeSpec)]
    for name in sorted({mlp.activation for mlp in mlps if mlp.is_gated} & GATES):
        yield activation.gen_act_and_mul_module(name)
    if _has_fused_experts(spec):
        from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module

        yield gen_cutlass_fused_moe_sm90_module()
    if fp8_blocks:
        from flashinfer.jit.gemm import gen_fp8_blockscale_gemm_sm90_module

        yield gen_fp8_blockscale_gemm_sm90_module()
    if kv_dtype is None:
        return
    yield rope.gen_rope_module()
    if spec.attention_shape.latent_dim:
        yield latent_module(dtype)
        return
    if config.cascade_attention_from:
        yield cascade.gen_cascade_module()
    for has_window in sorted({window is not None for window in spec.windows}):
        # Of prefills, and of decodes on tensor cores; no rotation, sums in float32.
        yield gen_batch_prefill_module(
            "fa2",
            dtype,
            kv_dtype,
            dtype,
            torch.int32,
            _kernel_dim(spec),
            _kernel_dim(spec),
            0,
            has_window,
            bool(spec.attention_shape.soft_cap),
            False,
        )


def _kernel_dim(spec: ModelSpec) -> int:
    """Return the size of heads that kernels compute; those of encoders may be narrower."""
    shape = spec.attention_shape
    return padded_dim(shape.head_dim) if shape.bidirectional else shape.head_dim


def _has_fused_experts(spec: ModelSpec) -> bool:
    """Return whether FlashInferExperts may compute a mixture of this model, and is prebuilt."""
    mixtures = (layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
    may = any(each.activation == "silu" for each in mixtures) and is_hopper(torch.device("cuda"))
    return may and has_prebuilt_experts()


def _load(module: Any) -> None:
    try:
        module.build_and_load()
    except Exception as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"FlashInfer's kernels {module.name} do not load: {first}", "attention_backend"
        ) from error


def _nvcc() -> str:
    """Return the path of nvcc, searched as the library does."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc") is None and Path(_TOOLKIT).exists():
        home = _TOOLKIT
    return os.environ.get("FLASHINFER_NVCC") or (f"{home}/bin/nvcc" if home else "nvcc")


def _search_path() -> str:
    return os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
