"""Vision parts over grids in GGUF files, against transformers and against the same folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.environment import HostEnvironment
from deploy.models import gguf_file, prepared_folder, store
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, VisionFacts
from tests.deploy.test_flags import built
from tests.deploy.test_prepare import Recorder, around
from tests.fakes.devices import CPU
from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.tiny_vision import (
    GRIDS,
    IMAGE_ID,
    VOCABULARY,
    prepare_vision_model,
    save_vision_model,
)
from tests.fakes.vision_ggufs import TEXTS, write_grid_mmproj, write_language_model
from worker.loader.vision import load_vision
from worker.models.registry import read_config

pytestmark = pytest.mark.suite("long")

__all__ = ["around"]
PAIR = ("tiny.gguf", "mmproj-tiny-f16.gguf")
WINDOWS = {"vision_config": {"window_size": 112}}
"""Of Qwen2.5-VL's tower; its files do not say."""


def write_pair(name: str, folder: Path, **options: Any) -> tuple[Any, PreparedModel]:
    """Write a folder and its GGUF pair; return transformers' model and what is read of the pair.

    options: of `write_grid_mmproj`.
    """
    changes = WINDOWS if name == "qwen2_5_vl" else {}
    model = save_vision_model(name, folder / "source", **changes)
    reference = prepare_vision_model(folder / "source", folder / "reference")
    (folder / "gguf").mkdir()
    write_language_model(name, model, read_config(reference), folder / "gguf/tiny.gguf")
    write_grid_mmproj(folder / "source", folder / "gguf/mmproj-tiny-f16.gguf", **options)
    return model, read(folder)


def read(folder: Path) -> PreparedModel:
    target = folder / "prepared"
    target.mkdir(exist_ok=True)
    contents = gguf_file.read(str(folder / "gguf/tiny.gguf"), lambda what: None)
    names = {"source": str(folder), "target": str(target), "final": str(target)}
    return prepared_folder.write(contents, name="tiny", **names)


