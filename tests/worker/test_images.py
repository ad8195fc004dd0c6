"""Models that read images, through the steps of a runner, against transformers in float32."""

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from deploy.models import gguf_file, hf_folder, prepared_folder
from deploy.models.prepared_folder import ModelContents
from engine_core.request import Request
from proto import PROTOCOL_VERSION
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import InitializeCache
from proto.messages.multimodal import (
    EncoderLimits,
    EncoderSlice,
    MultiModalFeature,
    SharedPixels,
)
from proto.messages.prepared_model import PreparedModel
from proto.messages.scheduler_output import SchedulerOutput
from proto.runtime.faults import FaultInjector
from proto.settings.config import DeviceConfig, LoRAConfig, ModelConfig, ServeConfig
from tests.fakes.devices import CPU, REFERENCE
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.events import num_cached_tokens
from tests.fakes.ranks import LockstepRunners, Ranks
from tests.fakes.tiny_vision import (
    GRIDS,
    IMAGE_ID,
    VISION_MODELS,
    pixels_of,
    random_image,
    reference_inputs,
    save_vision_model,
)
from tests.fakes.vision import blocks_of, generate, going_on, new_request, step_of, whole
from tests.fakes.vision_ggufs import TEXTS, write_grid_mmproj, write_language_model
from worker.host.device import HostDevice
from worker.loaded_model import LoadedModel, load
from worker.models.registry import read_config
from worker.parallel.group import RankGroup
from worker.plan.memory_plan import plan_memory
from worker.runner_builder import RunnerBuilder
from worker.step.model_runner import ModelRunner

pytestmark = pytest.mark.suite("long")

ALONE = RankGroup()
NUM_PAGES = 30
BLOCK = 16
NUM_STATE_SLOTS = 64
NUM_OUTPUTS = 6
SIZES = ((60, 40), (30, 70))
"""Of the images; the tiled models cut the first into two tiles beside the whole."""


