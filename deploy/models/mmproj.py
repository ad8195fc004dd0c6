"""The vision part of a GGUF model: a file with `mmproj` in its name, beside the model.

llama.cpp's converter writes it (`--mmproj`). Keys begin with `clip.vision.`, names of tensors with
`v.` (tower) and `mm.` (projector). Names and settings become those of a Hugging Face folder, so
that one reader has both. A file of another kind, or for another model, is left out.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from deploy.models import gguf_header
from deploy.models.gguf_header import GgufHeader
from deploy.models.vision_files import VisionContents, vision_contents
from proto.errors import ModelError, shown
from proto.messages.prepared_model import TensorEntry
from worker.models.vision import VISION_FAMILIES
from worker.models.vision.spec import PROJECTOR, TOWER, VisionGguf

_VISION: Final = "clip.vision."
_TOWER_KEYS: Final = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
}
"""Key of the metadata, without its prefix → key of vision_config."""
_SCALE_KEYS: Final = ("projector.scale_factor", "spatial_merge_size")
_MAX_LAYERS: Final = 1024
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_gate": "mlp.gate",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_LAST_PRODUCT, _LAST_BIAS = "mm.2.weight", "mm.2.bias"
_NAMES: Final = {
    "v.patch_embd.weight": f"{TOWER}embeddings.patch_embedding.weight",
    "v.patch_embd.bias": f"{TOWER}embeddings.patch_embedding.bias",
    "v.class_embd": f"{TOWER}embeddings.class_embedding",
    "v.position_embd.weight": f"{TOWER}embeddings.position_embedding.weight",
    "v.pre_ln.weight": f"{TOWER}pre_layrnorm.weight",
    "v.pre_ln.bias": f"{TOWER}pre_layrnorm.bias",
    "v.post_ln.weight": f"{TOWER}post_layernorm.weight",
    "v.post_ln.bias": f"{TOWER}post_layernorm.bias",
    "mm.model.fc.weight": f"{PROJECTOR}modality_projection.proj.weight",
    "mm.input_projection.weight": f"{PROJECTOR}mm_input_projection_weight",
    "mm.soft_emb_norm.weight": f"{PROJECTOR}mm_soft_emb_norm.weight",
    "mm.input_norm.weight": f"{PROJECTOR}norm.weight",
    "mm.patch_merger.weight": f"{PROJECTOR}patch_merger.merging_layer.weight",
    "mm.0.weight": f"{PROJECTOR}linear_1.weight",
    "mm.0.bias": f"{PROJECTOR}linear_1.bias",
    "mm.1.weight": f"{PROJECTOR}linear_1.weight",
    "mm.1.bias": f"{PROJECTOR}linear_1.bias",
    _LAST_PRODUCT: f"{PROJECTOR}linear_2.weight",
    _LAST_BIAS: f"{PROJECTOR}linear_2.bias",
}
"""LLaVA begins to count its two products at mm.0, Pixtral at mm.1."""
_IGNORED: Final = ("v.token_embd.img_break",)
"""A row of the language model's embedding."""
_LAYER: Final = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
_INNER: Final = "v.blk.0.ffn_up.weight"
_MLP_PART: Final = re.compile(r"(?<=\.ffn_)(?:up|down)(?=\.)")


