"""Vision parts against transformers in float32: rows of images, tokens that follow, refusals."""

import gc
import os
import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from PIL import Image
from safetensors.torch import load_file, save_file

from proto.errors import ModelError
from proto.messages.multimodal import SharedPixels
from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU, GPU, REFERENCE
from tests.fakes.prepared_models import spec_of
from tests.fakes.tiny_vision import (
    GEMMA_PLACEHOLDER,
    GRIDS,
    IMAGE_ID,
    VISION_MODELS,
    VOCABULARY,
    pixels_of,
    prepare_vision_model,
    random_image,
    reference_inputs,
    save_vision_model,
)
from worker.host.device import HostDevice
from worker.layers.tower_attention import TileHeads
from worker.loader.vision import load_vision, read_vision_spec, vision_bytes
from worker.loader.weights import load_model
from worker.models.vision import VISION_FAMILIES, vision_spec
from worker.models.vision import encoder as encoder_module
from worker.models.vision.encoder import Pixels, VisionEncoder
from worker.models.vision.tile_spec import TileSpec
from worker.step.encoder_cache import PixelFile

IMAGES = {"tall": (40, 60), "wide": (90, 20), "small": (9, 14), "square": (24, 24)}
DEVICES = [pytest.param(CPU, id="cpu"), pytest.param(REFERENCE, id="reference")]


ROPE = {"rope_type": "axial", "rope_theta": 100.0}


def saved(name: str, folder: Path, **changes: Any) -> tuple[Any, PreparedModel]:
    model = save_vision_model(name, folder / "model", **changes)
    return model, prepare_vision_model(folder / "model", folder / "prepared")


def image(shape: str) -> Image.Image:
    return random_image(len(shape), *IMAGES[shape])


def inputs_of(name: str, images: Sequence[Image.Image], text: str = "") -> dict[str, Any]:
    placeholders = VISION_MODELS[name].placeholder * len(images)
    return reference_inputs(name, images, f"a{placeholders}{text}")


