"""Language models in folders that wrap them, greedy token for token against transformers' wrapper.

transformers' own classes write the folders. Prompts are text; requests run alone, in chunks and in
a batch, on tokend's families (as test_families.py) and on transformers' code.
"""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deploy.models import hf_folder, wrapped_model
from deploy.models.prepared_folder import ModelContents
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.prepared_models import prepare
from tests.fakes.quantised_checkpoints import SCHEMES, quantise_folder
from tests.fakes.tiny_model_files import TOKENS, tokenizer_json
from tests.fakes.tiny_transformers import save_tiny_transformers
from tests.fakes.tiny_wrapped import (
    WRAPPED,
    default_json,
    read_wrapped,
    rename_tensors,
    save_wrapped,
    wrapped_config,
)
from tests.worker.models.test_families import prove_on_one_rank
from tests.worker.models.test_transformers_model import assert_same_tokens, load_index
from worker.models.families import FAMILIES
from worker.models.transformers_model import spec_of_transformers

pytestmark = pytest.mark.suite("long")

ON_TRANSFORMERS = (*("cohere_compass", "gemma4", "glm4v", "glm46v", "glm_ocr", "llama4"),)
NATIVE = tuple(name for name in WRAPPED if name not in ON_TRANSFORMERS)


def read(folder: Path) -> ModelContents:
    return hf_folder.read(str(folder), lambda what: None)


def prepared(contents: ModelContents, folder: Path) -> PreparedModel:
    return prepare(folder, dict(contents.config), contents.tensors)


@pytest.mark.parametrize("name", NATIVE)
def test_a_family_of_our_own(name: str, tmp_path: Path) -> None:
    model, contents = save_wrapped(name, tmp_path), read(tmp_path)
    assert contents.config["architectures"][0] in FAMILIES
    assert [part.partition(" ")[0] for part in contents.unloaded_parts] == ["vision"]
    assert {token_id for token_id, _ in contents.ends} == {2}
    prove_on_one_rank(prepared(contents, tmp_path / "prepared"), model)


def test_experts_in_the_layout_of_the_published_folder(tmp_path: Path) -> None:
    """Qwen3-VL's has the transpose of what transformers writes; the shape tells."""
    model = save_wrapped("qwen3_vl_moe", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, path, {"format": "pt"})
    prove_on_one_rank(prepared(read(tmp_path), tmp_path / "prepared"), model)


@pytest.mark.parametrize(
    "name", ["gemma4", "llama4", "glm4v", "glm_ocr", "gemma3", "ministral3", "qwen3_vl"]
)
def test_on_the_code_of_transformers(name: str, tmp_path: Path) -> None:
    model, contents = save_wrapped(name, tmp_path), read(tmp_path)
    decoder = load_index(tmp_path / "prepared", dict(contents.config), contents.tensors)
    assert_same_tokens(model, decoder)


def test_gemma3n_without_the_package_of_its_vision_part(tmp_path: Path) -> None:
    """Its class cannot be made without timm, so the folder is made of the text class by hand."""
    model = save_tiny_transformers("gemma3n_text", tmp_path, vocab_size=len(TOKENS))
    rename_tensors(tmp_path, lambda name: re.sub("^model", "model.language_model", name))
    tensors = load_file(tmp_path / "model.safetensors")
    other = {f"model.{part}.weight": torch.ones(3, 3) for part in ("vision_tower", "embed_audio")}
    save_file(tensors | other, tmp_path / "model.safetensors")
    config = default_json("gemma3n")
    config["text_config"] = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_json())
    contents = read(tmp_path)
    assert contents.unloaded_parts == ("vision", "audio")
    assert len(contents.tensors.tensors) == len(tensors)
    decoder = load_index(tmp_path / "prepared", dict(contents.config), contents.tensors)
    assert_same_tokens(model, decoder)


def test_llama4_is_refused_where_its_chunks_matter(tmp_path: Path) -> None:
    config = wrapped_config("llama4")
    config.architectures = ["Llama4ForConditionalGeneration"]
    config.text_config.attention_chunk_size = 100
    found = wrapped_model.find(json.loads(config.to_json_string()))
    assert found is not None
    refused = "Llama4ForCausalLM cannot run .*chunked attention.*use --max-model-len 100"
    with pytest.raises(ModelError, match=refused):
        spec_of_transformers(found.config)
    spec_of_transformers(found.config, max_model_len=100)


@pytest.mark.parametrize(
    ("body", "head"),
    [
        ("model.language_model", "lm_head"),
        ("language_model.model", "lm_head"),
        ("language_model", "language_model.lm_head"),
        ("model.language_model.model", "model.language_model.lm_head"),
        ("model.text_model", "lm_head"),
        ("model", "lm_head"),
        ("llm.model", "llm.lm_head"),
    ],
)
def test_older_and_newer_names_of_tensors(body: str, head: str, tmp_path: Path) -> None:
    """Those of vision stand in files of their own, which no process opens later."""
    save_wrapped("llava", tmp_path)
    expected = {entry.name for entry in read(tmp_path).tensors.tensors}
    rename_tensors(
        tmp_path,
        lambda name: name.replace("language_model.lm_head", head).replace(
            "language_model.model", body
        ),
    )
    tensors = load_file(tmp_path / "model.safetensors")
    is_vision = {name: name.startswith(("vision", "multi_modal")) for name in tensors}
    for number, part in enumerate((True, False)):
        chosen = {name: each for name, each in tensors.items() if is_vision[name] is part}
        save_file(chosen, tmp_path / f"{number}.safetensors")
    weight_map = {name: f"{1 - int(part)}.safetensors" for name, part in is_vision.items()}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    found = read(tmp_path).tensors
    assert {entry.name for entry in found.tensors} == expected
    assert found.files == (str(tmp_path / "1.safetensors"),)


