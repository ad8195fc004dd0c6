"""Mixtures of experts: where their weights are in files, and the errors about them."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import numbers, random_rows, write
from tests.fakes.prepared_models import gguf_index, prepare, prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from tests.fakes.tiny_ggufs import SIZES, config_of, tiny
from worker.cpu import moe as kernel_moe
from worker.cpu.formats import Bf16Format, Int8Format, MixedFormat, PackedFormat, RotatedFormat
from worker.cpu.kernels import load_kernels
from worker.cpu.moe import KernelMoe
from worker.host.memory_nodes import MemoryPlacement
from worker.layers.router import Router, RouterSpec
from worker.layers.scratch import ByteBuffer
from worker.loader.files import TensorFiles
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model
from worker.models.layer_stack import EagerLayers
from worker.models.moe import MoeMlp

Tensors = dict[str, torch.Tensor]
TOKENS = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(7))
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 256,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "first_k_dense_replace": 1,
}
GGUF_CONFIGS: dict[str, PretrainedConfig] = {
    "deepseek2": DeepseekV2Config(**LATENT, topk_method="group_limited_greedy"),
    "deepseek3": DeepseekV3Config(**LATENT, num_mtp_layers=0),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2moe": Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=512,
    ),
    "olmoe": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "granitemoe": GraniteMoeConfig(
        **SIZES, num_local_experts=4, residual_multiplier=0.3, attention_multiplier=0.1
    ),
    "glm4moe": Glm4MoeConfig(
        **SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "gptoss": GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=64, sliding_window=9
    ),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=256
    ),
}


def logits(prepared: PreparedModel, weight_format: WeightFormat | None = None) -> torch.Tensor:
    spec = spec_of(prepared)
    decoder = load_model(prepared, spec, torch.float32, CPU, lambda fraction: None, weight_format)
    attention = DenseAttention(spec)
    return decoder.float32_logits(decoder.forward(TOKENS, torch.arange(30), attention))


def changed(name: str, folder: Path, change: Callable[[Tensors], None]) -> PreparedModel:
    """Save the tiny checkpoint `name`, then change its tensors."""
    save_tiny(name, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({key: value.clone() for key, value in tensors.items()}, path)
    return prepare_checkpoint(folder, folder / "prepared")


def stack_experts(tensors: Tensors) -> None:
    """Store the experts of every layer as transformers has them in memory."""
    layers = sorted({key.split(".mlp.experts.")[0] for key in tensors if ".experts." in key})
    for layer in layers:
        names = [f"{layer}.mlp.experts.{number}" for number in range(6)]

        def stack(part: str, names: list[str] = names) -> torch.Tensor:
            return torch.stack([tensors.pop(f"{name}.{part}_proj.weight") for name in names])

        tensors[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), 1)
        tensors[f"{layer}.mlp.experts.down_proj"] = stack("down")


def test_stacked_experts_equal_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    apart = logits(changed("qwen3moe", tmp_path, lambda tensors: None))
    stacked = changed("qwen3moe", tmp_path, stack_experts)
    assert len(load_file(tmp_path / "model.safetensors")) < 40
    assert torch.equal(logits(stacked), apart)


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("name", GGUF_CONFIGS)
def test_a_gguf_file_of_stacked_experts(name: str, kind: str, tmp_path: Path) -> None:
    config = GGUF_CONFIGS[name]
    with torch.no_grad():
        # Rows of 64 numbers, as those of attn_k_b, are too short for blocks of 256.
        kinds = {"kv_b": "Q8_0"} if kind == "Q4_K" else {}
        model, tensors = tiny(kind, config, name in ("mixtral", "granitemoe"), kinds)
        expected = model(TOKENS[None]).logits[0]
    assert "blk.1.ffn_gate_exps.weight" in tensors
    write(tmp_path / "model.gguf", tensors)
    prepared = prepare(
        tmp_path / "prepared", config_of(config), gguf_index(tmp_path / "model.gguf")
    )
    assert expected.std() > 0.3, "a difference would not be visible"
    assert (logits(prepared) - expected).abs().max() < 1e-4
    if kind == "Q4_K":
        dense = DenseFormat(torch.float32)
        blocks = PackedFormat(load_kernels(), dense, torch.float32)
        error = (logits(prepared, blocks) - expected).abs().mean()
        assert error < 0.02 * expected.std(), "activations are rounded to 8 bits"
        assert not blocks.dense_names


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_an_older_gguf_file_of_latent_attention(kind: str, tmp_path: Path) -> None:
    """The weights of keys and values are one tensor, and those of keys transposed."""
    config = GGUF_CONFIGS["deepseek3"]
    with torch.no_grad():
        model, tensors = tiny("F32", config, permuted=False)
        for layer, state in enumerate(model.model.layers):
            both = state.self_attn.kv_b_proj.weight
            rows = random_rows(kind, *both.shape, seed=layer)
            both.copy_(torch.from_numpy(numbers(kind, rows)))
            for name in ("k_b", "v_b"):
                del tensors[f"blk.{layer}.attn_{name}.weight"]
            tensors[f"blk.{layer}.attn_kv_b.weight"] = (kind, rows)
        expected = model(TOKENS[None]).logits[0]
    write(tmp_path / "model.gguf", tensors)
    prepared = prepare(
        tmp_path / "prepared", config_of(config), gguf_index(tmp_path / "model.gguf")
    )
    assert (logits(prepared) - expected).abs().max() < 1e-4
    if kind == "Q8_0":
        blocks = PackedFormat(load_kernels(), DenseFormat(torch.float32), torch.float32)
        error = (logits(prepared, blocks) - expected).abs().mean()
        assert error < 0.02 * expected.std(), "activations are rounded to 8 bits"


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.__delitem__(name)


def drop_expert_of_stack(tensors: Tensors) -> None:
    stack_experts(tensors)
    name = "model.layers.2.mlp.experts.down_proj"
    tensors[name] = tensors[name][:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            drop("model.layers.2.mlp.experts.3.down_proj.weight"),
            r"tensor model\.layers\.2\.mlp\.experts\.3\.down_proj\.weight of shape \[64, 64\] is m",
        ),
        (
            drop("model.layers.0.mlp.gate.weight"),
            r"tensor model\.layers\.0\.mlp\.gate\.weight of shape \[6, 64\] is missing",
        ),
        (
            drop_expert_of_stack,
            r"down_proj has shape \[5, 64, 64\], the configuration asks for \[6, 64, 64\]",
        ),
        (
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.experts.6.up_proj.weight": tensors["lm_head.weight"]}
            ),
            r"tensor model\.layers\.0\.mlp\.experts\.6\.up_proj\.weight is no part of Qwen3Moe",
        ),
    ],
)
def test_missing_and_surplus_experts_are_named(
    change: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        logits(changed("qwen3moe", tmp_path, change))


GATE, DOWN = "blk.1.ffn_gate_exps.weight", "blk.0.ffn_down_exps.weight"


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (
            drop(DOWN),
            {},
            f"tensor blk.0.ffn_down.0.weight of shape [256, 256] is missing, and so is {DOWN}",
        ),
        (
            lambda tensors: tensors.update({GATE: (tensors[GATE][0], tensors[GATE][1][:-1])}),
            {},
            f"tensor {GATE} has shape [4, 256, 256], the configuration asks for [5, 256, 256]",
        ),
        (
            lambda tensors: None,
            {"num_experts": 6},
            "tensor blk.0.ffn_gate_inp.weight has shape [5, 256], the configuration asks for "
            "[6, 256]",
        ),
        (
            lambda tensors: None,
            {"moe_intermediate_size": 128},
            "tensor blk.0.ffn_gate_exps.weight has shape [5, 256, 256], the configuration asks for "
            "[5, 128, 256]",
        ),
    ],
    ids=["missing stack", "stack of fewer experts", "other number of experts", "other size"],
)
@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
def test_what_is_wrong_with_the_stacks_of_a_gguf_file_is_named_before_a_weight_is_read(
    kind: str,
    change: Callable[[Any], None],
    settings: dict[str, int],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """settings: those of the metadata that differ from the tensors."""
    config = GGUF_CONFIGS["qwen3moe"]
    with torch.no_grad():
        _, tensors = tiny(kind, config, permuted=False)
    change(tensors)
    write(tmp_path / "model.gguf", tensors)
    prepared = prepare(
        tmp_path / "prepared", config_of(config) | settings, gguf_index(tmp_path / "model.gguf")
    )

    def refuse(*arguments: object) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(TensorFiles, "bytes_at", refuse)
    with pytest.raises(ModelError, match=re.escape(message)):
        logits(prepared)


@pytest.mark.parametrize(
    ("fields", "bias"),
    [
        ({"num_groups": 4, "top_groups": 2, "best_of_group": 1}, False),
        ({"num_groups": 4, "top_groups": 2, "scoring": "sigmoid", "scale": 2.5}, True),
        ({"scoring": "sigmoid", "normalised": False}, True),
        ({"num_groups": 2, "top_groups": 1}, False),
    ],
)
def test_the_router_chooses_within_the_best_groups(fields: dict[str, Any], bias: bool) -> None:
    spec = RouterSpec(num_experts=16, top_k=3, selection_bias=bias, **fields)
    generator = torch.Generator().manual_seed(2)
    weight, x = (torch.randn(shape, generator=generator) for shape in ((16, 8), (50, 8)))
    added = torch.randn(16, generator=generator) if bias else None
    weights, chosen = Router(spec, weight, None, added)(x)
    for row, (found, experts) in enumerate(zip(weights, chosen, strict=True)):
        logits = weight @ x[row]
        scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(0)
        choice = scores if added is None else scores + added
        groups = [
            choice[first : first + 16 // spec.num_groups]
            for first in range(0, 16, 16 // spec.num_groups)
        ]
        ranks = [sum(sorted(group.tolist())[-spec.best_of_group :]) for group in groups]
        best = sorted(range(spec.num_groups), key=lambda group: -ranks[group])[: spec.top_groups]
        allowed = [each for each in range(16) if each * spec.num_groups // 16 in best]
        wanted = sorted(allowed, key=lambda each: -choice[each])[:3]
        assert sorted(experts.tolist()) == sorted(wanted)
        expected = scores[experts] / (scores[experts].sum() if spec.normalised else 1)
        assert torch.allclose(found, expected * spec.scale)


def mixture_in(form: str, dtype: torch.dtype, folder: Path) -> MoeMlp:
    """Return the mixture of a layer of the tiny Qwen2-MoE in a format of the kernels."""
    save_tiny("qwen2moe", folder)
    prepared = prepare_checkpoint(folder, folder / "prepared")
    kernels = load_kernels()
    dense = Bf16Format(kernels) if dtype == torch.bfloat16 else DenseFormat(dtype)
    blocks = Int8Format(kernels, dense, dtype)
    formats: dict[str, WeightFormat] = {
        "bf16": Bf16Format(kernels),
        "blocks": blocks,
        "rotated": RotatedFormat(blocks, dense, kernels),
        "mixed": MixedFormat(blocks, kernels),
    }
    decoder = load_model(
        prepared, spec_of(prepared), dtype, CPU, lambda fraction: None, formats[form]
    )
    eager = decoder._stacks[-1]
    assert isinstance(eager, EagerLayers)
    mlp = eager.layers[1].mlp
    assert isinstance(mlp, MoeMlp)
    return mlp


def in_torch(mlp: MoeMlp, x: torch.Tensor) -> torch.Tensor:
    return mlp._mix(x)


def run(mlp: MoeMlp, x: torch.Tensor) -> torch.Tensor:
    assert mlp.fused is not None
    assert mlp.fused.takes(len(x))
    output = torch.full_like(x, torch.nan)
    mlp.fused.run(x, output, adds=False, memory=ByteBuffer())
    return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["bf16", "blocks", "rotated", "mixed"])
def test_the_kernel_computes_what_torch_computes(
    form: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    mlp = mixture_in(form, dtype, tmp_path)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(4)).to(dtype)
    for rows in (1, 2, 9, 70):
        wanted = in_torch(mlp, x[:rows])
        error = (run(mlp, x[:rows]).float() - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


ROUTERS = (
    RouterSpec(num_experts=6, top_k=2, num_groups=3, top_groups=1, best_of_group=1),
    RouterSpec(num_experts=6, top_k=2, scoring="sigmoid", scale=2.5, selection_bias=True),
    RouterSpec(num_experts=6, top_k=3, num_groups=3, top_groups=2, bias=True),
    RouterSpec(num_experts=6, top_k=6, normalised=False),
)


@pytest.mark.parametrize("spec", ROUTERS)
def test_routers_of_every_kind_in_the_kernel(spec: RouterSpec, tmp_path: Path) -> None:
    mlp = mixture_in("blocks", torch.float32, tmp_path)
    generator = torch.Generator().manual_seed(8)
    biases = [torch.randn(6, generator=generator) for _ in range(2)]
    router = Router(
        spec,
        mlp.mixture.router.weight,
        biases[0] if spec.bias else None,
        biases[1] if spec.selection_bias else None,
    )
    mixture = replace(mlp.mixture, router=router, spec=replace(mlp.mixture.spec, router=spec))
    mlp = MoeMlp(mixture, mlp.output, mlp._gate, CPU.fused_mixture(mixture))
    x = torch.randn(33, 64, generator=generator)
    wanted = in_torch(mlp, x)
    assert (run(mlp, x) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("form", ["bf16", "blocks", "rotated"])
def test_a_row_of_the_kernel_is_the_same_in_any_batch(form: str, tmp_path: Path) -> None:
    mlp = mixture_in(form, torch.bfloat16, tmp_path)
    x = torch.randn(70, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    x[3] = torch.nan
    threads = torch.get_num_threads()
    wanted = run(mlp, x)
    try:
        for count, first, last in ((1, 0, 1), (2, 0, 1), (3, 5, 38), (8, 0, 70), (16, 69, 70)):
            torch.set_num_threads(count)
            assert torch.equal(run(mlp, x[first:last])[-1], wanted[last - 1])
    finally:
        torch.set_num_threads(threads)
    assert wanted[3].isnan().all()
    assert wanted[:3].isfinite().all()
    assert wanted[4:].isfinite().all()


@pytest.mark.parametrize("by_thread", [(0, 1, 1), (0, 0, 1, 1, 1), (0, 1)])
def test_threads_of_memory_nodes_compute_all_of_each_expert(
    by_thread: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same bits; a team of another size than the groups shares everything."""
    mlp = mixture_in("blocks", torch.float32, tmp_path)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(6))
    wanted = run(mlp, x)
    placement = MemoryPlacement(by_thread, (0, 1))
    monkeypatch.setattr(kernel_moe, "memory_placement", lambda: placement)
    mlp.fused = CPU.fused_mixture(mlp.mixture)
    assert isinstance(mlp.fused, KernelMoe)
    assert mlp.fused.description(1).structure.num_thread_groups == 2
    threads = torch.get_num_threads()
    try:
        for count in (len(by_thread), 4):
            torch.set_num_threads(count)
            assert torch.equal(run(mlp, x), wanted)
    finally:
        torch.set_num_threads(threads)
