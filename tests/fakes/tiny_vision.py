"""Tiny random models that read images, with tokenizer, chat template and processor, in folders.

transformers' own classes write and read them. A folder has `processor_config.json` as transformers
5 writes it, and `preprocessor_config.json` as most published folders have.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from deploy.models import hf_folder, prepared_folder
from proto.messages.prepared_model import PreparedModel
from tests.fakes.tiny_model_files import TOKENS
from tests.fakes.tiny_transformers import random_model

IMAGE: Final = "<image>"
"""The image token, and, except in Gemma 3, the placeholder that templates write."""
GEMMA_PLACEHOLDER: Final = "<start_of_image>"
_TILES: Final = tuple(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))
SPECIAL_TOKENS: Final = (
    *("<s>", IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(GEMMA_PLACEHOLDER, "<end_of_image>", "<pad>"),
    *_TILES,
)
"""Added behind the last of TOKENS. `<|end|>` ends an answer."""
VOCABULARY: Final = (*TOKENS, "Ċ", *SPECIAL_TOKENS)
END_ID: Final = VOCABULARY.index("<|end|>")
IMAGE_ID: Final = VOCABULARY.index(IMAGE)
_START_ID: Final = VOCABULARY.index("<s>")
_PAD_ID: Final = VOCABULARY.index("<pad>")

_TEXT: Final[dict[str, Any]] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": _START_ID,
    "eos_token_id": END_ID,
    "pad_token_id": _PAD_ID,
}
_LLAMA: Final = _TEXT | {"model_type": "llama"}
_GEMMA: Final[dict[str, Any]] = _TEXT | {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
}
_TOWER: Final[dict[str, Any]] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}
_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}PLACEHOLDER{% elif part['type'] == 'text' %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_SQUARE: Final = {"height": 24, "width": 24}


@dataclass(frozen=True)
class VisionModel:
    """A tiny model that reads images.

    Its image processor gives images of Pixtral's tower their own proportions, others are square.

    architecture: transformers' class. text, vision, outside: settings of the language model, of the
    tower, and beside both. image_processor: how images become pixels. processor: transformers'
    class that joins images and text; settings: its own. embeds: rows of encoder output of one tile,
    or of the largest image. placeholder: what a template writes for an image.
    """

    architecture: str
    text: dict[str, Any]
    vision: dict[str, Any]
    outside: dict[str, Any]
    image_processor: Any
    processor: str
    embeds: int
    settings: dict[str, Any] = field(default_factory=dict)
    placeholder: str = IMAGE


def _llava(tower: str, embeds: int, image_processor: Any, **outside: Any) -> VisionModel:
    is_clip = tower == "clip_vision_model"
    strategy = outside.setdefault("vision_feature_select_strategy", "default")
    return VisionModel(
        "LlavaForConditionalGeneration",
        _LLAMA,
        _TOWER | {"model_type": tower},
        {"image_token_index": IMAGE_ID, "tie_word_embeddings": False, **outside},
        image_processor,
        "LlavaProcessor",
        embeds,
        {
            "patch_size": 4,
            "vision_feature_select_strategy": strategy,
            "num_additional_image_tokens": int(is_clip),
        },
    )


def _tiled(name: str, image_processor: type) -> VisionModel:
    return VisionModel(
        f"{name}ForConditionalGeneration",
        _LLAMA,
        _TOWER | {"model_type": f"{name.lower()}_vision"},
        {"image_token_id": IMAGE_ID, "scale_factor": 2, "tie_word_embeddings": False},
        image_processor(size={"longest_edge": 48}, max_image_size={"longest_edge": 24}),
        # SmolVLM's own needs a package for words of numbers; for images both do the same.
        "Idefics3Processor",
        9,
        {"image_seq_len": 9},
    )


_FRAMED: Final = f"{GEMMA_PLACEHOLDER}{IMAGE}<end_of_image>"


def _grid(name: str, text: dict[str, Any], vision: dict[str, Any], processor: str) -> VisionModel:
    """Return a model of Qwen-VL's; images have up to 18 squares of 8 pixels, long ones more."""
    return VisionModel(
        f"{name}ForConditionalGeneration",
        _TEXT | text,
        _GRID_TOWER | vision,
        {
            "image_token_id": IMAGE_ID,
            "vision_start_token_id": VOCABULARY.index(GEMMA_PLACEHOLDER),
            "vision_end_token_id": VOCABULARY.index("<end_of_image>"),
            "tie_word_embeddings": False,
        },
        Qwen2VLImageProcessorPil(
            size={"shortest_edge": 256, "longest_edge": 1152}, patch_size=4, merge_size=2
        ),
        processor,
        61,
        placeholder=_FRAMED,
    )


