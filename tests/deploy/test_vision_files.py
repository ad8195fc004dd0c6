"""Prepared folders of models that read images, and of those whose vision part is left out."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.models import hf_folder, wrapped_model
from deploy.models.prepared_folder import ModelContents
from deploy.models.vision_files import read_vision
from proto.errors import ModelError
from proto.messages.prepared_model import VISION_PREFIX, TensorEntry, VisionFacts
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import spec_of
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from tests.fakes.tiny_vision import (
    GRIDS,
    IMAGE_ID,
    VISION_MODELS,
    prepare_vision_model,
    read_vision_model,
    save_vision_model,
)
from tests.fakes.tiny_wrapped import rename_tensors
from tests.worker.models.test_transformers_model import assert_same_tokens, load_index
from worker.loader.digest import weights_digest
from worker.loader.files import read_index, read_vision_index, read_whole_index
from worker.loader.vision import load_vision
from worker.loader.weights import load_model
from worker.models.vision import vision_spec


def read(folder: Path) -> ModelContents:
    return hf_folder.read(str(folder), lambda what: None)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON object in a file."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", VISION_MODELS)
def test_the_prepared_folder(name: str, tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "prepared"
    save_vision_model(name, source)
    prepared = prepare_vision_model(source, folder)
    described = VISION_MODELS[name]
    tiles = 5 if "Idefics3Processor" in described.processor else 1
    assert prepared.vision == VisionFacts(
        architecture=described.architecture,
        image_token_id=IMAGE_ID,
        max_embeds=tiles * described.embeds,
        is_bidirectional=name == "gemma3",
        mrope_merge=2 if name in GRIDS else 0,
    )
    assert prepared.unloaded_parts == ()
    assert prepared.text_only_notice == ""
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")
    assert config["vision_config"]["patch_size"] == 4
    assert config["vision_config"]["hidden_act"]
    images = json.loads((folder / "preprocessor_config.json").read_text())
    assert images["image_processor_type"] == type(described.image_processor).__name__.removesuffix(
        "Pil"
    )
    processor = json.loads((folder / "processor_config.json").read_text())
    assert processor["processor_class"] == described.processor
    whole, text, vision = (
        {entry.name for entry in read_part(prepared).tensors}
        for read_part in (read_whole_index, read_index, read_vision_index)
    )
    assert whole == text | vision
    assert vision == {each for each in whole if each.startswith(VISION_PREFIX)} != set()
    load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)


def test_images_of_any_size_have_at_most_the_tokens_of_a_request(tmp_path: Path) -> None:
    for name, most in (("qwen2_5_vl", 30), ("idefics3", 45)):
        save_vision_model(name, tmp_path / name)
        prepared = prepare_vision_model(tmp_path / name, tmp_path / f"{name} prepared")
        assert prepared.served_with(1, None) == prepared.served_with(1, 100) == prepared
        shorter = prepared.served_with(1, 30)
        assert shorter.vision is not None
        assert shorter.vision.max_embeds == most
        assert load_vision(shorter, torch.float32, CPU).max_embeds == most
        assert prepared.served_with(0, 30).vision is None


GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "image_token_index": 262144,
    "mm_tokens_per_image": 256,
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34},
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32000,
    "projector_hidden_act": "gelu",
    "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
SIGLIP_384: dict[str, Any] = LLAVA_1_5 | {
    "text_config": {"model_type": "qwen2", "vocab_size": 152000},
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 384,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 26,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
"""As LLaVA-Interleave: the last pixels of a side are no whole patch."""
SMOLVLM_256M: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": 49190,
    "scale_factor": 4,
    "text_config": {"hidden_size": 576, "model_type": "llama", "vocab_size": 49280},
    "vision_config": {
        "hidden_size": 768,
        "image_size": 512,
        "max_image_size": {"longest_edge": 512},
        "model_type": "idefics3",
        "num_attention_heads": 12,
        "patch_size": 16,
        "size": {"longest_edge": 2048},
    },
}
IDEFICS3_8B: dict[str, Any] = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "model_type": "idefics3",
    "image_token_id": 128257,
    "scale_factor": 2,
    "text_config": {"hidden_size": 4096, "model_type": "llama", "vocab_size": 128259},
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 364,
        "intermediate_size": 4304,
        "model_type": "idefics3",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}


QWEN2_5_VL_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "image_token_id": 151655,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
    "rope_theta": 1000000.0,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
    "vocab_size": 152064,
}
QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": {
        "head_dim": 128,
        "hidden_size": 4096,
        "model_type": "qwen3_vl_text",
        "num_hidden_layers": 36,
        "rope_scaling": {
            "mrope_interleaved": True,
            "mrope_section": [24, 20, 20],
            "rope_type": "default",
        },
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "model_type": "qwen3_vl",
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
PIXTRAL_12B: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 10,
    "projector_hidden_act": "gelu",
    "text_config": {
        "head_dim": 128,
        "hidden_size": 5120,
        "intermediate_size": 14336,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "vocab_size": 131072,
    },
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
MISTRAL_SMALL_3_1: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "model_type": "mistral",
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-05,
        "vocab_size": 131072,
    },
    "vision_config": {
        "attention_dropout": 0.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10000.0,
    },
    "vision_feature_layer": -1,
}


@pytest.mark.parametrize(
    ("config", "images", "embeds", "numbers"),
    [
        (GEMMA3_4B, {"size": {"height": 896, "width": 896}}, 256, 420),
        (LLAVA_1_5, {"crop_size": {"height": 336, "width": 336}}, 576, 312),
        (SIGLIP_384, {"size": {"height": 384, "width": 384}}, 729, 419),
        (
            SMOLVLM_256M,
            {"max_image_size": {"longest_edge": 512}, "size": {"longest_edge": 2048}},
            1088,
            94,
        ),
        (
            IDEFICS3_8B,
            {"max_image_size": {"longest_edge": 364}, "size": {"longest_edge": 1456}},
            2873,
            432,
        ),
        (QWEN2_5_VL_7B, {"min_pixels": 3136, "max_pixels": 12845056}, 16384, 677),
        (
            QWEN3_VL_8B,
            {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16},
            16384,
            576,
        ),
        (PIXTRAL_12B, {"size": {"longest_edge": 1024}}, 4096, 435),
        (MISTRAL_SMALL_3_1, {"size": {"longest_edge": 1540}}, 3025, 439),
    ],
)
def test_published_configurations(
    config: dict[str, Any], images: dict[str, Any], embeds: int, numbers: int
) -> None:
    """numbers: of the weights that are read, in millions."""
    wrapped = wrapped_model.find(config)
    assert wrapped is not None
    entry = TensorEntry("vision_tower.post_layernorm.bias", "F32", (1,), 0, 0, 4)
    found = read_vision(wrapped.architecture, wrapped.outer, wrapped.config, [entry], images, {})
    assert found is not None
    assert found.facts.max_embeds == embeds
    spec = vision_spec(wrapped.architecture, {**wrapped.config, **found.settings}, images)
    assert round(spec.weight_bytes(1) / 1e6) == numbers


def vision_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    tensors = read(folder).tensors.tensors
    return {each.name: each.shape for each in tensors if each.name.startswith(VISION_PREFIX)}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("llava", "vision_tower.", "vision_tower.vision_model."),
        ("llava", "vision_tower.", "model.vision_tower."),
        ("llava", "multi_modal_projector.", "model.multi_modal_projector."),
        ("gemma3", "vision_tower.", "vision_tower.vision_model."),
        ("gemma3", "multi_modal_projector.", "model.multi_modal_projector."),
        ("idefics3", "model.vision_model.", "vision_model."),
        ("smolvlm", "model.connector.", "connector."),
        ("qwen2_5_vl", "model.visual.", "visual."),
        ("pixtral", "vision_tower.", "model.vision_tower."),
        ("mistral3", "model.multi_modal_projector.", "multi_modal_projector."),
    ],
)
def test_names_of_other_versions(name: str, old: str, new: str, tmp_path: Path) -> None:
    save_vision_model(name, tmp_path)
    expected = vision_tensors(tmp_path)
    rename_tensors(tmp_path, lambda each: new + each[len(old) :] if each.startswith(old) else each)
    assert vision_tensors(tmp_path) == expected


@pytest.mark.parametrize("nested", [False, True])
def test_settings_of_the_image_processor(nested: bool, tmp_path: Path) -> None:
    """As in transformers, those in processor_config.json count if there are any."""
    save_vision_model("gemma3", tmp_path)
    edit(tmp_path / "preprocessor_config.json", lambda each: each.update(image_mean=[0.1] * 3))
    if not nested:
        edit(tmp_path / "processor_config.json", lambda each: each.pop("image_processor"))
    images = json.loads(read(tmp_path).files["preprocessor_config.json"])
    assert images["image_mean"] == ([0.5] * 3 if nested else [0.1] * 3)


def test_without_settings_of_a_processor(tmp_path: Path) -> None:
    save_vision_model("llava", tmp_path)
    (tmp_path / "processor_config.json").unlink()
    assert list(read(tmp_path).files) == ["preprocessor_config.json"]


def _without_images(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").unlink()


def _with_another_tower(folder: Path) -> None:
    tower = {"model_type": "dinov2", "hidden_size": 48}
    edit(folder / "config.json", lambda config: config.update(vision_config=tower))


def _without_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if name.startswith("language_model")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("token", [122, -200])
def test_a_token_of_images_without_an_embedding_is_named(token: int, tmp_path: Path) -> None:
    """The model is served for text."""
    save_vision_model("llava", tmp_path)
    edit(tmp_path / "config.json", lambda config: config.update(image_token_index=token))
    contents = read(tmp_path)
    assert contents.vision is None
    (part,) = contents.unloaded_parts
    assert part == f"vision (image_token_index {token} is not in the vocabulary of 122)"


@pytest.mark.parametrize(
    "change",
    [_without_images, _with_another_tower, _without_tensors],
)
def test_folders_that_load_as_a_language_model(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    save_vision_model("llava", tmp_path)
    change(tmp_path)
    contents = read(tmp_path)
    assert contents.vision is None
    assert contents.unloaded_parts == ("vision",)
    assert "vision_config" not in contents.config
    assert contents.files == {}
    assert not any(each.name.startswith(VISION_PREFIX) for each in contents.tensors.tensors)


def test_a_setting_that_is_not_supported_is_named(tmp_path: Path) -> None:
    save_vision_model("llava", tmp_path)
    edit(tmp_path / "config.json", lambda config: config["vision_config"].update(hidden_act="mish"))
    with pytest.raises(ModelError, match="vision_config: hidden_act = 'mish': supported: 'gelu'"):
        read(tmp_path)


def test_a_quantised_vision_part_is_read_as_numbers(tmp_path: Path) -> None:
    """Language model and tower in FP8, norms, biases, patches and projector as they were."""
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    save_vision_model("gemma3", folder)
    model = save_vision_model("gemma3", plain)
    chosen = copy.deepcopy(SCHEMES["fp8 one scale"])
    chosen.config["ignore"] = ["lm_head"]
    quantise_folder(
        folder, chosen, plain, lambda name: name.endswith(("_proj.weight", "fc1.weight"))
    )
    save_file(load_file(plain / "model.safetensors"), plain / "model.safetensors", {"format": "pt"})
    model = read_vision_model(plain)
    prepared = prepare_vision_model(folder, tmp_path / "prepared")
    found = {entry.name for entry in read_vision_index(prepared).tensors if entry.parts}
    assert len(found) == 3 * 5
    pixels = torch.randn(1, 3, 24, 24)
    encoding = load_vision(prepared, torch.float32, CPU).begin(pixels)
    encoding.advance(1.0)
    with torch.inference_mode():
        (expected,) = model.get_image_features(pixels).pooler_output
    assert (encoding.output - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["llava", "gemma3", "mistral3"])
def test_the_language_model_on_the_code_of_transformers(name: str, tmp_path: Path) -> None:
    model = save_vision_model(name, tmp_path / "model")
    contents = read(tmp_path / "model")
    decoder = load_index(tmp_path / "prepared", dict(contents.config), contents.tensors)
    assert_same_tokens(model, decoder)


def test_the_hash_of_the_weights_has_the_vision_part(tmp_path: Path) -> None:
    """KV of a prompt with an image depends on it."""
    source = tmp_path / "model"
    save_vision_model("smolvlm", source)
    tensors = load_file(source / "model.safetensors")
    hashes = set()
    for number in range(2):
        tensors["model.vision_model.post_layernorm.bias"][0] += number
        save_file(tensors, source / "model.safetensors", {"format": "pt"})
        hashes.add(weights_digest(prepare_vision_model(source, tmp_path / str(number))))
    assert len(hashes) == 2
