"""FlashInfer's modules are loaded before the weights; a failure is an error of one line."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from proto.errors import ConfigError
from proto.settings.config import DeviceConfig, ServeConfig
from tests.fakes.cuda_runner import Model, OnFakeCuda, compute_by_torch
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.fake_flashinfer_modules import FakeModules, attention_module, latent_module
from tests.fakes.fake_paged_wrapper import ContractError
from tests.fakes.gpu_families import GPU_CONFIGS
from tests.fakes.simulated_gpu import device_of
from worker import loaded_model
from worker.cuda import device as cuda_device
from worker.cuda import flashinfer_modules
from worker.cuda.attention import flashinfer
from worker.cuda.build_flashinfer import parser
from worker.cuda.flashinfer_modules import build_command, load_modules, why_not_compiled
from worker.cuda.layers.flashinfer_kernels import import_flashinfer
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec
from worker.parallel.group import RankGroup

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn
ROWS = {"norm", "silu_and_mul", "rope"}
FULL = attention_module(BF16, BF16, 64, False, False)
WINDOW = attention_module(BF16, BF16, 64, True, False)


def spec_of(**changed: Any) -> ModelSpec:
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "sliding_window": None,
    }
    return spec_from_config(config | changed)


LATENT = spec_from_config(GPU_CONFIGS["deepseek3"])


def load(
    spec: ModelSpec,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype = BF16,
    fp8_blocks: bool = False,
    **settings: Any,
) -> list[float]:
    progress: list[float] = []
    config = DeviceConfig(**settings)
    load_modules(config, spec, dtype, kv_dtype, progress.append, fp8_blocks=fp8_blocks)
    return progress


@pytest.mark.parametrize(
    ("spec", "kv_dtype", "settings", "needed"),
    [
        (spec_of(), BF16, {}, ROWS | {FULL}),
        (spec_of(sliding_window=7), BF16, {}, ROWS | {WINDOW}),
        (spec_of(), FP8, {}, ROWS | {attention_module(BF16, FP8, 64, False, False)}),
        (spec_of(), BF16, {"cascade_attention_from": 4}, ROWS | {FULL, "cascade"}),
        (spec_of(head_dim=96), BF16, {}, ROWS - {"rope"}),
        (LATENT, BF16, {}, ROWS | {latent_module(BF16)}),
        (spec_of(), BF16, {"fp8_blocks": True}, ROWS | {FULL, "fp8_blockscale_gemm_90"}),
    ],
    ids=["plain", "window", "fp8", "cascade", "no such heads", "latents", "blocks"],
)
def test_the_modules_of_a_configuration_are_loaded(
    spec: ModelSpec,
    kv_dtype: torch.dtype,
    settings: dict[str, Any],
    needed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = FakeModules(prebuilt=needed)
    modules.install(monkeypatch)
    monkeypatch.setattr(flashinfer_modules, "is_hopper", lambda device: False)
    assert load(spec, kv_dtype=kv_dtype, **settings)[-1] == 1.0
    assert modules.loaded == needed
    assert not modules.compiled


def test_the_error_without_a_compiler_names_the_build_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    modules = FakeModules(prebuilt={"norm", "rope"})
    modules.install(monkeypatch)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    spec = spec_of(sliding_window=7)
    with pytest.raises(ConfigError, match=rf"no {tmp_path}/bin/nvcc") as raised:
        load(spec, kv_dtype=FP8)
    message = str(raised.value)
    assert "\n" not in message
    assert "silu_and_mul, batch_prefill" in message
    assert "flashinfer-jit-cache 0.6.18.post1" in message
    command = "worker.cuda.build_flashinfer FOLDER --dtype bfloat16 --head-dims 64 --windows --fp8"
    assert command in message
    assert not modules.loaded
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")
    assert why_not_compiled() == "FLASHINFER_DISABLE_JIT is set"


def test_the_named_build_command_is_valid() -> None:
    command = build_command(
        DeviceConfig(cascade_attention_from=4), spec_of(sliding_window=7), torch.float16, FP8
    )
    options = parser().parse_args(command.split()[3:])
    assert (options.dtype, options.head_dims) == ("float16", [64])
    assert options.windows
    assert options.fp8
    assert options.cascade
    assert options.rows
    command = build_command(DeviceConfig(), LATENT, torch.float16, torch.float16, True)
    options = parser().parse_args(command.split()[3:])
    assert (options.dtype, options.head_dims) == ("float16", [])
    assert options.latent
    assert options.fp8_blocks


def test_missing_modules_are_compiled_if_a_compiler_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = FakeModules(prebuilt=ROWS, can_compile=True)
    modules.install(monkeypatch)
    monkeypatch.setattr(flashinfer_modules, "why_not_compiled", lambda: None)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    load(spec_of())
    assert modules.compiled == {FULL}
    modules.can_compile = False
    with pytest.raises(ConfigError, match="do not load: Ninja build failed") as raised:
        load(spec_of(sliding_window=7))
    assert "\n" not in str(raised.value)


def test_without_the_library_only_its_backend_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flashinfer_modules, flashinfer):
        monkeypatch.setattr(module, "installed_version", lambda: None)
    assert load(spec_of()) == []
    with pytest.raises(ConfigError, match=r"pip install .*flashinfer-python"):
        load(spec_of(), attention_backend="flashinfer")


def test_the_fake_refuses_a_step_without_its_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The loaded modules suffice for steps and graphs; without one of them the fake refuses."""
    compute_by_torch(monkeypatch)
    model = Model("llama", tmp_path)
    modules = FakeModules(prebuilt=ROWS | {FULL})
    modules.install(monkeypatch)
    load(model.spec)
    with FakeCuda() as cuda:
        library = FakeFlashInfer(cuda.device, modules)
        monkeypatch.setattr(cuda_device, "usable_flashinfer", lambda: library)
        OnFakeCuda(model, cuda, 1, library=library)
        for missing in sorted(modules.loaded):
            modules.loaded.remove(missing)
            with pytest.raises(ContractError, match=f"{missing} is loaded before the weights"):
                OnFakeCuda(model, cuda, 1, library=library)
            modules.loaded.add(missing)


def test_modules_are_loaded_before_the_weights(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker without its modules reads no weights."""
    model = Model("llama", tmp_path)
    FakeModules().install(monkeypatch)
    monkeypatch.setenv("FLASHINFER_DISABLE_JIT", "1")

    def load_model(*_: object) -> None:
        raise AssertionError("weights are loaded first")

    monkeypatch.setattr(loaded_model, "load_model", load_model)
    with pytest.raises(ConfigError, match="FLASHINFER_DISABLE_JIT is set"):
        loaded_model.load(
            ServeConfig(), model.prepared, device_of(70 << 30), RankGroup(), lambda message: None
        )


def test_nothing_is_compiled_in_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library reads the environment only while it is imported."""
    (tmp_path / "flashinfer.py").write_text(
        "import os\n"
        "if os.environ.get('FLASHINFER_USE_CUDA_NORM') != '1':\n"
        "    raise RuntimeError('norms would go through the CuTe compiler')\n"
        "assert os.environ['TRTLLM_DG_ENABLED'] == '0', 'DeepGEMM compiles each shape'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FLASHINFER_USE_CUDA_NORM", "0")
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    with pytest.raises(RuntimeError, match="CuTe"):
        importlib.import_module("flashinfer")
    try:
        assert import_flashinfer().__file__ == str(tmp_path / "flashinfer.py")
    finally:
        sys.modules.pop("flashinfer", None)