def test_a_head_in_the_folder_is_used_whatever_the_configuration_says(tmp_path: Path) -> None:
    """Mistral Small 3.1: `tie_word_embeddings` is left out, and true by default in transformers."""
    save_wrapped("mistral3", tmp_path)
    edit_config(tmp_path, tie_word_embeddings=None)
    contents = read(tmp_path)
    assert contents.config["tie_word_embeddings"] is False
    prove_on_one_rank(prepared(contents, tmp_path / "prepared"), read_wrapped("mistral3", tmp_path))


@pytest.mark.parametrize("scheme", ["w4a16 asym", "fp8 one scale", "nf4 nested"])
def test_quantised_folders(scheme: str, tmp_path: Path) -> None:
    """The vision part stays as it is, or is quantised too, which does not matter."""
    folder, plain = tmp_path / "quantised", tmp_path / "plain"
    save_wrapped("gemma3", folder)
    save_wrapped("gemma3", plain)
    chosen = copy.deepcopy(SCHEMES[scheme])
    chosen.config["ignore"] = ["re:.*vision.*", "re:.*multi_modal.*", "lm_head"]
    quantise_folder(
        folder,
        chosen,
        plain,
        lambda name: name.endswith("_proj.weight") and "language_model" in name,
    )
    save_file(load_file(plain / "model.safetensors"), plain / "model.safetensors", {"format": "pt"})
    contents = read(folder)
    assert any(entry.parts for entry in contents.tensors.tensors)
    assert "quantization_config" not in contents.config
    prove_on_one_rank(prepared(contents, tmp_path / "prepared"), read_wrapped("gemma3", plain))


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
"""As published: transformers' class knows heads, vocabulary, thetas, pattern and length."""
QWEN25_VL: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128000,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"depth": 32, "hidden_size": 1280, "model_type": "qwen2_5_vl"},
    "vocab_size": 152064,
    "eos_token_id": 151645,
}
"""As published: the settings of the language model are not in a text_config."""
KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
    "model_type": "kimi_k25",
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "n_routed_experts": 384,
        "eos_token_id": 163586,
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"},
    },
    "vision_config": {},
}
"""In the form of the published one, with code, a type that only the code has, and a quantisation
that is said of the language model."""


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            GEMMA3_4B,
            {
                "architectures": ["Gemma3ForCausalLM"],
                "model_type": "gemma3_text",
                "num_attention_heads": 8,
                "head_dim": 256,
                "vocab_size": 262208,
                "max_position_embeddings": 131072,
                "tie_word_embeddings": True,
                "eos_token_id": [1, 106],
                "rope_parameters": {
                    "full_attention": {
                        "factor": 8.0,
                        "rope_type": "linear",
                        "rope_theta": 1_000_000.0,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
        ),
        (
            QWEN25_VL,
            {
                "architectures": ["Qwen2ForCausalLM"],
                "model_type": "qwen2",
                "hidden_size": 3584,
                "eos_token_id": 151645,
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "type": "mrope",
                    "mrope_section": [16, 24, 24],
                    "rope_type": "default",
                    "rope_theta": 1_000_000.0,
                },
            },
        ),
        (
            KIMI_K25,
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "deepseek_v3",
                "n_routed_experts": 384,
                "eos_token_id": 163586,
                "quantization_config": KIMI_K25["text_config"]["quantization_config"],
                "auto_map": KIMI_K25["auto_map"],
            },
        ),
    ],
)
def test_published_configurations(config: dict[str, Any], expected: dict[str, Any]) -> None:
    found = wrapped_model.find(config)
    assert found is not None
    assert {key: found.config.get(key) for key in expected} == expected
    assert found.other_parts == ("vision",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "config.json has no text_config, where LlavaForConditional"),
        ({"text_config": 7}, "config.json: text_config = 7: an object is needed"),
        ({"text_config": {"model_type": "nothing"}}, "config.json: "),
        (
            {"text_config": {"model_type": "mllama_text_model"}},
            "its language model has the model_type 'mllama_text_model', which neither tokend nor",
        ),
        ({"model_type": "llava_of_mine"}, "LlavaForConditionalGeneration is not supported"),
        ({"architectures": ["LlavaForSequenceClassification"]}, "LlavaForSequenceClassification"),
    ],
)
def test_a_configuration_without_a_language_model(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_wrapped("llava", tmp_path)
    edit_config(tmp_path, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ModelError, match=re.escape(message)):
        read(tmp_path)


def test_a_draft_model_is_not_taken_for_the_language_model_in_it() -> None:
    """It has a text_config and no other part, and tensors of its own around the language model."""
    config = {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}
    assert wrapped_model.find(config | {"text_config": {"model_type": "gemma4_text"}}) is None


@pytest.mark.parametrize(
    ("second", "found"),
    [("", "none"), ("talker", "language_model.model, talker.model")],
)
def test_tensors_under_no_prefix_and_under_two(second: str, found: str, tmp_path: Path) -> None:
    save_wrapped("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    of_language = {name: each for name, each in tensors.items() if "language_model" in name}
    for name, tensor in of_language.items():
        if second:
            tensors[name.replace("language_model", second)] = tensor.clone()
        else:
            del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"one PREFIX, which this folder has for {found}$"):
        read(tmp_path)


def test_only_the_tensors_of_the_language_model_count(tmp_path: Path) -> None:
    model = save_wrapped("llava", tmp_path)
    parts = model.model.language_model, model.lm_head
    num_bytes = sum(each.nbytes for part in parts for each in part.parameters())
    assert sum(entry.num_bytes for entry in read(tmp_path).tensors.tensors) == num_bytes