@torch.inference_mode()
def features(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the rows of transformers' model for the images, one image after the other.

    Those of DeepStack stand behind them.
    """
    keys = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")
    found = model.get_image_features(**{key: inputs[key] for key in keys if key in inputs})
    stacked = getattr(found, "deepstack_features", None) or []
    return torch.cat([torch.cat(list(each)) for each in (found.pooler_output, *stacked)], dim=1)


Picture = tuple[Pixels, tuple[int, ...]]
"""Pixels and grid."""


def encode(encoder: VisionEncoder, pixels: Picture, *shares: float) -> torch.Tensor:
    encoding = encoder.begin(*pixels)
    for share in (*shares, 1.0):
        encoding.advance(share)
    assert len(encoding.output) == encoding.num_embeds
    return encoding.output


def assert_equal_rows(found: torch.Tensor, expected: torch.Tensor, error: float = 1e-5) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < error * expected.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VISION_MODELS)
def test_rows_of_images(name: str, device: HostDevice, tmp_path: Path) -> None:
    model, prepared = saved(name, tmp_path)
    encoder = load_vision(prepared, torch.float32, device)
    assert prepared.vision is not None
    most = 0
    long = [random_image(1, 2000, 10)] if name in GRIDS else []
    for picture in (*map(image, IMAGES), *long):
        inputs = inputs_of(name, [picture])
        expected = features(model, inputs)
        assert_equal_rows(encode(encoder, pixels_of(inputs)), expected)
        assert len(expected) == (inputs["input_ids"] == IMAGE_ID).sum()
        most = max(most, len(expected))
    assert 0.9 * encoder.max_embeds < most <= encoder.max_embeds == prepared.vision.max_embeds


@pytest.mark.parametrize("rows", [1, 5, 16, 64, 1000])
@pytest.mark.parametrize("name", VISION_MODELS)
def test_slices_do_not_change_a_bit(name: str, rows: int, tmp_path: Path) -> None:
    model, prepared = saved(name, tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    encoder.unit_rows = rows
    inputs = inputs_of(name, [image("tall")])
    pixels = pixels_of(inputs)
    whole = encode(encoder, pixels)
    assert_equal_rows(whole, features(model, inputs))
    for shares in ((0.5,), (1e-9, 0.3, 0.31, 0.99), [step / 40 for step in range(1, 40)]):
        assert torch.equal(encode(encoder, pixels, *shares), whole)


@pytest.mark.parametrize("name", VISION_MODELS)
def test_pixels_are_read_slice_by_slice(name: str, tmp_path: Path) -> None:
    """A file that becomes shorter after the first slice fails the next one."""
    _, prepared = saved(name, tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    encoder.unit_rows = 1
    pixels, grid = pixels_of(inputs_of(name, [image("tall")]))
    pixels.numpy().tofile(tmp_path / "pixels")
    file = PixelFile(str(tmp_path), SharedPixels("pixels", tuple(pixels.shape)))
    found = encode(encoder, (file, grid), 1e-9, 0.3)
    assert torch.equal(found, encode(encoder, (pixels, grid)))
    encoding = encoder.begin(file, grid)
    encoding.advance(1e-9)
    os.truncate(tmp_path / "pixels", 4 * pixels.numel() // 2)
    with pytest.raises(ValueError, match="became shorter"):
        encoding.advance(1.0)


def test_an_encoding_that_is_not_completed_is_freed_at_once(tmp_path: Path) -> None:
    """Without the cycle collector, which workers run rarely."""
    _, prepared = saved("gemma3", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    encoding = encoder.begin(*pixels_of(inputs_of("gemma3", [image("tall")])))
    encoding.advance(0.3)
    found = weakref.ref(encoding)
    gc.disable()
    try:
        encoding.close()
        del encoding
        assert found() is None
    finally:
        gc.enable()


def test_a_slice_is_a_part_of_the_work(tmp_path: Path) -> None:
    """Patches, then keys and mixing of each layer, then outputs, each for some rows."""
    _, prepared = saved("gemma3", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    encoder.unit_rows = 4
    counts: list[int] = []

    def count_rows(*shares: float) -> list[int]:
        counts.clear()
        encode(encoder, pixels_of(inputs_of("gemma3", [image("tall")])), *shares)
        return list(counts)

    for layer in encoder.layers:
        compute_keys = layer.compute_keys

        def counted(
            residual: torch.Tensor,
            heads: TileHeads,
            tiles: slice,
            rows: slice,
            rotations: None,
            compute: Any = compute_keys,
        ) -> None:
            counts.append(rows.stop - rows.start)
            compute(residual, heads, tiles, rows, rotations)

        layer.compute_keys = counted  # type: ignore[method-assign]
    assert count_rows() == [4] * 9 * 3
    encoding = encoder.begin(*pixels_of(inputs_of("gemma3", [image("tall")])))
    done = []
    for step in range(1, 11):
        counts.clear()
        encoding.advance(step / 10)
        done.append(sum(counts))
    assert sum(done) == 3 * 36
    assert max(done) <= 36


def test_units_of_large_images_have_fewer_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that attention of a unit to all patches takes no longer."""
    monkeypatch.setattr(encoder_module, "_UNIT_TOKENS", 30)
    model, prepared = saved("qwen2_5_vl", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    inputs = inputs_of("qwen2_5_vl", [image("tall")])
    pixels, grid = pixels_of(inputs)
    rows = set()
    for layer in encoder.layers:
        attend = layer.attend

        def counted(
            heads: TileHeads, tiles: slice, own: slice, *others: Any, do: Any = attend
        ) -> Any:
            rows.add(own.stop - own.start)
            return do(heads, tiles, own, *others)

        layer.attend = counted  # type: ignore[method-assign]
    found = encode(encoder, (pixels, grid))
    assert rows == {48, 60 - 48}
    assert_equal_rows(found, features(model, inputs))


def test_two_images_at_once(tmp_path: Path) -> None:
    model, prepared = saved("llava", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    inputs = inputs_of("llava", [image("tall"), image("wide")])
    encodings = [encoder.begin(pixels) for pixels in inputs["pixel_values"]]
    for share in (0.2, 0.4, 1.0):
        for encoding in encodings:
            encoding.advance(share)
    found = torch.cat([encoding.output for encoding in encodings])
    assert_equal_rows(found, features(model, inputs))


@pytest.mark.parametrize("name", VISION_MODELS)
def test_bfloat16(name: str, tmp_path: Path) -> None:
    model, prepared = saved(name, tmp_path)
    encoder = load_vision(prepared, torch.bfloat16, CPU)
    inputs = inputs_of(name, [image("tall")])
    found = encode(encoder, pixels_of(inputs))
    assert found.dtype == torch.bfloat16
    assert_equal_rows(found.float(), features(model, inputs), error=0.05)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {"vision_feature_layer": -1}),
        ("llava", {"vision_feature_layer": 1}),
        ("llava", {"vision_feature_layer": [-1, 1]}),
        ("llava", {"vision_feature_select_strategy": "full"}),
        ("llava", {"multimodal_projector_bias": False, "projector_hidden_act": "relu"}),
        ("llava", {"vision_config": {"hidden_act": "gelu"}}),
        ("llava siglip", {"vision_feature_select_strategy": "default", "vision_feature_layer": -2}),
        ("llava siglip", {"vision_config": {"image_size": 26, "hidden_act": "silu"}}),
        ("idefics3", {"scale_factor": 3}),
        ("gemma3", {"mm_tokens_per_image": 4}),
        ("gemma3", {"vision_config": {"num_attention_heads": 2, "vision_use_head": True}}),
        ("qwen2_vl", {"vision_config": {"mlp_ratio": 3, "hidden_act": "gelu"}}),
        ("qwen2_5_vl", {"vision_config": {"window_size": 31, "fullatt_block_indexes": []}}),
        ("qwen2_5_vl", {"vision_config": {"window_size": 1000}}),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [1]}}),
        ("qwen3_vl", {"vision_config": {"num_position_embeddings": 400, "num_heads": 2}}),
        ("qwen3_5", {"vision_config": {"rope_parameters": {"rope_theta": 50.0}}}),
        ("pixtral", {"vision_feature_layer": [1, -1], "projector_hidden_act": "relu"}),
        ("pixtral", {"vision_config": {"rope_parameters": ROPE, "hidden_act": "gelu"}}),
        ("mistral3", {"spatial_merge_size": 1}),
        ("mistral3", {"vision_feature_layer": -2, "multimodal_projector_bias": True}),
        ("mistral3", {"text_config": {"rms_norm_eps": 0.1}, "projector_hidden_act": "silu"}),
    ],
)
def test_settings(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, prepared = saved(name, tmp_path, **changes)
    encoder = load_vision(prepared, torch.float32, CPU)
    inputs = inputs_of(name, [image("wide")])
    if side := changes.get("vision_config", {}).get("image_size"):
        draw = torch.Generator().manual_seed(1)
        inputs = {"pixel_values": torch.randn(1, 3, side, side, generator=draw)}
    assert_equal_rows(encode(encoder, pixels_of(inputs)), features(model, inputs))


@pytest.mark.parametrize("side", [8, 16, 24])
def test_tiles_of_another_size(side: int, tmp_path: Path) -> None:
    model, prepared = saved("smolvlm", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    pixels = torch.randn(3, 3, side, side, generator=torch.Generator().manual_seed(side))
    expected = features(model, {"pixel_values": pixels[None]})
    assert_equal_rows(encode(encoder, (pixels, ())), expected)


@torch.inference_mode()
def greedy(prepared: PreparedModel, tokens: list[int], rows: torch.Tensor, count: int) -> list[int]:
    """Return tokens after a prompt whose image tokens have these rows."""
    decoder = load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)
    attention, places = (
        DenseAttention(decoder.spec),
        [at for at, each in enumerate(tokens) if each == IMAGE_ID],
    )
    embeddings = [(at, row[None]) for at, row in zip(places, rows, strict=True)]
    step, found = torch.tensor(tokens), list[int]()
    for _ in range(count):
        start = len(tokens) + len(found) - len(step)
        positions = torch.arange(start, start + len(step))
        hidden = decoder.forward(step, positions, attention, embeddings=embeddings)
        found.append(int(decoder.float32_logits(hidden[-1:]).argmax()))
        step, embeddings = torch.tensor(found[-1:]), []
    return found


MINISTRAL3 = {
    "model_type": "ministral3",
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {}),
        ("llava siglip", {}),
        ("idefics3", {}),
        ("smolvlm", {}),
        ("pixtral", {}),
        ("mistral3", {}),
        ("mistral3", {"text_config": MINISTRAL3}),
    ],
)
def test_greedy_tokens_after_images(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model, prepared = saved(name, tmp_path, **changes)
    encoder = load_vision(prepared, torch.float32, CPU)
    inputs = inputs_of(name, [image("tall"), image("wide")], "what is it?")
    rows = [
        encode(encoder, pixels_of(inputs_of(name, [image(shape)]))) for shape in ("tall", "wide")
    ]
    answer = model.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
    tokens = inputs["input_ids"][0].tolist()
    expected = answer[0, len(tokens) :].tolist()
    assert greedy(prepared, tokens, torch.cat(rows), 16) == expected
    assert greedy(prepared, tokens, torch.cat(rows).flip(0), 16) != expected


def test_rows_of_gemma3_are_not_scaled(tmp_path: Path) -> None:
    """An image of one token, which sees no later one."""
    changes = {"mm_tokens_per_image": 1}
    model, prepared = saved("gemma3", tmp_path, **changes)
    inputs = inputs_of("gemma3", [image("tall")])
    rows = encode(load_vision(prepared, torch.float32, CPU), pixels_of(inputs))
    ids = [5, 6, VOCABULARY.index(GEMMA_PLACEHOLDER), IMAGE_ID, 7, 8, 9]
    tokens = torch.tensor([ids])
    answer = model.generate(
        input_ids=tokens,
        pixel_values=inputs["pixel_values"],
        token_type_ids=(tokens == IMAGE_ID).long(),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
    )
    expected = answer[0, len(ids) :].tolist()
    assert greedy(prepared, ids, rows, 12) == expected
    assert greedy(prepared, ids, rows * 8, 12) != expected


@pytest.mark.parametrize("name", VISION_MODELS)
def test_bytes_for_the_memory_plan(name: str, tmp_path: Path) -> None:
    _, prepared = saved(name, tmp_path)
    spec = read_vision_spec(prepared)
    tensors = load_file(tmp_path / "model/model.safetensors")
    is_text = ("language_model", "model.text_model", "lm_head")
    own = {key: each for key, each in tensors.items() if not key.startswith(is_text)}
    if name in GRIDS:  # some are saved with the language model's names of older versions
        own = {key: each for key, each in tensors.items() if "visual." in key}
    files = sum(each.nbytes for each in own.values())
    assert 0.7 * files < spec.weight_bytes(4) <= files
    sizes = vision_bytes(prepared, torch.float32, CPU)
    assert sizes.weights == spec.weight_bytes(4) == 2 * spec.weight_bytes(2)
    is_pixtral = isinstance(spec, TileSpec) and spec.tower.rope is not None
    inputs = inputs_of(name, [image("square" if is_pixtral else "tall")])
    if name in GRIDS:  # the largest of this form
        inputs = inputs_of(name, [random_image(1, 144, 8)])
        spec = spec.at_most(18)
        prepared = replace(prepared, vision=replace(prepared.vision, max_embeds=18))
        sizes = vision_bytes(prepared, torch.float32, CPU)
    pixels = pixels_of(inputs)
    assert pixels[0].nbytes == sizes.pixels
    encoder = load_vision(prepared, torch.float32, CPU)
    assert encode(encoder, pixels).nbytes == sizes.output
    for device in (CPU, REFERENCE):
        planned = vision_bytes(prepared, torch.float32, device).activations
        encoder = load_vision(prepared, torch.float32, device)
        with torch.profiler.profile(profile_memory=True) as profile:
            output = encode(encoder, pixels)
        taken = _peak(profile) - output.nbytes
        assert taken < planned < 3 * taken, device
    half = vision_bytes(prepared, torch.bfloat16, GPU)
    assert half.output * 2 == sizes.output
    if name not in GRIDS and not is_pixtral:  # which keep rotations in float32
        in_units = vision_bytes(prepared, torch.float32, REFERENCE)
        assert (half.activations > in_units.activations / 2) == (spec.most_tokens > 96)


def _peak(profile: Any) -> int:
    """Return the most bytes that tensors had at once during a profile."""
    events = profile.profiler.kineto_results.events()
    changes = [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(changes)))