def _mrope(interleaved: bool, **others: Any) -> dict[str, Any]:
    """Return the settings of a rotary embedding of eight frequencies."""
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 3, 2], **others}
    return {"rope_parameters": rope | ({"mrope_interleaved": True} if interleaved else {})}


_GRID_TOWER: Final[dict[str, Any]] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 64,
}
_WITH_POSITIONS: Final = {"num_position_embeddings": 25}
_EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_QWEN3_5: Final[dict[str, Any]] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    **_mrope(True, partial_rotary_factor=0.5),
}


def _pixtral(architecture: str, embeds: int, **outside: Any) -> VisionModel:
    return VisionModel(
        f"{architecture}ForConditionalGeneration",
        _LLAMA | {"model_type": "mistral" if architecture == "Mistral3" else "llama"},
        _TOWER | {"model_type": "pixtral", "hidden_act": "silu"},
        {"image_token_index": IMAGE_ID, "tie_word_embeddings": False, **outside},
        PixtralImageProcessorPil(size={"longest_edge": 24}, patch_size={"height": 4, "width": 4}),
        "PixtralProcessor",
        embeds,
        {
            "patch_size": 4,
            "spatial_merge_size": outside.get("spatial_merge_size", 1),
            "image_token": IMAGE,
            "image_break_token": "<fake_token_around_image>",
            "image_end_token": "<end_of_image>",
        },
    )


