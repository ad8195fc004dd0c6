"""Models that read images, through the steps of a runner, against transformers in float32."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from deploy.models import hf_folder, prepared_folder
from proto import PROTOCOL_VERSION
from proto.messages.lifecycle import InitializeCache
from proto.messages.multimodal import EncoderSlice, MultiModalFeature, SharedPixels
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.settings.config import DeviceConfig, ModelConfig, ServeConfig
from tests.fakes.devices import CPU, REFERENCE
from tests.fakes.tiny_vision import (
    IMAGE_ID,
    VISION_MODELS,
    random_image,
    reference_inputs,
    save_vision_model,
)
from tests.fakes.vision import blocks_of, generate, going_on, new_request, step_of, whole
from worker.host.device import HostDevice
from worker.loaded_model import LoadedModel, load
from worker.parallel.group import RankGroup
from worker.plan.memory_plan import plan_memory
from worker.runner_builder import RunnerBuilder
from worker.step.model_runner import ModelRunner

NUM_PAGES = 30
BLOCK = 16
NUM_OUTPUTS = 6
SIZES = ((60, 40), (30, 70))
"""Of the images; the tiled models cut the first into two tiles beside the whole."""


class Case:
    """A tiny vision model, and a prompt with two images between text."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder / "pixels"
        self.folder.mkdir()
        self.model = save_vision_model(name, folder / "model")
        self.prepared = prepare(folder / "model", folder / "prepared")
        assert self.prepared.vision is not None
        self.is_bidirectional = self.prepared.vision.is_bidirectional
        mark = VISION_MODELS[name].placeholder
        self.images = [random_image(number, *size) for number, size in enumerate(SIZES)]
        self.inputs = reference_inputs(name, self.images, f"one {mark}two {mark} and text")
        self.prompt: list[int] = self.inputs["input_ids"][0].tolist()
        self.features = list(self._features(mark))

    def _features(self, mark: str) -> Iterator[MultiModalFeature]:
        positions = iter(i for i, token in enumerate(self.prompt) if token == IMAGE_ID)
        for number, image in enumerate(self.images):
            alone = reference_inputs(self.name, [image], mark)
            pixels: torch.Tensor = alone["pixel_values"][0]
            pixels.numpy().astype("<f4").tofile(self.folder / f"0.{number}")
            own = [next(positions) for each in alone["input_ids"][0] if each == IMAGE_ID]
            yield MultiModalFeature(
                offset=own[0],
                length=own[-1] + 1 - own[0],
                num_embeds=len(own),
                mm_hash=bytes([number]) * 32,
                pixels=SharedPixels(f"0.{number}", tuple(pixels.shape)),
            )

    @torch.no_grad()
    def expected(self) -> list[int]:
        """Greedy tokens of transformers, without a cache."""
        inputs = dict(self.inputs)
        tokens: list[int] = []
        for _ in range(NUM_OUTPUTS):
            logits = self.model(**inputs, use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
            for key, value in (("input_ids", tokens[-1]), ("attention_mask", 1)):
                inputs[key] = torch.cat((inputs[key], torch.tensor([[value]])), dim=1)
            if "token_type_ids" in inputs:
                types = inputs["token_type_ids"]
                inputs["token_type_ids"] = torch.cat((types, types.new_zeros(1, 1)), dim=1)
        return tokens

    def config(self, dtype: str = "float32") -> ServeConfig:
        return ServeConfig(
            model=ModelConfig(model="tiny", dtype=dtype), device=DeviceConfig(device="cpu")
        )

    def load(self, device: HostDevice = CPU) -> LoadedModel:
        return load(self.config(), self.prepared, device, RankGroup(), lambda message: None)

    def runner(self, loaded: LoadedModel) -> ModelRunner:
        """Return the runner of a new engine."""
        injector = FaultInjector.of((), "worker", 0, 0)
        builder = RunnerBuilder(
            self.config(), loaded, injector, lambda message: None, str(self.folder)
        )
        num_blocks = 1 + 2 * NUM_PAGES * loaded.layout.num_groups
        message = InitializeCache(PROTOCOL_VERSION, 1, num_blocks, BLOCK, 512)
        device = loaded.device
        assert isinstance(device, HostDevice)
        return device.model_runner(builder.parts(message))

    def begin(self, loaded: LoadedModel, seq_id: int = 1, **fields: Any) -> Any:
        blocks = blocks_of(seq_id, loaded.layout.num_groups, NUM_PAGES)
        return new_request(
            seq_id, self.prompt, mm_features=self.features, block_ids=blocks, **fields
        )

    def ends(self, size: int) -> list[int]:
        """Return where chunks of about this size end; in Gemma 3 never inside an image."""
        ends = [0]
        while ends[-1] < len(self.prompt):
            end = min(ends[-1] + size, len(self.prompt))
            for image in self.features if self.is_bidirectional else ():
                if image.offset < end < image.end:
                    end = image.offset if image.offset > ends[-1] else image.end
            ends.append(end)
        return ends

    def in_chunks(self, loaded: LoadedModel, size: int) -> list[SchedulerOutput]:
        """Steps with chunks; before each some that only encode, in slices, what it needs."""
        steps = []
        encoded: set[int] = set()
        for start, end in pairwise(self.ends(size)):
            for index, image in enumerate(self.features):
                if image.offset < end and index not in encoded:
                    encoded.add(index)
                    for cut in pairwise((0, 1, 4, image.num_embeds)):
                        part = EncoderSlice(1, index, *cut, image)
                        steps.append(step_of(scheduled_encoder_inputs=[part]))
            if start == 0:
                request = self.begin(loaded, num_scheduled_tokens=end)
                steps.append(step_of([request]))
            else:
                steps.append(going_on(1, start, end - start))
        return steps


def prepare(folder: Path, target: Path) -> PreparedModel:
    target.mkdir()
    return prepared_folder.write(
        hf_folder.read(str(folder), lambda what: None),
        name="tiny",
        source=str(folder),
        target=str(target),
        final=str(target),
    )


@pytest.mark.parametrize("name", VISION_MODELS)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """In one step, and in chunks of any size with slices of the images between."""
    case = Case(name, tmp_path)
    expected = case.expected()
    for device in (CPU, REFERENCE):
        loaded = case.load(device)
        slices = [whole(index, each) for index, each in enumerate(case.features)]
        step = step_of([case.begin(loaded)], scheduled_encoder_inputs=slices)
        found = generate(case.runner(loaded), [step], len(case.prompt), NUM_OUTPUTS)
        assert found == expected, device.name
        for size in (4, 11, 40):
            steps = case.in_chunks(loaded, size)
            found = generate(case.runner(loaded), steps, len(case.prompt), NUM_OUTPUTS)
            assert found == expected, (device.name, size)


def test_a_new_engine_starts_without_outputs(tmp_path: Path) -> None:
    """A second engine gets NaN for an image that only the first has encoded."""
    case = Case("gemma3", tmp_path)
    loaded = case.load()
    slices = [whole(index, each) for index, each in enumerate(case.features)]
    first, second = case.runner(loaded), case.runner(loaded)
    first.execute(step_of([case.begin(loaded)], scheduled_encoder_inputs=slices))
    assert second.execute(step_of([case.begin(loaded)])).failed_seq_ids == [1]


@pytest.mark.parametrize("name", ["llava", "smolvlm", "gemma3"])
def test_memory_of_the_vision_part_is_planned(name: str, tmp_path: Path) -> None:
    """Its weights as they are, in either dtype; its outputs and activations as work space."""
    case = Case(name, tmp_path)
    without = plan_memory(case.config(), replace(case.prepared, vision=None), CPU)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        plan = plan_memory(case.config(dtype), case.prepared, CPU)
        tower = sum(
            weight.numel()
            for key, weight in case.model.named_parameters()
            if "language_model" not in key and "lm_head" not in key
        )
        # Files have layers behind the last one that is read, which are not loaded.
        assert 0.5 * tower * itemsize < plan.vision_bytes <= tower * itemsize
        assert plan.work["encoding an image"] > 0
        assert plan.work["encoder outputs"] > 0
        assert plan.to_dict()["vision_bytes"] == plan.vision_bytes
        assert any("vision part" in line for line in plan.table())
        if dtype == "float32":
            summands = plan.work["encoding an image"] + plan.work["encoder outputs"]
            assert without.left - plan.left >= plan.vision_bytes
            assert plan.work.total() - without.work.total() == summands
    assert without.vision_bytes == 0