@pytest.mark.parametrize(
    "shape", [(3, 24, 20), (3, 28, 28), (1, 24, 24), (2, 3, 24, 24), (0, 3, 24, 24), (24, 24)]
)
def test_pixels_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    _, prepared = saved("gemma3", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    with pytest.raises(ValueError, match="at most 1 tiles of 3 x 24 x 24 are needed"):
        encoder.begin(torch.zeros(shape))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((16, 3, 4, 4), ()),
        ((16, 3, 4, 4), (4, 4)),
        ((16, 3, 4, 4), (2, 4, 2)),
        ((16, 3, 4, 4), (1, 4, 6)),
        ((12, 3, 4, 4), (1, 4, 3)),
        ((16, 3, 8, 8), (1, 4, 4)),
        ((248, 3, 4, 4), (1, 2, 124)),
        ((0, 3, 4, 4), (1, 0, 4)),
    ],
)
def test_grids_that_do_not_fit(
    shape: tuple[int, ...], grid: tuple[int, ...], tmp_path: Path
) -> None:
    _, prepared = saved("qwen2_5_vl", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    with pytest.raises(ValueError, match=r"patches of \[3, 4, 4\] are needed, for at most 61 rows"):
        encoder.begin(torch.zeros(shape), grid)


@pytest.mark.parametrize("shape", [(6, 3, 24, 24), (5, 3, 28, 28), (1, 3, 4, 4), (1, 3, 12, 12)])
def test_tiles_that_are_too_many_or_do_not_fit(shape: tuple[int, ...], tmp_path: Path) -> None:
    _, prepared = saved("idefics3", tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    with pytest.raises(ValueError, match="at most 5 tiles"):
        encoder.begin(torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pixtral", (1, 3, 28, 24)),
        ("pixtral", (1, 3, 148, 4)),
        ("pixtral", (2, 3, 8, 8)),
        ("pixtral", (1, 3, 2, 24)),
        ("mistral3", (1, 3, 20, 16)),
        ("mistral3", (1, 3, 16, 20)),
        ("mistral3", (1, 3, 4, 8)),
    ],
)
def test_proportions_that_do_not_fit(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """More patches than the largest image has, two tiles, no whole patch, no whole squares."""
    _, prepared = saved(name, tmp_path)
    encoder = load_vision(prepared, torch.float32, CPU)
    encoder.begin(torch.zeros(1, 3, 72, 8))
    with pytest.raises(ValueError, match="at most 1 tiles of 3 x 24 x 24 are needed"):
        encoder.begin(torch.zeros(shape))


TOWER = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
    "hidden_act": "gelu",
}
PIXTRAL = {"model_type": "pixtral"}
LLAVA, IDEFICS, GEMMA, MISTRAL = (
    f"{name}ForConditionalGeneration" for name in ("Llava", "Idefics3", "Gemma3", "Mistral3")
)


@pytest.mark.parametrize(
    ("architecture", "tower", "settings", "images", "message"),
    [
        (LLAVA, {"num_attention_heads": 5}, {}, {}, "num_attention_heads = 5: heads must divide"),
        (
            LLAVA,
            {"hidden_act": "mish"},
            {},
            {},
            "vision_config: hidden_act = 'mish': supported: 'g",
        ),
        (LLAVA, {"hidden_act": None}, {}, {}, "hidden_act = None: supported"),
        (LLAVA, {"patch_size": 25}, {}, {}, "image_size = 24: a whole number of at least 25"),
        (LLAVA, {"num_channels": 1}, {}, {}, "num_channels = 1: supported: 3"),
        (LLAVA, {"layer_norm_eps": "x"}, {}, {}, "layer_norm_eps = 'x': a number above 0"),
        (LLAVA, {}, {"projector_hidden_act": "tanh"}, {}, "projector_hidden_act = 'tanh'"),
        (LLAVA, {}, {"vision_feature_layer": 4}, {}, "vision_feature_layer = 4: numbers from -4"),
        (LLAVA, {}, {"vision_feature_layer": []}, {}, "vision_feature_layer = []: numbers"),
        (
            LLAVA,
            {},
            {"vision_feature_select_strategy": "last"},
            {},
            "vision_feature_select_strategy = 'last': supported: 'default', 'full'",
        ),
        (IDEFICS, {}, {"scale_factor": 4}, {}, "scale_factor = 4: it must divide the 6 patches"),
        (
            IDEFICS,
            {},
            {},
            {"max_image_size": {"longest_edge": 30}},
            "max_image_size = 30: the tower has image_size = 24",
        ),
        (
            IDEFICS,
            {},
            {},
            {"size": {"longest_edge": "x"}},
            "preprocessor_config.json: size: longest_edge = 'x'",
        ),
        (GEMMA, {}, {"mm_tokens_per_image": 8}, {}, "mm_tokens_per_image = 8: the square of a div"),
        (GEMMA, {}, {"mm_tokens_per_image": 16}, {}, "mm_tokens_per_image = 16: the square of a d"),
        ("QwenForConditionalGeneration", {}, {}, {}, "the vision part of Qwen"),
        (LLAVA, PIXTRAL, {"vision_feature_select_strategy": "default"}, {}, "supported: 'full'"),
        (LLAVA, PIXTRAL | {"hidden_act": "relu"}, {}, {}, "hidden_act = 'relu': the MLP has a gat"),
        (
            LLAVA,
            PIXTRAL | {"num_attention_heads": 8},
            {},
            {},
            "num_attention_heads = 8: a head has 6 numbers, a multiple of 4 is needed",
        ),
        (
            LLAVA,
            PIXTRAL | {"rope_parameters": {"rope_type": "yarn"}},
            {},
            {},
            "vision_config: rope_parameters: rope_type = 'yarn': supported: 'axial'",
        ),
        (MISTRAL, PIXTRAL, {"spatial_merge_size": 0}, {}, "spatial_merge_size = 0: a whole number"),
        (MISTRAL, PIXTRAL, {"vision_feature_layer": [1, 2]}, {}, "[1, 2]: one layer is supported"),
        (
            MISTRAL,
            PIXTRAL,
            {},
            {"size": {"longest_edge": "x"}},
            "preprocessor_config.json: size = {'longest_edge': 'x'}",
        ),
        (MISTRAL, PIXTRAL, {}, {"size": {"height": 24}}, "size = {'height': 24}"),
    ],
)
def test_refused_settings(
    architecture: str,
    tower: dict[str, Any],
    settings: dict[str, Any],
    images: dict[str, Any],
    message: str,
) -> None:
    given = {"projector_hidden_act": "gelu", "mm_tokens_per_image": 9, "spatial_merge_size": 2}
    given |= settings
    config = {"hidden_size": 64, "vision_config": TOWER | tower, "vision_projector": given}
    tiles = {"max_image_size": {"longest_edge": 24}, "size": {"longest_edge": 48}} | images
    with pytest.raises(ModelError) as error:
        vision_spec(architecture, config, tiles)
    assert message in str(error.value)


GRID_TOWER = {
    "depth": 3,
    "hidden_size": 48,
    "out_hidden_size": 64,
    "intermediate_size": 80,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "hidden_act": "silu",
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 2],
}
QWEN2, QWEN3 = (f"{name}ForConditionalGeneration" for name in ("Qwen2_5_VL", "Qwen3VL"))
MROPE = {"mrope_section": [3, 3, 2]}