VISION_MODELS: Final[dict[str, VisionModel]] = {
    "llava": _llava(
        "clip_vision_model",
        36,
        CLIPImageProcessorPil(size={"shortest_edge": 24}, crop_size=_SQUARE),
    ),
    "llava siglip": _llava(
        "siglip_vision_model",
        36,
        SiglipImageProcessorPil(size=_SQUARE),
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        projector_hidden_act="gelu",
    ),
    "idefics3": _tiled("Idefics3", Idefics3ImageProcessorPil),
    "smolvlm": _tiled("SmolVLM", SmolVLMImageProcessorPil),
    "gemma3": VisionModel(
        "Gemma3ForConditionalGeneration",
        _GEMMA,
        _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        {
            "image_token_index": IMAGE_ID,
            "boi_token_index": VOCABULARY.index(GEMMA_PLACEHOLDER),
            "eoi_token_index": VOCABULARY.index("<end_of_image>"),
            "mm_tokens_per_image": 9,
        },
        Gemma3ImageProcessorPil(size=_SQUARE),
        "Gemma3Processor",
        9,
        {"image_seq_length": 9},
        GEMMA_PLACEHOLDER,
    ),
    "pixtral": _pixtral(
        "Llava", 36, vision_feature_select_strategy="full", vision_feature_layer=-1
    ),
    "mistral3": _pixtral("Mistral3", 9, spatial_merge_size=2),
    "qwen2_vl": _grid(
        "Qwen2VL",
        {"model_type": "qwen2_vl_text", **_mrope(False)},
        {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
        "Qwen2VLProcessor",
    ),
    "qwen2_5_vl": _grid(
        "Qwen2_5_VL",
        {"model_type": "qwen2_5_vl_text", **_mrope(False)},
        {"window_size": 16, "fullatt_block_indexes": [1, 3]},
        "Qwen2_5_VLProcessor",
    ),
    "qwen3_vl": _grid(
        "Qwen3VL",
        {"model_type": "qwen3_vl_text", **_mrope(True)},
        {"deepstack_visual_indexes": [0, 2], **_WITH_POSITIONS},
        "Qwen3VLProcessor",
    ),
    "qwen3_vl_moe": _grid(
        "Qwen3VLMoe",
        {"model_type": "qwen3_vl_moe_text", **_EXPERTS, **_mrope(True)},
        {"deepstack_visual_indexes": [1, 2, 3], **_WITH_POSITIONS},
        "Qwen3VLProcessor",
    ),
    "qwen3_5": _grid(
        "Qwen3_5",
        {"model_type": "qwen3_5_text", **_QWEN3_5},
        _WITH_POSITIONS,
        "Qwen3VLProcessor",
    ),
    "qwen3_5_moe": _grid(
        "Qwen3_5Moe",
        {
            "model_type": "qwen3_5_moe_text",
            "shared_expert_intermediate_size": 32,
            **_EXPERTS,
            **_QWEN3_5,
        },
        _WITH_POSITIONS,
        "Qwen3VLProcessor",
    ),
}
"""By a name for tests. Images of the tiled ones have at most 2 x 2 tiles and the whole image."""
GRIDS: Final = tuple(name for name, each in VISION_MODELS.items() if each.placeholder == _FRAMED)
"""Those whose images have any size."""


def save_vision_model(name: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all files of its folder; return it as transformers reads it.

    changes: of its configuration outside of the parts, or of a part that is a mapping.
    """
    described = VISION_MODELS[name]
    cls = getattr(transformers, described.architecture)
    parts: dict[str, Any] = {
        "text_config": described.text,
        "vision_config": described.vision,
        **described.outside,
    }
    for key, value in changes.items():
        parts[key] = parts[key] | value if isinstance(value, dict) and key in parts else value
    model = random_model(cls, cls.config_class(**parts), most_numbers=1_000_000)
    model.generation_config.eos_token_id = END_ID
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    settings = json.loads(described.image_processor.to_json_string())
    processor = vision_processor(name)
    if name in GRIDS:
        processor.tokenizer.save_pretrained(folder)
        whole = {"processor_class": described.processor, "image_processor": settings}
        (folder / "processor_config.json").write_text(json.dumps(whole, indent=2))
    else:
        processor.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    return read_vision_model(folder)


def read_vision_model(folder: Path) -> Any:
    """Return a saved model as transformers reads it, in float32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls = getattr(transformers, architecture)
    return cls.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def prepare_vision_model(source: Path, folder: Path) -> PreparedModel:
    """Write the prepared folder of a saved model, as `deploy` does."""
    folder.mkdir()
    contents = hf_folder.read(str(source), lambda what: None)
    names = {"source": str(source), "target": str(folder), "final": str(folder)}
    return prepared_folder.write(contents, name="tiny", **names)


_MMPROJ_KEYS: Final[dict[str, dict[str, int]]] = {
    "gemma3": {"projector.scale_factor": 2},
    "idefics3": {"projector.scale_factor": 2, "preproc_image_size": 48},
    "mistral3": {"spatial_merge_size": 2},
}
"""Further keys of the vision part of a model, by its model type."""


def write_mmproj(model: Path, path: Path, tensors: Sequence[str] = (), **changes: Any) -> None:
    """Write the vision part of a saved model as llama.cpp's converters do.

    tensors: names of further ones. changes: keys of the metadata without their prefix, or other
    values; None leaves one out.
    """
    config = json.loads((model / "config.json").read_text())
    tower, model_type = config["vision_config"], config["model_type"]
    is_pixtral, is_clip = (tower["model_type"] == each for each in ("pixtral", "clip_vision_model"))
    projector = "pixtral" if is_pixtral else "mlp" if is_clip else model_type
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(projector)
    if is_pixtral:
        writer.add_vision_use_silu(True)
    elif not is_clip:
        writer.add_vision_use_gelu(True)
    layers = tower["num_hidden_layers"] - is_clip  # of LLaVA without the one that is not read
    keys = {
        "image_size": tower["image_size"],
        "patch_size": tower["patch_size"],
        "embedding_length": tower["hidden_size"],
        "feed_forward_length": tower["intermediate_size"],
        "block_count": layers,
        "attention.head_count": tower["num_attention_heads"],
        "attention.layer_norm_epsilon": tower.get("layer_norm_eps", 1e-5),
        "projection_dim": 768 if is_clip else config["text_config"]["hidden_size"],
        **_MMPROJ_KEYS.get(model_type, {}),
    }
    for key, value in (keys | changes).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        if value is not None:
            add(f"clip.vision.{key}", value)
    for key in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{key}", [0.5, 0.5, 0.5])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, tower["num_hidden_layers"])
    for own, weight in load_file(model / "model.safetensors").items():
        full = own.removeprefix("model." if is_pixtral else "")
        if not is_pixtral:
            full = full.replace("vision_tower.", "vision_tower.vision_model.")
        full = full.replace("projection_weight", "projection.weight")
        theirs = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if theirs is None or not theirs.startswith(("v.", "mm.")):
            continue
        if theirs.startswith(f"v.blk.{layers}."):
            continue
        if is_clip:  # in the files of the older converter
            theirs = theirs.replace("mm.1.", "mm.0.")
        numbers = weight.float().numpy()
        if "soft_emb_norm" in own:  # as the converter does
            numbers = numbers + np.float32(1.0)
        if is_pixtral and own.endswith(("q_proj.weight", "k_proj.weight")):  # as well
            heads = numbers.reshape(tower["num_attention_heads"], 2, -1, numbers.shape[1])
            numbers = heads.swapaxes(1, 2).reshape(numbers.shape)
        writer.add_tensor(theirs, numbers)
    for name in (*tensors, *(("v.token_embd.img_break",) if is_pixtral else ())):
        writer.add_tensor(name, np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def chat_template(placeholder: str) -> str:
    """Return a template that takes parts. placeholder: what it writes for an image."""
    return _TEMPLATE.replace("PLACEHOLDER", placeholder)


def vision_tokenizer(placeholder: str = IMAGE) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer over VOCABULARY with a template that takes image parts."""
    vocabulary = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|end|>", *SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        chat_template=chat_template(placeholder),
        extra_special_tokens={
            "image_token": IMAGE,
            "boi_token": GEMMA_PLACEHOLDER,
            "eoi_token": "<end_of_image>",
        },
    )


def vision_processor(name: str) -> Any:
    """Return transformers' processor of a model."""
    described = VISION_MODELS[name]
    tokenizer = vision_tokenizer(described.placeholder)
    cls = _processor_class(described.processor)
    if name in GRIDS:  # without the processor of videos, which needs torchvision
        cls = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: object})
    return cls(
        image_processor=described.image_processor,
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **described.settings,
    )


def _processor_class(name: str) -> Any:
    """Return a class of transformers. Pixtral's needs torchvision for one function, which is also
    beside its image processor for Pillow.
    """
    if name != "PixtralProcessor":
        return getattr(transformers, name)
    folder = "transformers.models.pixtral"
    sys.modules.setdefault(
        f"{folder}.image_processing_pixtral",
        import_module(f"{folder}.image_processing_pil_pixtral"),
    )
    return import_module(f"{folder}.processing_pixtral").PixtralProcessor


def reference_inputs(
    name: str, images: Sequence[Image.Image], text: str
) -> dict[str, torch.Tensor]:
    """Return what transformers' processor makes of images and of a text with their placeholders.

    input_ids [1, tokens]; pixel_values and what the model takes with them.
    """
    batch = vision_processor(name)(images=[list(images)], text=[text], return_tensors="pt")
    return dict(batch)


def pixels_of(inputs: dict[str, Any]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return pixels and grid of the only image of `reference_inputs`, as encoders take them.

    Pixels of frames, which are the same, are there once.
    """
    pixels: torch.Tensor = inputs["pixel_values"]
    if "image_grid_thw" in inputs:
        frames = pixels.view(-1, 3, 2, 4, 4)
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        return frames[:, :, 0].contiguous(), tuple(inputs["image_grid_thw"][0].tolist())
    return (pixels[0] if pixels.dim() == 5 else pixels), ()


def random_image(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of random smooth colours."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.randint(0, 256, (3, 5, 3), generator=draw, dtype=torch.uint8).numpy()
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
