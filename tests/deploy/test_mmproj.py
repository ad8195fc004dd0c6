"""Vision parts in GGUF files beside a model's: against transformers, and those that do not fit."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from deploy.environment import HostEnvironment
from deploy.models import gguf_file, gguf_parts, prepared_folder, store
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, VisionFacts
from tests.deploy.test_prepare import Recorder, around
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import spec_of
from tests.fakes.tiny_model_files import write_gguf
from tests.fakes.tiny_vision import (
    IMAGE_ID,
    VISION_MODELS,
    VOCABULARY,
    save_vision_model,
    write_mmproj,
)
from worker.loader.vision import load_vision, read_vision_spec
from worker.loader.weights import load_model

__all__ = ["around"]
TEXT = {"hidden_size": 32, "head_dim": 8}
SOFT_TOKEN = "<image_soft_token>"
NAMES = ("gemma3", "idefics3", "llava", "pixtral", "mistral3")
IMAGE_TOKENS = {"gemma3": SOFT_TOKEN, "pixtral": "[IMG]", "mistral3": "[IMG]"}
TILES = {"idefics3": 5}


def write_model(
    name: str,
    folder: Path,
    text: str = "",
    model_settings: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """Write a GGUF model and its vision part; return the model of transformers with the latter.

    text: the architecture of the language model; "" for the right one. model_settings: changes of
    the configuration. changes: of the metadata of the vision part.
    """
    settings = model_settings or {}
    model = save_vision_model(name, folder / "source", text_config=TEXT, **settings)
    folder = folder / "gguf"
    folder.mkdir()
    text = text or ("gemma3" if name == "gemma3" else "llama")
    own = IMAGE_TOKENS.get(name, "<image>")
    tokens = tuple(own if token == "<image>" else token for token in VOCABULARY)
    write_gguf(folder / "tiny.gguf", architecture=text, tokens=tokens)
    write_mmproj(folder.parent / "source", folder / "mmproj-tiny-f16.gguf", **changes)
    return model


def read(folder: Path) -> prepared_folder.ModelContents:
    return gguf_file.read(str(folder / "gguf/tiny.gguf"), lambda what: None)


def prepared(folder: Path) -> PreparedModel:
    target = folder / "prepared"
    target.mkdir()
    names = {"source": str(folder), "target": str(target), "final": str(target)}
    return prepared_folder.write(read(folder), name="tiny", **names)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_images(name: str, tmp_path: Path) -> None:
    model = write_model(name, tmp_path)
    found = prepared(tmp_path)
    assert found.vision == VisionFacts(
        architecture=type(model).__name__,
        image_token_id=IMAGE_ID,
        max_embeds=TILES.get(name, 1) * VISION_MODELS[name].embeds,
        is_bidirectional=name == "gemma3",
    )
    assert found.unloaded_parts == ()
    height = 16 if IMAGE_TOKENS.get(name) == "[IMG]" else 24
    pixels = torch.randn(1, 3, height, 24)
    encoding = load_vision(found, torch.float32, CPU).begin(pixels)
    encoding.advance(1.0)
    sizes = {"image_sizes": torch.tensor([[height, 24]])} if height < 24 else {}
    with torch.inference_mode():
        given = pixels[None] if name == "idefics3" else pixels
        (expected,) = model.get_image_features(given, **sizes).pooler_output
    assert (encoding.output - expected).abs().max() < 1e-5 * expected.abs().max()
    if name != "gemma3":
        load_model(found, spec_of(found), torch.float32, CPU, lambda fraction: None)


@pytest.mark.parametrize("text", ["llama", "mistral3"])
def test_language_models_of_mistral3(text: str, tmp_path: Path) -> None:
    """Older and newer converters have different names for them."""
    write_model("mistral3", tmp_path, text)
    assert prepared(tmp_path).vision is not None


@pytest.mark.parametrize("bias", [True, False])
def test_a_projector_with_and_without_biases(bias: bool, tmp_path: Path) -> None:
    model = write_model("pixtral", tmp_path, model_settings={"multimodal_projector_bias": bias})
    pixels = torch.randn(1, 3, 8, 12)
    encoding = load_vision(prepared(tmp_path), torch.float32, CPU).begin(pixels)
    encoding.advance(1.0)
    with torch.inference_mode():
        (expected,) = model.get_image_features(pixels, image_sizes=[[8, 12]]).pooler_output
    assert (encoding.output - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_the_processor(name: str, tmp_path: Path) -> None:
    """Of the published preprocessor_config.json those that differ between models."""
    write_model(name, tmp_path)
    images, processor = (json.loads(each) for each in read(tmp_path).files.values())
    assert images["image_mean"] == images["image_std"] == [0.5, 0.5, 0.5]
    if name in ("pixtral", "mistral3"):
        assert images["image_processor_type"] == "PixtralImageProcessor"
        assert images["size"] == {"longest_edge": 24}
        assert images["patch_size"] == {"height": 4, "width": 4}
        assert processor == {
            "processor_class": "PixtralProcessor",
            "image_token": "[IMG]",
            "patch_size": 4,
            "spatial_merge_size": 2 if name == "mistral3" else 1,
        }
    elif name == "llava":
        assert images["image_processor_type"] == "CLIPImageProcessor"
        assert images["size"] == {"shortest_edge": 24}
        assert images["crop_size"] == {"height": 24, "width": 24}
        assert processor == {"processor_class": "LlavaProcessor", **VISION_MODELS[name].settings}
    elif name == "gemma3":
        assert images["image_processor_type"] == "Gemma3ImageProcessor"
        assert images["size"] == {"height": 24, "width": 24}
        assert processor == {"processor_class": "Gemma3Processor", "image_seq_length": 9}
    else:
        assert images["image_processor_type"] == "Idefics3ImageProcessor"
        assert images["size"] == {"longest_edge": 48}
        assert images["max_image_size"] == {"longest_edge": 24}
        assert processor == {"processor_class": "Idefics3Processor", "image_seq_len": 9}


def test_names_of_older_files(tmp_path: Path) -> None:
    """The first product of an MLP was called ffn_down."""
    write_model("idefics3", tmp_path)
    spec = read_vision_spec(prepared(tmp_path))
    path = tmp_path / "gguf/mmproj-tiny-f16.gguf"
    data = path.read_bytes()
    for new, old in (("ffn_up", "ffn_xx"), ("ffn_down", "ffn_up"), ("ffn_xx", "ffn_down")):
        data = _renamed(data, new, old)
    path.write_bytes(data)
    shapes = {each.name: each.shape for each in read(tmp_path).tensors.tensors}
    wanted = {name: shape for name, shape in spec.weights().items() if ".mlp." in name}
    assert {name: shapes[name] for name in wanted} == wanted


def _renamed(data: bytes, old: str, new: str) -> bytes:
    """Return a GGUF file with other names of tensors, whose data begins at the same byte."""
    for layer in range(3):
        for kind in ("weight", "bias"):
            names = [f"v.blk.{layer}.{each}.{kind}".encode() for each in (old, new)]
            packed = [len(name).to_bytes(8, "little") + name for name in names]
            data = data.replace(*packed)
    return data


@pytest.mark.parametrize(
    ("text", "changes"),
    [("qwen2", {}), ("", {"projection_dim": 64}), ("", {"projection_dim": None})],
)
def test_a_vision_part_of_another_model(text: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_model("idefics3", tmp_path, text, **changes)
    contents = read(tmp_path)
    assert contents.vision is None
    assert contents.unloaded_parts == ("vision",)
    assert len(contents.tensors.files) == 1


@pytest.mark.parametrize("tensor", ["model.image_newline", "mm.3.weight"])
def test_other_kinds_of_llava(tensor: str, tmp_path: Path) -> None:
    """Of LLaVA 1.6, with tiles, and with norms in the projector."""
    write_model("llava", tmp_path)
    assert read(tmp_path).vision is not None
    path = tmp_path / "gguf/mmproj-tiny-f16.gguf"
    write_mmproj(tmp_path / "source", path, tensors=(tensor,))
    assert (read(tmp_path).vision, read(tmp_path).unloaded_parts) == (None, ("vision",))


@pytest.mark.parametrize("projector", ["qwen2vl_merger", "mlp"])
def test_a_projector_that_is_not_supported(projector: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokens=VOCABULARY)
    writer = gguf.GGUFWriter(tmp_path / "mmproj.gguf", "clip")
    writer.add_clip_projector_type(projector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    contents = gguf_file.read(str(tmp_path / "tiny.gguf"), lambda what: None)
    assert (contents.vision, contents.unloaded_parts) == (None, ("vision",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "mmproj-tiny-f16.gguf has no clip.vision.block_count"),
        ({"projector.scale_factor": 0}, "clip.vision.projector.scale_factor = 0"),
        ({"projector.scale_factor": 4}, "scale_factor = 4: it must divide the 6 patches"),
        ({"patch_size": 0}, "clip.vision.patch_size = 0: a whole number is needed"),
        ({"attention.head_count": 5}, "num_attention_heads = 5: heads must divide hidden_size"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model("idefics3", tmp_path, **changes)
    with pytest.raises(ModelError) as error:
        read(tmp_path)
    assert message in str(error.value)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"mmproj-F16\.gguf"):
        gguf_file.read(str(tmp_path / "tiny.gguf"), lambda what: None)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ((), None),
        (("mmproj-F32.gguf",), "mmproj-F32.gguf"),
        (("mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-F32.gguf"), "mmproj-F16.gguf"),
        (("mmproj-tiny-Q8_0.gguf", "tiny.mmproj-f32.gguf"), "mmproj-tiny-Q8_0.gguf"),
        (("mmproj-x-f32.gguf", "mmproj-x-bf16.gguf", "mmproj-x-q8_0.gguf"), "mmproj-x-bf16.gguf"),
        (("mmproj.json",), None),
    ],
)
def test_which_file_is_read(names: tuple[str, ...], chosen: str | None, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    expected = None if chosen is None else str(tmp_path / chosen)
    assert gguf_parts.vision_file(str(tmp_path / "tiny.gguf")) == expected


def test_another_vision_part_is_another_model(tmp_path: Path, around: HostEnvironment) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    keys = set()
    for content in (None, b"one", b"another"):
        if content is not None:
            (tmp_path / "mmproj-F16.gguf").write_bytes(content)
        keys.add(store.locate(str(tmp_path), around, Recorder()).key)
    assert len(keys) == 3