@pytest.mark.parametrize(
    ("architecture", "tower", "rope", "images", "message"),
    [
        (QWEN2, {"num_heads": 5}, {}, {}, "num_heads = 5: hidden_size = 48 must be a multiple"),
        (QWEN2, {"out_hidden_size": 32}, {}, {}, "out_hidden_size = 32: the language model has"),
        (QWEN2, {"window_size": 7}, {}, {}, "window_size = 7: at least 8 pixels are needed"),
        (QWEN2, {"fullatt_block_indexes": [3]}, {}, {}, "fullatt_block_indexes = [3]: numbers of"),
        (QWEN2, {"hidden_act": "mish"}, {}, {}, "hidden_act = 'mish': supported"),
        (QWEN2, {}, {"mrope_section": None}, {}, "mrope_section = None: images need it"),
        (QWEN2, {}, {"mrope_section": [3, 3]}, {}, "mrope_section = [3, 3]: 3 whole numbers"),
        (QWEN2, {}, {"mrope_section": [3, 3, 3]}, {}, "mrope_section = [3, 3, 3]: 8 frequencies"),
        (
            QWEN2,
            {},
            {"mrope_interleaved": True},
            {},
            "mrope_interleaved = True: False is supported",
        ),
        (QWEN2, {}, {}, {"patch_size": 14}, "preprocessor_config.json: patch_size = 14: supported"),
        (
            QWEN2,
            {},
            {},
            {"merge_size": 1},
            "preprocessor_config.json: merge_size = 1: supported: 2",
        ),
        (QWEN2, {}, {}, {"max_pixels": "x"}, "preprocessor_config.json: longest_edge = 'x'"),
        (QWEN3, {}, {}, {}, "mrope_interleaved = None: True is supported"),
        (QWEN3, {"num_position_embeddings": 24}, {}, {}, "embeddings = 24: a square is needed"),
        (QWEN3, {"deepstack_visual_indexes": [2, 0]}, {}, {}, "deepstack_visual_indexes = [2, 0]"),
        (QWEN3, {"rope_parameters": {"rope_type": "x"}}, {}, {}, "rope_type = 'x': supported"),
    ],
)
def test_refused_settings_of_grids(
    architecture: str,
    tower: dict[str, Any],
    rope: dict[str, Any],
    images: dict[str, Any],
    message: str,
) -> None:
    config = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vision_config": GRID_TOWER | tower,
        "rope_parameters": MROPE | rope,
    }
    with pytest.raises(ModelError) as error:
        vision_spec(architecture, config, images)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("images", "tiles"),
    [
        ({"size": {"longest_edge": 48}}, 5),
        ({"size": {"longest_edge": 49}}, 10),
        ({"size": {"longest_edge": 24}}, 1),
        ({"size": {"longest_edge": 48}, "do_image_splitting": False}, 1),
        ({"size": {"longest_edge": 100_000}}, 171 * 171 + 1),
        ({}, 61 * 61 + 1),
    ],
)
def test_most_tiles(images: dict[str, Any], tiles: int) -> None:
    config = {"hidden_size": 64, "vision_config": TOWER}
    given = {"max_image_size": {"longest_edge": 24}} | images
    spec = vision_spec(IDEFICS, config, given)
    assert (spec.max_tiles, spec.max_embeds) == (tiles, 9 * tiles)


