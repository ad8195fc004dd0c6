"""A fake of `flashinfer.jit`: kernel modules that are prebuilt, can be compiled, or are loaded.

Modules have the library's own names, so the loaded modules can be compared with those that a call
needs.
"""

import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.fakes.fake_paged_wrapper import demand
from worker.cuda import flashinfer_modules
from worker.cuda.attention import flashinfer
from worker.cuda.flashinfer_library import VERSION
from worker.cuda.layers import flashinfer_kernels

_SHORT = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}


def attention_module(
    dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, has_window: bool, has_cap: bool
) -> str:
    """Return the name of the module of FA2's prefills and decodes."""
    return (
        f"batch_prefill_with_kv_cache_dtype_q_{_SHORT[dtype]}_dtype_kv_{_SHORT[kv_dtype]}_"
        f"dtype_o_{_SHORT[dtype]}_dtype_idx_i32_head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_"
        f"posenc_0_use_swa_{has_window}_use_logits_cap_{has_cap}_f16qk_False"
    )


def latent_module(dtype: torch.dtype) -> str:
    """Return the name of the module of latent attention."""
    short = _SHORT[dtype]
    return (
        f"batch_mla_attention_dtype_q_{short}_dtype_kv_{short}_dtype_o_{short}_dtype_idx_i32_"
        "head_dim_ckv_512_head_dim_kpe_64_profiler_False"
    )


class FakeModules:
    """The modules of one process.

    prebuilt: names in flashinfer_jit_cache. can_compile: whether other modules can be built.
    """

    def __init__(self, prebuilt: Iterable[str] = (), can_compile: bool = False) -> None:
        self.prebuilt = set(prebuilt)
        self.can_compile = can_compile
        self.loaded: set[str] = set()
        self.compiled: set[str] = set()

    def need(self, name: str) -> None:
        """Check that the module of a called kernel is loaded."""
        demand(name in self.loaded, f"{name} is loaded before the weights")

    def need_attention(self, head_dim: int, settings: dict[str, Any]) -> None:
        """Check that the modules of a planned batch are loaded."""
        dtype, kv_dtype = settings["q_data_type"], settings["kv_data_type"]
        has_window, has_cap = settings["window_left"] >= 0, bool(settings["logits_soft_cap"])
        self.need(attention_module(dtype, kv_dtype, head_dim, has_window, has_cap))

    def need_latent(self, dtype: torch.dtype) -> None:
        """Check that the module of a planned batch of latent attention is loaded."""
        self.need(latent_module(dtype))

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Patch the library to be installed with these modules."""
        demand("flashinfer" not in sys.modules, "the real library is not imported")

        def prefill(backend: str, *args: Any) -> "FakeModule":
            dtype, kv_dtype, out_dtype, index_dtype, qk, vo, rotation, window, cap, half = args
            demand(backend == "fa2" and dtype == out_dtype and qk == vo, "one dtype and head")
            demand(index_dtype == torch.int32 and rotation == 0 and not half, "the usual kind")
            return FakeModule(self, attention_module(dtype, kv_dtype, qk, window, cap))

        def latent(backend: str, *args: Any) -> "FakeModule":
            dtype, kv_dtype, out_dtype, index_dtype, rank, rotated, profiler = args
            demand(backend == "fa2" and dtype == kv_dtype == out_dtype, "one dtype")
            demand(index_dtype == torch.int32 and not profiler, "the usual kind")
            demand((rank, rotated) == (512, 64), "the usual sizes")
            return FakeModule(self, latent_module(dtype))

        def named(name: str) -> Any:
            return lambda: FakeModule(self, name)

        made: dict[str, dict[str, Any]] = {
            "flashinfer": {},
            "flashinfer.jit": {},
            "flashinfer.jit.norm": {"gen_norm_module": named("norm")},
            "flashinfer.jit.rope": {"gen_rope_module": named("rope")},
            "flashinfer.jit.cascade": {"gen_cascade_module": named("cascade")},
            "flashinfer.jit.activation": {
                "gen_act_and_mul_module": lambda name: FakeModule(self, f"{name}_and_mul")
            },
            "flashinfer.jit.fused_moe": {
                "gen_cutlass_fused_moe_sm90_module": named("fused_moe_90")
            },
            "flashinfer.jit.gemm": {
                "gen_fp8_blockscale_gemm_sm90_module": named("fp8_blockscale_gemm_90")
            },
            "flashinfer.jit.attention": {},
            "flashinfer.jit.attention.modules": {
                "gen_batch_prefill_module": prefill,
                "gen_batch_mla_module": latent,
            },
        }
        for name, content in made.items():
            module = ModuleType(name)
            vars(module).update(content)
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
            monkeypatch.setitem(sys.modules, name, module)
        for user in (flashinfer, flashinfer_modules, flashinfer_kernels):
            monkeypatch.setattr(user, "installed_version", lambda: VERSION)


class FakeModule:
    """A JitSpec."""

    def __init__(self, modules: FakeModules, name: str) -> None:
        self._modules = modules
        self.name = name

    @property
    def is_aot(self) -> bool:
        return self.name in self._modules.prebuilt

    def build_and_load(self) -> object:
        if not self.is_aot:
            if os.environ.get("FLASHINFER_DISABLE_JIT") or not self._modules.can_compile:
                raise RuntimeError("Ninja build failed. Ninja output:\nnvcc: not found")
            self._modules.compiled.add(self.name)
        self._modules.loaded.add(self.name)
        return self