def read(
    path: str, header: GgufHeader, text: Mapping[str, Any], file: int
) -> VisionContents | None:
    """Return what a file adds to a model; None if it is no vision part that is supported for it.

    header, text: of the model, and its config.json. file: number of this file in the tensor index.
    Raises ModelError if it is damaged, or has a setting that is not supported.
    """
    own = gguf_header.read(path)
    values = own.values
    vision: dict[str, Any] = {
        key.removeprefix(_VISION): value for key, value in values.items() if key.startswith(_VISION)
    }
    projector = values.get("clip.projector_type", vision.get("projector_type"))
    shapes = {entry.name: entry.shape for entry in own.tensors}
    kind = _find_kind(projector, shapes, header.values.get("general.architecture"))
    tokens = header.values.get("tokenizer.ggml.tokens", ())
    last = shapes.get(_LAST_PRODUCT)
    output_size = last[0] if last else vision.get("projection_dim")
    if (
        kind is None
        or values.get("general.architecture") != "clip"
        or output_size != text.get("hidden_size")
        or not {kind.image_token, *kind.markers.values()} <= set(tokens)
    ):
        return None
    missing = next((name for name in _TOWER_KEYS if name not in vision), None)
    if missing is not None:
        raise ModelError(f"{path} has no {_VISION}{missing}")
    shape = shapes.get(_INNER, ())
    if len(shape) == 2 and vision["embedding_length"] in shape:
        # Files of Qwen2-VL have another number in its place.
        is_second = shape[0] == vision["embedding_length"]
        vision["feed_forward_length"] = shape[1] if is_second else shape[0]
    vision["projection_dim"] = output_size
    tower = {key: vision[name] for name, key in _TOWER_KEYS.items()}
    side = _whole(tower, "image_size") // _whole(tower, "patch_size")
    for key in ("embedding_length", "feed_forward_length", "block_count"):
        _whole(vision, key)
    if vision["block_count"] > _MAX_LAYERS:
        raise ModelError(f"{path} has more than {_MAX_LAYERS} layers")
    scale_key = next((key for key in _SCALE_KEYS if key in vision), _SCALE_KEYS[0])
    scale = vision.get(scale_key, kind.merge)
    if type(scale) is not int or not 0 < scale <= side:
        raise ModelError(f"{path}: {_VISION}{scale_key} = {shown(repr(scale))}")
    settings = kind.settings(vision, side, scale)
    projector_settings = dict(settings.projector)
    projector_settings |= {key: tokens.index(text) for key, text in kind.markers.items()}
    if settings.tensor_name is None and _LAST_PRODUCT in shapes:
        projector_settings["multimodal_projector_bias"] = _LAST_BIAS in shapes
    images = dict(settings.images)
    for key in ("image_mean", "image_std"):
        if key in vision:
            images[key] = [float(f"{each:.7g}") for each in vision[key]]
    return vision_contents(
        kind.architecture,
        tokens.index(kind.image_token),
        {**tower, **settings.tower, "hidden_act": _activation(values)},
        projector_settings,
        text,
        tuple(_renamed(own.tensors, tower, file, settings.tensor_name or _clip_name)),
        images,
        settings.processor,
    )


def _find_kind(projector: Any, tensors: Collection[str], text: Any) -> VisionGguf | None:
    """Return the kind of a file with this projector and tensors; None if it is not supported.

    text: architecture of the language model's file.
    """
    kinds = (kind for family in VISION_FAMILIES.values() for kind in family.gguf)
    return next(
        (
            kind
            for kind in kinds
            if kind.projector == projector
            and text in kind.texts
            and (kind.is_marked is None or kind.is_marked(tensors))
        ),
        None,
    )


def _whole(keys: Mapping[str, Any], key: str) -> int:
    value = keys[key]
    if type(value) is not int or value < 1:
        raise ModelError(f"{_VISION}{key} = {shown(repr(value))}: a whole number is needed")
    return value


def _activation(values: Mapping[str, Any]) -> str:
    """Return the activation, by its name in vision_config, as llama.cpp chooses it."""
    if values.get("clip.use_gelu"):
        return "gelu_pytorch_tanh"
    return "silu" if values.get("clip.use_silu") else "quick_gelu"


def _renamed(
    entries: Sequence[TensorEntry],
    tower: Mapping[str, Any],
    file: int,
    tensor_name: Callable[[str], str | None],
) -> Iterator[TensorEntry]:
    """Yield the tensors by their names in a prepared folder; others keep theirs behind TOWER.

    tensor_name: as in GgufSettings.
    """
    swapped = _are_swapped(entries, tower)
    for entry in entries:
        if entry.name in _IGNORED:
            continue
        own = entry.name
        if swapped:
            own = _MLP_PART.sub(lambda part: "down" if part[0] == "up" else "up", own)
        name = tensor_name(own) or TOWER + own
        yield msgspec.structs.replace(entry, name=name, file=file)


def _clip_name(name: str) -> str | None:
    """Return the name that a tensor of a tower like CLIP's has in a prepared folder."""
    if match := _LAYER.fullmatch(name):
        layer, part, kind = match.groups()
        return f"{TOWER}encoder.layers.{layer}.{_LAYER_NAMES.get(part, part)}.{kind}"
    return _NAMES.get(name)


def _are_swapped(entries: Sequence[TensorEntry], tower: Mapping[str, Any]) -> bool:
    """Return whether the first product of an MLP is called `ffn_down`, as in older files."""
    sizes = tower["hidden_size"], tower["intermediate_size"]
    shapes = {entry.name: entry.shape for entry in entries}
    return sizes[0] != sizes[1] and shapes.get(_INNER) == sizes