@pytest.mark.parametrize(
    ("images", "embeds"),
    [
        ({"size": {"longest_edge": 24}}, 9),
        ({"size": {"longest_edge": 25}}, 16),
        ({"size": {"height": 24, "width": 17}}, 9),
        ({}, 128 * 128),
    ],
)
def test_the_largest_image_of_mistral3(images: dict[str, Any], embeds: int) -> None:
    """Its sides are filled up to whole squares of patches; 1,024 pixels by default."""
    settings = {"spatial_merge_size": 2, "projector_hidden_act": "gelu"}
    tower = TOWER | PIXTRAL
    config = {"hidden_size": 64, "vision_config": tower, "vision_projector": settings}
    assert vision_spec(MISTRAL, config, images).max_embeds == embeds


def test_crops_of_gemma3() -> None:
    config = {
        "hidden_size": 64,
        "vision_config": TOWER,
        "vision_projector": {"mm_tokens_per_image": 9},
    }
    images = {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3}
    assert vision_spec(GEMMA, config, images).max_embeds == 36


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("remove", "tensor vision.tower.encoder.layers.1.mlp.fc1.weight of shape [80, 48] is miss"),
        ("cut", "tensor vision.tower.encoder.layers.1.mlp.fc1.weight has shape [79, 48], the conf"),
        ("add", "tensor vision.tower.encoder.layers.1.mlp.fc3.weight is no part of Idefics3ForCon"),
        ("layer", "tensor vision.tower.encoder.layers.7.mlp.fc1.weight is no part of Idefics3ForC"),
    ],
)
def test_tensors_that_do_not_fit(change: str, message: str, tmp_path: Path) -> None:
    save_vision_model("idefics3", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    name = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    match change:
        case "remove":
            del tensors[name]
        case "cut":
            tensors[name] = tensors[name][:-1].clone()
        case "add":
            tensors[name.replace("fc1", "fc3")] = tensors[name].clone()
        case "layer":
            tensors[name.replace("layers.1", "layers.7")] = tensors[name].clone()
    save_file(tensors, path, {"format": "pt"})
    prepared = prepare_vision_model(tmp_path / "model", tmp_path / "prepared")
    with pytest.raises(ModelError) as error:
        load_vision(prepared, torch.float32, CPU)
    assert message in str(error.value)


def test_a_damaged_file_of_the_image_processor(tmp_path: Path) -> None:
    _, prepared = saved("llava", tmp_path)
    Path(prepared.folder, "preprocessor_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"preprocessor_config.json: Expecting"):
        load_vision(prepared, torch.float32, CPU)


def test_the_list_of_families() -> None:
    assert {each.architecture for each in VISION_MODELS.values()} == set(VISION_FAMILIES)
    assert list(VISION_FAMILIES) == sorted(VISION_FAMILIES)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 3e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80])