def rows_of(prepared: PreparedModel, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    encoding = load_vision(prepared, torch.float32, CPU).begin(pixels, grid)
    encoding.advance(1.0)
    return encoding.output


def expected_rows(model: Any, pixels: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of transformers; those of DeepStack beside the others."""
    frames = pixels[:, :, None].expand(-1, -1, 2, -1, -1).reshape(len(pixels), -1)
    with torch.inference_mode():
        found = model.get_image_features(frames, torch.tensor([grid]))
    parts = found.pooler_output, *(getattr(found, "deepstack_features", None) or ())
    return torch.cat([torch.cat(list(part)) for part in parts], dim=1)


@pytest.mark.parametrize("name", GRIDS)
def test_rows_of_images(name: str, tmp_path: Path) -> None:
    """An image of several windows; in Qwen2.5-VL of 14 x 14 squares."""
    model, found = write_pair(name, tmp_path)
    assert found.vision == VisionFacts(
        architecture=type(model).__name__,
        image_token_id=IMAGE_ID,
        max_embeds=found.vision.max_embeds,
        is_bidirectional=False,
        mrope_merge=2,
    )
    assert found.vision.max_embeds >= 4096
    assert found.unloaded_parts == ()
    grid = (1, 36, 20)
    pixels = torch.randn(36 * 20, 3, 4, 4)
    expected = expected_rows(model, pixels, grid)
    assert (rows_of(found, pixels, grid) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_names_of_older_files(name: str, tmp_path: Path) -> None:
    """The first product of an MLP was called ffn_down."""
    model, found = write_pair(name, tmp_path, swapped=True)
    pixels, grid = torch.randn(48, 3, 4, 4), (1, 8, 6)
    expected = expected_rows(model, pixels, grid)
    assert (rows_of(found, pixels, grid) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(("kind", "most"), [("F16", 3e-3), ("BF16", 3e-2)])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_types_of_files(name: str, kind: str, most: float, tmp_path: Path) -> None:
    model, found = write_pair(name, tmp_path, kind=kind)
    pixels, grid = torch.randn(48, 3, 4, 4), (1, 8, 6)
    expected = expected_rows(model, pixels, grid)
    assert (rows_of(found, pixels, grid) - expected).abs().max() < most * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_5_moe"])
def test_settings_are_those_of_the_folder(name: str, tmp_path: Path) -> None:
    """Which frequencies rotate by which position, markers, and the image processor."""
    _, found = write_pair(name, tmp_path)
    reference = json.loads((tmp_path / "reference/config.json").read_text())
    config = read_config(found)
    for key in ("mrope_section", "mrope_interleaved"):
        expected = reference["rope_parameters"].get(key)
        assert config["rope_parameters"].get(key) == expected
    assert config["vision_projector"] == {
        "vision_start_token_id": VOCABULARY.index("<start_of_image>"),
        "vision_end_token_id": VOCABULARY.index("<end_of_image>"),
    }
    assert config["vision_projector"] == reference["vision_projector"]
    images = json.loads(Path(found.folder, "preprocessor_config.json").read_text())
    assert images == {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 8 * 64, "longest_edge": 4096 * 64},
        "image_mean": pytest.approx([0.48145466, 0.4578275, 0.40821073], rel=1e-6),
        "image_std": pytest.approx([0.26862954, 0.26130258, 0.27577711], rel=1e-6),
    }


def test_limits_of_the_file(tmp_path: Path) -> None:
    write_pair("qwen3_vl", tmp_path, image_min_pixels=640, image_max_pixels=6400)
    images = json.loads((tmp_path / "prepared/preprocessor_config.json").read_text())
    assert images["size"] == {"shortest_edge": 640, "longest_edge": 6400}


def test_a_vision_part_of_another_language_model(tmp_path: Path) -> None:
    """Qwen2-VL's beside Qwen3-VL's text."""
    write_pair("qwen2_vl", tmp_path)
    save_vision_model("qwen3_vl", tmp_path / "other")
    write_grid_mmproj(tmp_path / "other", tmp_path / "gguf/mmproj-tiny-f16.gguf")
    found = read(tmp_path)
    assert (found.vision, found.unloaded_parts) == (None, ("vision",))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_5_vl", {"n_wa_pattern": None}, "clip.vision.n_wa_pattern = None"),
        ("qwen2_5_vl", {"window_size": 4}, "window_size = 4: at least 8 pixels"),
        ("qwen3_vl", {"attention.head_count": 7}, "num_heads = 7"),
        ("qwen3_vl", {"spatial_merge_size": 0}, "clip.vision.spatial_merge_size = 0"),
        ("qwen2_vl", {"block_count": 1 << 30}, "more than 1024 layers"),
        ("qwen2_vl", {"patch_size": 0}, "clip.vision.patch_size = 0"),
        ("qwen2_vl", {"embedding_length": 0}, "clip.vision.embedding_length = 0"),
    ],
)
def test_settings_that_are_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as error:
        write_pair(name, tmp_path, **changes)
    assert message in str(error.value)


def test_a_tensor_with_a_part_that_does_not_fit(tmp_path: Path) -> None:
    _, found = write_pair("qwen2_vl", tmp_path, block_count=3)
    with pytest.raises(ModelError, match=r"blocks\.3\."):
        load_vision(found, torch.float32, CPU)


def test_a_named_file_and_none(tmp_path: Path, around: HostEnvironment) -> None:
    """The file of the flag is read in place of the one beside the model, and must fit."""
    write_pair("qwen2_vl", tmp_path)
    model, elsewhere = tmp_path / "gguf/tiny.gguf", tmp_path / "vision.gguf"

    def prepared(mmproj: str | None) -> PreparedModel:
        return store.prepared_model(str(model), around, Recorder(), mmproj=mmproj)

    assert prepared(None).vision is not None
    (tmp_path / "gguf/mmproj-tiny-f16.gguf").rename(elsewhere)
    assert prepared(None).vision is None
    assert prepared(str(elsewhere)).vision is not None
    elsewhere.rename(tmp_path / "gguf/mmproj-tiny-f16.gguf")
    assert (prepared("").vision, prepared("").unloaded_parts) == (None, ())
    for path, reason in ((model, "is no vision part that tokend reads"), (elsewhere, "no such")):
        with pytest.raises(ModelError, match=f"--mmproj {path}.*{reason}"):
            prepared(str(path))


def test_a_pair_of_the_hub(tmp_path: Path) -> None:
    """tokend pull, list and rm of a model whose vision part lies in the folder above it."""
    write_pair("qwen2_vl", tmp_path)
    model, vision = ((tmp_path / "gguf" / each).read_bytes() for each in PAIR)
    server = HubServer()
    files = {"Q8_0/x-Q8_0.gguf": model, "mmproj-F32.gguf": b"GGUF", "mmproj-F16.gguf": vision}
    server.repositories["org/name"] = Repository(files)
    folders = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")}
    variables = {**os.environ, **folders, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0"}

    def tokend(*words: str) -> str:
        program = [sys.executable, "-P", "-m", "deploy.cli", *words]
        done = subprocess.run(program, env=variables, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        assert "org/name:Q8_0 is prepared" in tokend("pull", "org/name:Q8_0", "--no-mmproj")
        assert not [each for each in server.downloads() if "mmproj" in each]
        tokend("pull", "org/name:Q8_0")
        environment = HostEnvironment.of(variables)
        found = store.prepared_model("org/name:Q8_0", environment, Recorder())
        assert found.vision is not None
        assert store.prepared_model("org/name", environment, Recorder(), mmproj="").vision is None
        size = len(model) + len(vision)
        assert f"{size / 1e6:.1f} MB" in tokend("list")
        assert f"{size / 1e6:.1f} MB" in tokend("rm", "org/name:Q8_0")
    finally:
        server.close()


def test_flags() -> None:
    assert built().model.mmproj_file is None
    assert built("--no-mmproj").model.mmproj_file == ""
    assert built("--mmproj", "x.gguf").model.mmproj_file == "x.gguf"


def test_all_language_models_have_files() -> None:
    assert set(TEXTS) == set(GRIDS)