class Case:
    """A tiny vision model, and a prompt with two images between text.

    changes: as of `save_vision_model`. model_settings: further ones of ModelConfig. lora: adapters
    that are served.
    """

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        self.name = name
        self.model_settings: dict[str, Any] = {}
        self.lora = LoRAConfig()
        self.folder = folder / "pixels"
        self.folder.mkdir()
        self.model = save_vision_model(name, folder / "model", **changes)
        self.prepared = prepare(folder / "model", folder / "prepared")
        assert self.prepared.vision is not None
        self.is_bidirectional = self.prepared.vision.is_bidirectional
        mark = VISION_MODELS[name].placeholder
        self.images = [random_image(number, *size) for number, size in enumerate(SIZES)]
        self.inputs = self._reference()
        self.prompt: list[int] = self.inputs["input_ids"][0].tolist()
        self.features = list(self._features(mark))

    def _features(self, mark: str) -> Iterator[MultiModalFeature]:
        positions = iter(i for i, token in enumerate(self.prompt) if token == IMAGE_ID)
        for number, image in enumerate(self.images):
            alone = reference_inputs(self.name, [image], mark)
            pixels, grid = pixels_of(alone)
            pixels.numpy().astype("<f4").tofile(self.folder / f"0.{number}")
            own = [next(positions) for each in alone["input_ids"][0] if each == IMAGE_ID]
            yield MultiModalFeature(
                offset=own[0],
                length=own[-1] + 1 - own[0],
                num_embeds=len(own),
                mm_hash=bytes([number]) * 32,
                pixels=SharedPixels(f"0.{number}", tuple(pixels.shape)),
                grid=grid,
            )

    def another_first_image(self) -> None:
        """Replace the first image, but no token of the prompt."""
        name = VISION_MODELS[self.name].placeholder
        self.images[0] = random_image(7, *SIZES[0])
        pixels, _ = pixels_of(reference_inputs(self.name, [self.images[0]], name))
        pixels.numpy().astype("<f4").tofile(self.folder / "0.7")
        first = self.features[0]
        self.features[0] = replace(
            first, mm_hash=b"7" * 32, pixels=replace(first.pixels, name="0.7")
        )
        self.inputs = self._reference()
        assert self.inputs["input_ids"][0].tolist() == self.prompt

    def _reference(self) -> dict[str, torch.Tensor]:
        mark = VISION_MODELS[self.name].placeholder
        return reference_inputs(self.name, self.images, f"one {mark}two {mark} and text")

    @torch.no_grad()
    def expected(self, num_outputs: int = NUM_OUTPUTS) -> list[int]:
        """Greedy tokens of transformers, without a cache.

        With one where an image token may follow, which is text there.
        """
        inputs = dict(self.inputs)
        if self.name in GRIDS:
            options = {"max_new_tokens": num_outputs, "do_sample": False, "eos_token_id": None}
            whole = self.model.generate(**inputs, **options)
            return whole[0, len(self.prompt) :].tolist()
        tokens: list[int] = []
        for _ in range(num_outputs):
            logits = self.model(**inputs, use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
            for key, value in (("input_ids", tokens[-1]), ("attention_mask", 1)):
                inputs[key] = torch.cat((inputs[key], torch.tensor([[value]])), dim=1)
            for key in {"token_type_ids", "mm_token_type_ids"} & inputs.keys():
                inputs[key] = torch.cat((inputs[key], inputs[key].new_zeros(1, 1)), dim=1)
        return tokens

    def config(self, dtype: str = "float32") -> ServeConfig:
        return ServeConfig(
            model=ModelConfig(model="tiny", dtype=dtype, **self.model_settings),
            device=DeviceConfig(device="cpu"),
            lora=self.lora,
        )

    def load(self, device: HostDevice = CPU, group: RankGroup = ALONE) -> LoadedModel:
        return load(self.config(), self.prepared, device, group, lambda message: None)

    def runner(self, loaded: LoadedModel, num_pages: int = 2 * NUM_PAGES) -> ModelRunner:
        """Return the runner of a new engine. num_pages: blocks of each group."""
        injector = FaultInjector.of((), "worker", 0, 0)
        builder = RunnerBuilder(
            self.config(), loaded, injector, lambda message: None, str(self.folder)
        )
        num_blocks = 1 + num_pages * loaded.layout.num_groups
        num_slots = NUM_STATE_SLOTS if loaded.layout.states else 0
        message = InitializeCache(
            PROTOCOL_VERSION, 1, num_blocks, BLOCK, 512, num_state_slots=num_slots
        )
        device = loaded.device
        assert isinstance(device, HostDevice)
        return device.model_runner(builder.parts(message))

    def engine(
        self,
        loaded: LoadedModel,
        num_pages: int = 2 * NUM_PAGES,
        limits: Mapping[str, Any] = MappingProxyType({}),
        runner: LockstepRunners | None = None,
        **settings: Any,
    ) -> EngineHarness:
        """Return an engine. limits: of EncoderLimits. runner: None for a new one."""
        assert self.prepared.vision is not None
        encoder = EncoderLimits(
            vision=self.prepared.vision, **{"cache_size": 200, "max_input_tokens": 5, **limits}
        )
        harness = EngineHarness(
            num_blocks=1 + num_pages * loaded.layout.num_groups,
            block_size=BLOCK,
            max_model_len=512,
            windows=loaded.layout.windows,
            groups=loaded.geometry.groups,
            num_state_slots=NUM_STATE_SLOTS if loaded.layout.states else 0,
            vocab_size=self.prepared.vocab_size,
            encoder=encoder,
            **settings,
        )
        harness.runner = runner or self.runner(loaded, num_pages)  # type: ignore[assignment]
        return harness

    def add(
        self, harness: EngineHarness, num_outputs: int = NUM_OUTPUTS, **params: Any
    ) -> list[Request]:
        return harness.add(
            self.prompt,
            num_outputs,
            mm_features=list(self.features),
            temperature=0.0,
            ignore_eos=True,
            **params,
        )

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


def prepare(
    source: Path, target: Path, read: Callable[..., ModelContents] = hf_folder.read
) -> PreparedModel:
    target.mkdir()
    return prepared_folder.write(
        read(str(source), lambda what: None),
        name="tiny",
        source=str(source),
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


@pytest.mark.parametrize("name", TEXTS)
def test_a_gguf_pair_gives_the_tokens_of_its_folder(name: str, tmp_path: Path) -> None:
    """In float32; windows of Qwen2.5-VL are those of the files, and larger than the images."""
    changes = {"vision_config": {"window_size": 112}} if name == "qwen2_5_vl" else {}
    case = Case(name, tmp_path, **changes)
    pair = tmp_path / "gguf"
    pair.mkdir()
    write_language_model(name, case.model, read_config(case.prepared), pair / "tiny.gguf")
    write_grid_mmproj(tmp_path / "model", pair / "mmproj-F32.gguf")
    case.prepared = prepare(pair / "tiny.gguf", tmp_path / "prepared pair", gguf_file.read)
    assert case.prepared.vision is not None
    loaded = case.load()
    steps = case.in_chunks(loaded, 11)
    found = generate(case.runner(loaded), steps, len(case.prompt), NUM_OUTPUTS)
    assert found == case.expected()


@pytest.mark.parametrize("name", VISION_MODELS)
def test_an_engine_plans_images_beside_other_requests(name: str, tmp_path: Path) -> None:
    """Choices, the same again (from the cache), another image in the same text, and text alone."""
    case = Case(name, tmp_path)
    loaded, expected = case.load(), case.expected()
    for settings in ({"async_scheduling": True}, {"max_num_batched_tokens": 50}):
        own = copy(case)
        own.features, own.images = list(case.features), list(case.images)
        harness = own.engine(loaded, **settings)
        text = harness.add(list(range(3, 33)), 20, temperature=0.0, ignore_eos=True)
        choices = own.add(harness, n=2)
        harness.run()
        (again,) = own.add(harness)
        harness.run()
        outputs = harness.outputs[again.request_id, 0]
        assert max(filter(None, map(num_cached_tokens, outputs))) > case.features[1].offset - BLOCK
        own.another_first_image()
        (other,) = own.add(harness)
        harness.run()
        for request in (*choices, again):
            assert harness.tokens_of(request) == expected, settings
        assert harness.tokens_of(other) == own.expected(), settings
        assert len(harness.tokens_of(text[0])) == 20


@pytest.mark.parametrize("name", ["llava", "gemma3", *GRIDS])
def test_preempted_and_recovered_requests_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    """Blocks for one and a half requests, and a worker that is replaced in the middle."""
    case = Case(name, tmp_path)
    loaded, expected = case.load(), case.expected()
    pages = -(-3 * (len(case.prompt) + NUM_OUTPUTS) // (2 * BLOCK))
    for loses in (False, True):
        harness = case.engine(loaded, pages, {"max_input_tokens": 20}, enable_prefix_caching=False)
        requests = [*case.add(harness), *case.add(harness), *case.add(harness)]
        if loses:
            while not harness.tokens_of(requests[0]):
                harness.step()
            runner = case.runner(loaded, pages)
            harness.lose_workers(runner=runner)  # type: ignore[arg-type]
        harness.run()
        assert [harness.tokens_of(each) for each in requests] == [expected] * 3, loses


@pytest.mark.parametrize("name", ["smolvlm", "qwen3_vl"])
def test_ranks_give_what_one_gives(name: str, tmp_path: Path) -> None:
    """Each encodes every image."""
    case = Case(name, tmp_path)
    with Ranks(2) as ranks:
        loaded = [case.load(CPU, group) for group in ranks.groups]
        runners = ranks.run_on_all(lambda rank: case.runner(loaded[rank]))
        harness = case.engine(loaded[0], runner=LockstepRunners(ranks, runners))
        (request,) = case.add(harness)
        harness.run()
    assert harness.tokens_of(request) == case.expected()


def test_a_lost_file_fails_its_requests_alone(tmp_path: Path) -> None:
    case = Case("gemma3", tmp_path)
    loaded, expected = case.load(), case.expected()
    harness = case.engine(loaded)
    (whole_one,) = case.add(harness)
    case.features[0] = replace(
        case.features[0],
        mm_hash=b"l" * 32,
        pixels=replace(case.features[0].pixels, name="0.lost"),
    )
    (lost,) = case.add(harness)
    harness.run()
    assert harness.finish_reason_of(lost) is FinishReason.ERROR
    assert harness.tokens_of(whole_one) == expected


def test_a_new_engine_starts_without_outputs(tmp_path: Path) -> None:
    """A second engine gets NaN for an image that only the first has encoded."""
    case = Case("gemma3", tmp_path)
    loaded = case.load()
    slices = [whole(index, each) for index, each in enumerate(case.features)]
    first, second = case.runner(loaded), case.runner(loaded)
    first.execute(step_of([case.begin(loaded)], scheduled_encoder_inputs=slices))
    assert second.execute(step_of([case.begin(loaded)])).failed_seq_ids == [1]


@pytest.mark.parametrize("name", ["llava", "smolvlm", "gemma3", *GRIDS])
def test_memory_of_the_vision_part_is_planned(name: str, tmp_path: Path) -> None:
    """Its weights as they are, in either dtype; its outputs and activations as work space."""
    case = Case(name, tmp_path)
    without = plan_memory(case.config(), replace(case.prepared, vision=None), CPU)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2)):
        plan = plan_memory(case.config(dtype), case.prepared, CPU)
        tower = sum(
            weight.numel()
            for key, weight in case.model.named_parameters()
            if not any(part in key for part in ("language_model", "text_model", "lm_head"))
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
