"""Adapters that change the part that encodes images, against transformers with merged weights."""

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.errors import ModelError
from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.settings.config import LoRAConfig
from tests.fakes.adapters import SEVEN, Served, load_in_thread, make_adapter, merged
from tests.fakes.lora import lora_request
from tests.fakes.tiny_vision import VISION_MODELS, pixels_of
from tests.fakes.vision import step_of
from tests.worker.models.test_vision import (
    assert_equal_rows,
    encode,
    features,
    image,
    inputs_of,
    saved,
)
from tests.worker.test_images import Case
from worker.step.encoder_cache import EncoderCache

pytestmark = pytest.mark.suite("long")

PARTS = ("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "connector.")
"""In names of modules that encode images."""
NEAR = 1e-4


def products(model: Any) -> list[str]:
    """Return what "all-linear" means in the part that encodes images, and attention beside it.

    The pooling of SigLIP, which no model for images reads, has an attention that PEFT cannot wrap.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and ".head.attention" not in name
        and (any(part in name for part in PARTS) or name.endswith(("q_proj", "v_proj")))
    ]


def make(model: Any, folder: Path, **settings: Any) -> Path:
    return make_adapter(model, folder, **{"target_modules": products(model), **settings})


@pytest.mark.parametrize("name", VISION_MODELS)
def test_rows_of_images_are_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    """In slices with the same bits; without the adapter they are the model's own."""
    model, prepared = saved(name, tmp_path)
    served, path = Served(prepared), make(model, tmp_path / "adapter")
    assert served.load(path, 1).changes_images
    inputs = inputs_of(name, [image("tall")])
    pixels = pixels_of(inputs)
    own, expected = (features(each, inputs) for each in (model, merged(model, path)))
    assert (own - expected).abs().max() > 0.05 * own.abs().max(), "the adapter changes little"
    assert served.vision is not None
    adapter = served.store.of_image(1, 1.0)
    assert adapter is not None
    with adapter.encoding():
        whole, in_slices = (
            encode(served.vision, pixels, *shares) for shares in ((), (0.1, 0.5, 0.6))
        )
    assert_equal_rows(whole, expected, NEAR)
    assert torch.equal(in_slices, whole)
    assert_equal_rows(encode(served.vision, pixels), own)


def test_a_scale_is_a_factor_of_the_effect(tmp_path: Path) -> None:
    model, prepared = saved("mistral3", tmp_path)
    served = Served(prepared)
    served.load(make(model, tmp_path / "adapter", lora_alpha=8), 1)
    half = merged(model, make(model, tmp_path / "half", lora_alpha=4))
    inputs = inputs_of("mistral3", [image("wide")])
    assert served.vision is not None
    adapter = served.store.of_image(1, 0.5)
    assert adapter is not None
    with adapter.encoding():
        found = encode(served.vision, pixels_of(inputs))
    assert_equal_rows(found, features(half, inputs), NEAR)


def test_an_adapter_of_the_language_model_changes_no_image(tmp_path: Path) -> None:
    model, prepared = saved("qwen2_5_vl", tmp_path)
    path = make(model, tmp_path / "adapter", target_modules=SEVEN[:4])
    assert not Served(prepared).load(path).changes_images


def test_an_image_keeps_its_adapter_until_it_is_encoded(tmp_path: Path) -> None:
    model, prepared = saved("llava", tmp_path)
    served, path = Served(prepared), make(model, tmp_path / "adapter")
    served.load(path, 1)
    inputs = inputs_of("llava", [image("tall")])
    pixels, grid = pixels_of(inputs)
    expected = features(merged(model, path), inputs)
    pixels.numpy().astype("<f4").tofile(tmp_path / "0.1")
    shared, count = SharedPixels("0.1", tuple(pixels.shape)), len(expected)
    feature = MultiModalFeature(0, count, count, b"1" * 32, shared, grid)
    assert served.vision is not None
    cache = EncoderCache(served.vision, str(tmp_path), served.store)

    def run(start: float, end: float) -> None:
        part = EncoderSlice(1, 0, start, end, feature, lora_int_id=1)
        assert not cache.run_step(step_of(scheduled_encoder_inputs=[part])).failed_mm_hashes

    run(0, 4)
    served.store.drop(1)
    run(4, count)
    found = torch.from_numpy(cache.rows(feature.mm_hash, slice(0, count), expected.shape[1]))
    assert_equal_rows(found, expected, NEAR)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_requests_with_and_without_an_adapter_share_no_image(name: str, tmp_path: Path) -> None:
    """The same prompt and images, in chunks, and again from the caches."""
    case = Case(name, tmp_path)
    case.lora = LoRAConfig(enable_lora=True)
    path = make(case.model, tmp_path / "adapter")
    loaded = case.load()
    assert loaded.adapters is not None
    answer = load_in_thread(loaded.adapters, path, 1)
    assert answer.error is None
    assert answer.changes_images
    adapted = copy(case)
    adapted.model = merged(case.model, path)
    expected, own = adapted.expected(), case.expected()
    assert expected != own
    harness = case.engine(loaded, lora=case.lora, max_num_batched_tokens=50)
    fields = {"lora_request": lora_request(1, changes_images=True)}
    for _ in range(2):
        requests = [*case.add(harness, **fields), *case.add(harness), *case.add(harness, **fields)]
        harness.run()
        assert [harness.tokens_of(each) for each in requests] == [expected, own, expected]
    assert min(each.num_cached_tokens for each in requests) > 0


def refused(prepared: Any, path: Path, **limits: Any) -> str:
    with pytest.raises(ModelError) as raised:
        Served(prepared, **limits).load(path)
    return str(raised.value)


def test_what_a_vision_part_does_not_have_is_refused_by_its_tensor(tmp_path: Path) -> None:
    """DoRA, whole weights, a layer that the tower lacks, and what a setting leaves out."""
    model, prepared = saved("smolvlm", tmp_path)
    dora = make(model, tmp_path / "dora", use_dora=True)
    only = "lora_magnitude_vector: a vision part has adapters of lora_A and lora_B alone"
    assert only in refused(prepared, dora)
    saves = make(model, tmp_path / "saves", target_modules=SEVEN[:2], modules_to_save=["connector"])
    assert "connector.modality_projection.proj.weight" in refused(prepared, saves)
    path = make(model, tmp_path / "adapter")
    limited = refused(prepared, path, modules=("q_proj", "v_proj"))
    assert "connector.modality_projection.proj.lora_" in limited
    assert "--lora-target-modules q_proj, v_proj leave out" in limited
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    moved = "vision_model.encoder.layers.2."
    save_file(
        {name.replace(moved, moved.replace("2", "7")): tensors[name] for name in tensors}, file
    )
    assert moved.replace("2", "7") in refused(prepared, path)
    save_file({name: tensors[name] for name in tensors if f"{moved}mlp.fc1" not in name}, file)
    assert f"{moved}mlp.fc1.lora_A.weight is missing" in refused(prepared, path)
