"""gpt-oss: experts in MXFP4, from folders and GGUF files, and the errors about its files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import write
from tests.fakes.prepared_models import gguf_index, prepare, prepare_checkpoint, spec_of
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_checkpoints import CONFIGS, save_mxfp4, save_tiny, tiny_model
from tests.fakes.tiny_ggufs import SIZES, config_of, tiny
from worker.cpu.formats import Bf16Format, PackedFormat, part_in_blocks
from worker.cpu.kernels import Kernels
from worker.loader.digest import hash_tensors
from worker.loader.files import read_index
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec
from worker.parallel.group import RankGroup

Tensors = dict[str, torch.Tensor]
TOKENS = torch.randint(0, 64, (30,), generator=torch.Generator().manual_seed(7))
ALONE = RankGroup()
SMALL: dict[str, Any] = CONFIGS["gptoss"].to_dict() | {
    "num_hidden_layers": 2,
    "layer_types": None,
}
EXPERTS = "model.layers.1.mlp.experts"
BOTH = ("blocks", "scales")


def logits(
    prepared: PreparedModel,
    weight_format: WeightFormat | None = None,
    spec: ModelSpec | None = None,
    group: RankGroup = ALONE,
) -> torch.Tensor:
    spec = spec or spec_of(prepared)
    dtype = torch.float32
    decoder = load_model(prepared, spec, dtype, CPU, lambda fraction: None, weight_format, group)
    attention = DenseAttention(decoder.spec)
    chunks = ((TOKENS[:17], torch.arange(17)), (TOKENS[17:], torch.arange(17, 30)))
    hidden = [decoder.forward(*chunk, attention) for chunk in chunks]
    return decoder.float32_logits(torch.cat(hidden))


@torch.no_grad()
def mxfp4_folder(folder: Path) -> tuple[PreparedModel, torch.Tensor]:
    """Save a tiny checkpoint; also return the logits of transformers with the same numbers."""
    model = tiny_model(GptOssConfig(**SMALL))
    save_mxfp4(model, folder)
    return prepare_checkpoint(folder, folder / "prepared"), model(TOKENS[None]).logits[0]


def test_a_folder_of_mxfp4_equals_its_numbers(tmp_path: Path, kernels: Kernels) -> None:
    prepared, expected = mxfp4_folder(tmp_path)
    assert expected.std() > 0.5, "a difference would not be visible"
    assert (logits(prepared) - expected).abs().max() < 1e-4
    dense = DenseFormat(torch.float32)
    blocks = PackedFormat(kernels, dense, torch.float32)
    found = logits(prepared, blocks)
    assert (found - expected).abs().mean() < 0.03 * expected.std(), "8 bits of activations"
    sizes = 2 * 6 * (3 * 64 * 96) // 32 * 17
    assert blocks.memory["packed"] == sizes
    assert not any("experts" in name for name in blocks.dense_names)
    bf16 = logits(prepared, Bf16Format(kernels))
    assert (bf16 - expected).abs().mean() < 0.03 * expected.std()


@pytest.mark.parametrize("is_expert_parallel", [False, True])
def test_ranks_share_experts_in_mxfp4(
    is_expert_parallel: bool, tmp_path: Path, kernels: Kernels
) -> None:
    prepared, expected = mxfp4_folder(tmp_path)
    spec = spec_of(prepared)
    if is_expert_parallel:
        spec = spec.with_expert_parallel()

    def blocks() -> PackedFormat:
        return PackedFormat(kernels, DenseFormat(torch.float32), torch.float32)

    with Ranks(2) as ranks:
        forms = [blocks() for _ in ranks.groups]
        found = ranks.run_on_all(
            lambda rank: logits(prepared, forms[rank], spec, ranks.groups[rank])
        )
    assert (found[0] - expected).abs().mean() < 0.03 * expected.std()
    assert torch.equal(*found)
    assert not any("experts" in name for form in forms for name in form.dense_names)
    with Ranks(2) as ranks:
        dense = ranks.run_on_all(lambda rank: logits(prepared, None, spec, ranks.groups[rank]))
    assert (dense[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["F32", "BF16"])
def test_a_gguf_file_of_mxfp4(kind: str, tmp_path: Path, kernels: Kernels) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": False}
    config = GptOssConfig(**SIZES | SMALL | sizes)
    with torch.no_grad():
        model, tensors = tiny(kind, config, permuted=False, kinds={"experts": "MXFP4"})
        expected = model(TOKENS[None]).logits[0]
    assert tensors["blk.0.ffn_gate_exps.weight"][0] == "MXFP4"
    write(tmp_path / "model.gguf", tensors)
    prepared = prepare(
        tmp_path / "prepared", config_of(config), gguf_index(tmp_path / "model.gguf")
    )
    assert expected.std() > 0.1, "a difference would not be visible"
    assert (logits(prepared) - expected).abs().max() < 1e-4
    blocks = PackedFormat(kernels, DenseFormat(torch.float32), torch.float32)
    assert (logits(prepared, blocks) - expected).abs().mean() < 0.03 * expected.std()
    assert blocks.memory["packed"] == 2 * 6 * (3 * 64 * 96) // 32 * 17


def test_scales_belong_to_the_weights(tmp_path: Path) -> None:
    """They count in the digest of the weights, and the model counts as quantised."""
    prepared, _ = mxfp4_folder(tmp_path)
    index = read_index(prepared)
    assert part_in_blocks(index) > 0.3
    before = hash_tensors(index)
    change(tmp_path, lambda tensors: tensors[f"{EXPERTS}.down_proj_scales"].add_(1))
    assert hash_tensors(index) != before


def change(folder: Path, how: Callable[[Tensors], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    how(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_scales"),
            r"down_proj_blocks has no model\.layers\.1\.mlp\.experts\.down_proj_scales beside it",
        ),
        (
            lambda tensors: tensors.update(
                {f"{EXPERTS}.down_proj_scales": tensors[f"{EXPERTS}.down_proj_scales"][:, 1:]}
            ),
            r"down_proj do not fit: they are not MXFP4 .*down_proj_scales U8 \[6, 63, 3\]",
        ),
        (
            lambda tensors: [tensors.pop(f"{EXPERTS}.down_proj_{of}") for of in BOTH],
            r"tensor model\.layers\.1\.mlp\.experts\.down_proj of shape \[6, 96, 64\] is missing",
        ),
        (
            lambda tensors: tensors.update(
                {
                    f"{EXPERTS}.down_proj_{of}": tensors[f"{EXPERTS}.down_proj_{of}"][:5]
                    for of in BOTH
                }
            ),
            r"down_proj has shape \[5, 64, 96\], the configuration asks for \[6, 64, 96\]",
        ),
        (
            lambda tensors: tensors.pop(f"{EXPERTS}.gate_up_proj_bias"),
            r"tensor model\.layers\.1\.mlp\.experts\.gate_up_proj_bias of shape \[6, 192\] is m",
        ),
        (
            lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"),
            r"tensor model\.layers\.0\.self_attn\.sinks of shape \[4\] is missing",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    how: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    mxfp4_folder(tmp_path)
    change(tmp_path, how)
    with pytest.raises(ModelError, match=message):
        logits(prepare_checkpoint(tmp_path, tmp_path / "prepared"))


def test_dense_experts_of_another_size_are_named(tmp_path: Path) -> None:
    """Folders have the transpose of dense experts."""
    save_tiny("gptoss", tmp_path)
    name = f"{EXPERTS}.gate_up_proj"
    change(tmp_path, lambda tensors: tensors.update({name: tensors[name].transpose(1, 2)}))
    message = r"gate_up_proj has shape \[6, 192, 64\], the configuration asks for \[6, 64, 192\]"
    with pytest.raises(ModelError, match=message):
        logits(prepare_checkpoint(tmp_path, tmp_path / "prepared"))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"swiglu_limit": 5.0}, "swiglu_limit = 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha = 1.0"),
        ({"experts_per_token": 3}, "experts_per_token = 3"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
        ({"rope_parameters": None}, "rope_scaling = None"),
        ({"layer_types": ["full_attention"]}, "layer_types = ['full_attention']"),
        ({"sliding_window": 0}, "sliding_window = 0"),
    ],
)
def test_settings_that_are_not_supported_are_named(keys: dict[str, Any], named: str) -> None:
    config = config_of(CONFIGS["gptoss"])
    spec_from_config(config)
    with pytest.raises(ModelError) as caught:
        spec_from_config(config | keys)
    assert named in str(caught.value)