@pytest.mark.parametrize("windows", [(), (0, 64, 90, 154, 333)])
def test_attention_of_a_tower(
    windows: tuple[int, ...], head_dim: int, dtype: torch.dtype, error: float
) -> None:
    """Against float64; each row has the same bits in any unit, of one tile or of several.

    With windows, which torch computes, in those of whole tiles.
    """
    num_tiles, num_tokens, num_heads = 3, 333, 4
    shape = num_tiles, num_tokens, 3, num_heads, head_dim
    qkv = torch.randn(shape, generator=torch.Generator().manual_seed(head_dim)).to(dtype)
    query, key, value = qkv.double().permute(2, 0, 3, 1, 4).unbind()
    bounds = windows or (0, num_tokens)
    parts = [
        F.scaled_dot_product_attention(*(each[:, :, first:end] for each in (query, key, value)))
        for first, end in pairwise(bounds)
    ]
    expected = torch.cat(parts, dim=2).transpose(1, 2).flatten(2)
    attention = CPU.tower_attention(num_heads, head_dim, dtype)
    assert attention.numbers_per_token >= 3 * num_heads * head_dim
    units = {
        "whole": [(slice(0, 3), slice(0, num_tokens))],
        "tiles": [(slice(0, 2), slice(0, num_tokens)), (slice(2, 3), slice(0, num_tokens))],
        "rows": [
            (slice(tile, tile + 1), slice(first, min(first + 50, num_tokens)))
            for tile in range(num_tiles)
            for first in range(0, num_tokens, 50)
        ],
    }
    found = {}
    for name, each in units.items():
        heads = attention.tiles(num_tiles, num_tokens, dtype, torch.device("cpu"))
        for tiles, rows in each:
            heads.write(tiles, rows, qkv[tiles, rows].reshape(-1, 3 * num_heads * head_dim))
        result = torch.empty(num_tiles, num_tokens, num_heads * head_dim, dtype=dtype)
        for tiles, rows in each:
            own = result[tiles, rows]
            own.copy_(heads.attend(tiles, rows, windows).view(own.shape))
        found[name] = result
    assert_equal_rows(found["whole"].double(), expected, error)
    assert torch.equal(found["tiles"], found["whole"])
    assert windows or torch.equal(found["rows"], found["whole"])
    assert_equal_rows(found["rows"].double(), expected, error)
