"""Layers in one kernel call give the same bits as layer by layer, or are not fused."""

import copy
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig

from proto.messages.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.devices import CPU
from tests.fakes.gguf_files import write
from tests.fakes.prepared_models import gguf_index, prepare, prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import CONFIGS, config_in_blocks, tiny_model
from tests.fakes.tiny_ggufs import SIZES, config_of, tiny
from tests.fakes.tiny_vision import prepare_vision_model, save_vision_model
from tests.worker.kernel_variants import (
    LOADABLE,
    THREADS,
    each_variant,
    load_variant,
    threads_of_torch,
    with_each,
)
from worker.attention.backend import AttentionBackend, AttentionInputs
from worker.attention.kv_cache import KVCache, kv_layout
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.cpu import kernel_choice
from worker.cpu.attention import CpuAttention
from worker.cpu.build_kernels import KernelVariant
from worker.cpu.formats import Bf16Format, Int8Format, MixedFormat, PackedFormat, RotatedFormat
from worker.cpu.kernels import Kernels
from worker.cpu.stack import KernelStack
from worker.layers.layer_progress import HostProgress
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.kernel_choices import KernelChoice
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.layer_stack import LayerStack
from worker.plan.memory_plan import layer_cache

BLOCK = 4
PAGES = 24
STEPS = (((0, 5), (0, 2)), ((5, 9), (2, 1)), ((14, 1),), ((15, 1), (3, 1)), ((16, 70),))
"""Steps of up to two sequences: what each has computed before, and its tokens."""
VARIATIONS = (
    *("llama-biases", "mistral-wide-heads", "mistral-window", "qwen2-window", "qwen3-biases-tied"),
    *("gemma3-pattern-untied", "granite-biases", "phi3-longrope", "qwen3moe-dense-layers"),
    *("glm4moe-groups", "gptoss-full", "deepseek2-groups", "deepseek3-halves", "bamba-biases"),
    *("falconh1-norms", "granitehybrid-dense", "lfm2-biases", "mamba2-biases", "qwen35-biases"),
    "ministral3-window",
)
FAMILIES_AND_VARIATIONS = (*(name for name in CONFIGS if "-" not in name), *VARIATIONS)
HYBRIDS = ("falconh1", "granitehybrid", "lfm2", "qwen35")
"""Attention beside a mixer of each kind."""
Checkpoint = Callable[[str], PreparedModel]
best_variant = with_each(LOADABLE[:1])


@pytest.fixture
def use_variant(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelVariant], Kernels]:
    """use(variant) loads models with this kernel variant."""

    def choose(variant: KernelVariant) -> Kernels:
        kernels = load_variant(variant)
        monkeypatch.setattr(CPU, "_kernels", kernels)
        monkeypatch.setattr(kernel_choice, "candidate_kernels", lambda: (kernels,))
        return kernels

    return choose


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreparedModel]:
    """checkpoint(name) prepares a model of CONFIGS, with sizes that are multiples of 32."""

    @cache
    def prepared(name: str) -> PreparedModel:
        folder = tmp_path_factory.mktemp(name)
        tiny_model(config_in_blocks(name)).save_pretrained(folder)
        return prepare_checkpoint(folder, folder / "prepared")

    return prepared


def prepared_gguf(config: PretrainedConfig, folder: Path) -> PreparedModel:
    """A GGUF file whose query, key and value have three types, and so have the other products."""
    kinds = {"v_proj": "Q8_0", "k_proj": "Q4_1", "down_proj": "Q6_K", "o_proj": "Q4_0"}
    with torch.no_grad():
        _, tensors = tiny("Q5_0", config, permuted=True, kinds=kinds)
    write(folder / "model.gguf", tensors)
    return prepare(folder / "prepared", config_of(config), gguf_index(folder / "model.gguf"))


def int8(kernels: Kernels, dtype: torch.dtype) -> PackedFormat:
    return Int8Format(kernels, DenseFormat(dtype), dtype)


def load(prepared: PreparedModel, dtype: torch.dtype, form: WeightFormat) -> Decoder:
    spec = spec_of(prepared)
    return load_model(prepared, spec, dtype, CPU, lambda fraction: None, form)


class StackRunner:
    """Runs STEPS with some of a model's layer stacks over a cache of its own.

    has_images: tokens have three positions, and DeepStack adds to some of them after two layers.
    """

    def __init__(
        self,
        model: Decoder,
        kernels: Kernels,
        stacks: tuple[LayerStack, ...],
        has_images: bool = False,
    ) -> None:
        spec = model.spec
        self._has_images = has_images
        layout = kv_layout(spec.windows)
        self.model = copy.copy(model)
        self.model._stacks = stacks
        self._num_groups = layout.num_groups
        _, geometry = layer_cache(spec, torch.float32)
        self.cache = KVCache(geometry, layout, 1 + 2 * self._num_groups * PAGES, BLOCK)
        self.attention: AttentionBackend = CpuAttention(kernels, self.cache, spec.attention_shape)
        self.buffers = [self.cache.buffer]
        if (shape := spec.state_shape()) is not None:
            states = StateCache(shape, 1 + 2 * PAGES, BLOCK)
            self.buffers.append(states.buffer)
            self.attention = AttentionWithStates(self.attention, states)

    def run(self) -> list[torch.Tensor]:
        return [self._step(step) for step in STEPS]

    def _step(self, step: tuple[tuple[int, int], ...]) -> torch.Tensor:
        starts = np.cumsum([0, *(count for _, count in step)])
        positions = np.concatenate([np.arange(at, at + count) for at, count in step])
        rows = np.repeat(np.arange(len(step)), [count for _, count in step])
        groups = []
        of_states = isinstance(self.attention, AttentionWithStates)
        for group in [*range(self._num_groups), *([0] if of_states else [])]:
            num_groups = 1 if len(groups) == self._num_groups else self._num_groups
            first = 1 + (np.arange(len(step)) * num_groups + group) * PAGES
            table = (first[:, None] + np.arange(PAGES)).astype(np.int32)
            slots = table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
            lens = np.array([sum(each) for each in step], dtype=np.int32)
            groups.append(AttentionInputs(starts.astype(np.int32), lens, table, slots))
        self.attention.plan(groups)
        tokens = torch.from_numpy((positions * 7 + rows * 11) % 64)
        rotary = torch.from_numpy(positions)
        if not self._has_images:
            return self.model.forward(tokens, rotary, self.attention)
        draw = torch.Generator().manual_seed(len(positions))
        images = [
            (first, torch.randn(count, 3 * self.model.spec.hidden_size, generator=draw))
            for first, count in ((0, 2), (3, 1), (5, 60))
            if first + count <= len(positions)
        ]
        places = torch.stack((rotary, rotary // 2, rotary // 3))
        return self.model.forward(tokens, places, self.attention, embeddings=images)


def assert_same_bits(
    model: Decoder, kernels: Kernels, threads: Sequence[int] = (1,), has_images: bool = False
) -> None:
    stack, partwise = model._stacks
    assert isinstance(stack, KernelStack)
    for count in threads:
        one, parts = (
            StackRunner(model, kernels, (each,), has_images) for each in (stack, partwise)
        )
        assert all(stack.takes(rows, one.attention) for rows in (1, 2, 70))
        with threads_of_torch(count):
            steps = zip(one.run(), parts.run(), strict=True)
        for found, wanted in steps:
            assert wanted.isfinite().all()
            assert wanted.float().std() > 0.1, "a difference would not be visible"
            assert torch.equal(found, wanted)
        assert all(map(torch.equal, one.buffers, parts.buffers))


@best_variant
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_give_the_same_bits(
    name: str,
    dtype: torch.dtype,
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    tmp_path: Path,
) -> None:
    """Three positions and what DeepStack adds; text alone gives what it gave before."""
    kernels = use_variant(variant)
    save_vision_model(name, tmp_path / "model")
    prepared = prepare_vision_model(tmp_path / "model", tmp_path / "prepared")
    model = load(prepared, dtype, int8(kernels, dtype))
    assert_same_bits(model, kernels, THREADS, has_images=True)
    assert_same_bits(model, kernels)
    stack = model._stacks[:1]
    with_images, text = (StackRunner(model, kernels, stack, each).run() for each in (True, False))
    assert not any(map(torch.equal, with_images, text))


@best_variant
def test_a_position_of_an_image_beyond_the_length_is_refused(
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    tmp_path: Path,
) -> None:
    kernels = use_variant(variant)
    save_vision_model("qwen2_5_vl", tmp_path / "model")
    prepared = prepare_vision_model(tmp_path / "model", tmp_path / "prepared")
    model = load(prepared, torch.float32, int8(kernels, torch.float32))
    runner = StackRunner(model, kernels, model._stacks[:1])
    runner.run()
    tokens, places = torch.zeros(70, dtype=torch.int64), torch.full((3, 70), 5)
    places[1] = 512
    with pytest.raises(IndexError):
        runner.model.forward(tokens, places, runner.attention)


@best_variant
@pytest.mark.parametrize("name", FAMILIES_AND_VARIATIONS)
def test_every_family_gives_the_same_bits(
    name: str,
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    checkpoint: Checkpoint,
) -> None:
    kernels = use_variant(variant)
    prepared = checkpoint(name)
    for dtype in (torch.bfloat16, torch.float32):
        assert_same_bits(load(prepared, dtype, int8(kernels, dtype)), kernels, (1, 3))
    assert_same_bits(load(prepared, torch.bfloat16, Bf16Format(kernels)), kernels, (1, 3))


@each_variant
def test_every_kernel_variant_gives_the_same_bits(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels = use_variant(variant)
    names = ("llama", "gemma3-pattern-untied", "qwen2moe", "deepseek3", *HYBRIDS)
    for name, dtype in product(names, (torch.bfloat16, torch.float32)):
        assert_same_bits(load(checkpoint(name), dtype, int8(kernels, dtype)), kernels)


@best_variant
def test_attention_sinks_give_the_same_bits(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels = use_variant(variant)
    model = load(checkpoint("mistral-window"), torch.bfloat16, Bf16Format(kernels))
    without = StackRunner(model, kernels, model._stacks[:1]).run()
    layers = model._stacks[-1].layers
    for layer in layers:
        layer.mixer.sinks = torch.linspace(-3, 3, layer.mixer.spec.num_heads)
    model._stacks = CPU.layer_stacks(layers, model.spec.hidden_size)
    assert_same_bits(model, kernels)
    assert not torch.equal(StackRunner(model, kernels, model._stacks[:1]).run()[0], without[0])


@best_variant
def test_queries_that_grow_with_their_position_are_those_of_transformers(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], tmp_path: Path
) -> None:
    """Up to position 85, beyond two multiples of the length at which the factor grows.

    As close as transformers' own bfloat16, with as many greedy tokens of float32; not without the
    factor.
    """
    kernels = use_variant(variant)
    reference = tiny_model(config_in_blocks("ministral3"))
    reference.save_pretrained(tmp_path)
    tokens = torch.arange(sum(step[0][1] for step in STEPS))[None] * 7 % 64
    with torch.no_grad():
        expected = reference(tokens).logits[0]
        native = reference.to(torch.bfloat16)(tokens).logits[0].float()

    def logits() -> torch.Tensor:
        prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
        model = load(prepared, torch.bfloat16, Bf16Format(kernels))
        steps = zip(STEPS, StackRunner(model, kernels, model._stacks[:1]).run(), strict=True)
        hidden = torch.cat([rows[: step[0][1]] for step, rows in steps])
        return model.float32_logits(hidden.contiguous())

    def num_greedy(logits: torch.Tensor) -> int:
        return int((logits.argmax(1) == expected.argmax(1)).sum())

    found, error = logits(), (native - expected).abs().mean()
    assert (found - expected).abs().mean() < 1.2 * error
    assert num_greedy(found) > num_greedy(native) - 5
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]["llama_4_scaling_beta"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    constant = logits()
    assert torch.equal(constant[:32], found[:32])
    assert (constant[32:] - expected[32:]).abs().mean() > 3 * error


@pytest.mark.parametrize("name", ["llama", "gemma3-pattern-untied"])
def test_bfloat16_rows_of_any_length(
    name: str, use_variant: Callable[[KernelVariant], Kernels], tmp_path: Path
) -> None:
    """Rows whose length is not a multiple of the kernel's step are copied before they are read."""
    tiny_model(CONFIGS[name]).save_pretrained(tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")

    @each_variant
    def same_bits(variant: KernelVariant) -> None:
        kernels = use_variant(variant)
        assert_same_bits(load(prepared, torch.bfloat16, Bf16Format(kernels)), kernels)

    same_bits()


def test_products_of_several_types_give_the_same_bits(
    use_variant: Callable[[KernelVariant], Kernels], tmp_path: Path
) -> None:
    prepared = prepared_gguf(LlamaConfig(**SIZES, attention_bias=True), tmp_path)

    @each_variant
    def same_bits(variant: KernelVariant) -> None:
        kernels = use_variant(variant)
        form = PackedFormat(kernels, DenseFormat(torch.bfloat16), torch.bfloat16)
        assert_same_bits(load(prepared, torch.bfloat16, form), kernels)

    same_bits()


@pytest.mark.parametrize("form", ["bf16", "int8", "packed"])
def test_products_of_several_libraries_give_the_same_bits(
    form: str,
    use_variant: Callable[[KernelVariant], Kernels],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whichever library is chosen for each shape."""
    kernels = use_variant(LOADABLE[0])
    libraries = [load_variant(variant) for variant in LOADABLE if not variant.is_baseline]
    if len(libraries) < 2:
        pytest.skip("this CPU runs one variant of the kernels")
    dtype, turns = torch.bfloat16, cycle(libraries)

    def take_turns(product: str, times: kernel_choice.Times) -> KernelChoice:
        variant = next(turns).variant
        return KernelChoice(product, variant, dict.fromkeys(times, 1.0))

    monkeypatch.setattr(kernel_choice, "candidate_kernels", lambda: tuple(libraries))
    monkeypatch.setattr(kernel_choice, "choose", take_turns)
    if form == "packed":
        prepared = prepared_gguf(LlamaConfig(**SIZES, attention_bias=True), tmp_path)
    else:
        tiny_model(CONFIGS["llama"]).save_pretrained(tmp_path)
        prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    dense = Bf16Format(kernels)
    packed = PackedFormat(kernels, dense, dtype)
    formats = {"bf16": dense, "int8": RotatedFormat(packed, dense, kernels), "packed": packed}
    model = load(prepared, dtype, formats[form])
    used = {weight.multiplied_by.variant for weight in formats[form].kernel_weights}
    assert len(used) > 1
    for attention in (libraries[0], libraries[-1]):
        assert_same_bits(model, attention, (1, 3))


@best_variant
@pytest.mark.parametrize(
    "name", ["llama", "gemma3-pattern-untied", "olmo2", "deepseek3", "nemotronh", "qwen35"]
)
def test_the_residuals_before_layers_are_recorded(
    name: str,
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    checkpoint: Checkpoint,
) -> None:
    """By both stacks with the same bits; at the ends they are the embedding and the result."""
    kernels = use_variant(variant)
    model = load(checkpoint(name), torch.bfloat16, int8(kernels, torch.bfloat16))
    layers = (model.spec.num_layers, 0, 2, 2)
    records = []
    for stack in model._stacks:
        runner = StackRunner(model, kernels, (stack,))
        record = torch.zeros(len(layers), 80, model.spec.hidden_size, dtype=torch.bfloat16)
        runner.model.record_residuals(layers, record)
        with threads_of_torch(3):
            hidden = runner.run()[-1]
        assert torch.equal(record[0, : len(hidden)], hidden)
        assert record[:, : len(hidden)].float().std(dim=(1, 2)).min() > 0
        assert torch.equal(record[2], record[3])
        assert not torch.equal(record[1], record[2])
        records.append(record)
    assert torch.equal(*records)


@best_variant
@pytest.mark.parametrize("form", ["bf16", "int8", "int8 in blocks", "packed"])
def test_more_threads_than_cores_give_the_same_bits(
    variant: KernelVariant,
    form: str,
    use_variant: Callable[[KernelVariant], Kernels],
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    kernels, dtype = use_variant(variant), torch.bfloat16
    dense = Bf16Format(kernels)
    packed = PackedFormat(kernels, dense, dtype)
    formats = {
        "bf16": dense,
        "int8": RotatedFormat(packed, dense, kernels),
        "int8 in blocks": int8(kernels, dtype),
        "packed": packed,
    }
    if form == "packed":
        prepared = prepared_gguf(LlamaConfig(**SIZES, attention_bias=True), tmp_path)
    else:
        prepared = checkpoint("llama")
    model = load(prepared, dtype, formats[form])
    for stack in model._stacks:
        steps = []
        for threads in THREADS:
            with threads_of_torch(threads):
                steps.append(StackRunner(model, kernels, (stack,)).run())
        for threads, found in zip(THREADS, steps, strict=True):
            assert all(map(torch.equal, found, steps[0])), (type(stack).__name__, threads)


@best_variant
def test_rotated_weights_of_single_heads_give_the_same_bits(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels, dtype = use_variant(variant), torch.bfloat16
    form = RotatedFormat(int8(kernels, dtype), Bf16Format(kernels), kernels)
    assert_same_bits(load(checkpoint("deepseek3"), dtype, form), kernels, (1, 3))


@best_variant
def test_the_shapes_of_smollm2_give_the_same_bits(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], tmp_path: Path
) -> None:
    kernels = use_variant(variant)
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "vocab_size": 96}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}
    tiny_model(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    for form in (int8(kernels, torch.bfloat16), Bf16Format(kernels)):
        assert_same_bits(load(prepared, torch.bfloat16, form), kernels, (1, 3))


@each_variant
def test_the_number_of_rows_selects_the_stack(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    """Steps of few rows use the first format, those of many the second."""
    kernels = use_variant(variant)
    names = ("qwen2", "gemma3-pattern-untied", "deepseek3", "granitehybrid")
    for name, dtype in product(names, (torch.bfloat16, torch.float32)):
        model = load(checkpoint(name), dtype, MixedFormat(int8(kernels, dtype), kernels))
        assert_same_bits(model, kernels)
        stack = model._stacks[0]
        assert isinstance(stack, KernelStack)
        few, many = (stack._description(rows).structure for rows in (7, 8))
        assert few.layers != many.layers


@best_variant
@pytest.mark.parametrize("name", ["llama", "deepseek3"])
def test_layers_wait_for_their_loads_and_are_published_with_the_same_bits(
    name: str,
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    checkpoint: Checkpoint,
) -> None:
    """What another thread finds of a layer in the cache is what is there after the step."""
    kernels = use_variant(variant)
    model = load(checkpoint(name), torch.bfloat16, int8(kernels, torch.bfloat16))
    expected = StackRunner(model, kernels, model._stacks[:1])
    wanted = expected.run()
    runner = StackRunner(model, kernels, model._stacks[:1])
    num_layers = len(model.spec.layers)
    progress = HostProgress(num_layers)
    model._stacks[0].track_layers(progress)
    computed: list[int] = []
    saved: list[torch.Tensor] = []

    def load_layers() -> None:
        for layer in range(num_layers):
            if layer:
                progress.wait_computed(layer - 1)
            time.sleep(0.002)  # a layer that did not wait would be computed
            computed.append(int(progress._cells[1]))
            progress.note_loaded(layer)

    def save_layers() -> None:
        for layer in range(num_layers):
            progress.wait_computed(layer)
            pages = runner.cache.layer_pages(layer)[0].rows
            saved.append(pages.clone())

    with threads_of_torch(3), ThreadPoolExecutor(2) as threads:
        for step, hidden in zip(STEPS, wanted, strict=True):
            progress.begin_step(has_copies=True)
            calls = [threads.submit(load_layers), threads.submit(save_layers)]
            assert torch.equal(runner._step(step), hidden)
            for call in calls:
                call.result()
            assert computed == list(range(num_layers))
            for layer, pages in enumerate(saved):
                assert torch.equal(pages, runner.cache.layer_pages(layer)[0].rows)
            computed.clear()
            saved.clear()
            progress.end_step()
    assert torch.equal(runner.cache.buffer, expected.cache.buffer)
    model._stacks[0].track_layers(None)


@best_variant
def test_unsupported_layers_run_layer_by_layer(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels = use_variant(variant)
    dtype = torch.bfloat16
    prepared = checkpoint("qwen2")
    dense, blocks = (
        load(prepared, dtype, form) for form in (DenseFormat(dtype), int8(kernels, dtype))
    )
    runner = StackRunner(dense, kernels, dense._stacks)
    assert not dense._stacks[0].takes(1, runner.attention)
    assert blocks._stacks[0].takes(1, runner.attention)
    assert not blocks._stacks[0].takes(1, DenseAttention(blocks.spec))
    alone = StackRunner(dense, kernels, dense._stacks[1:])
    for found, wanted in zip(runner.run(), alone.run(), strict=True):
        assert torch.equal(found, wanted)


@best_variant
def test_nan_in_the_cache_affects_only_its_sequence(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels = use_variant(variant)
    prepared = checkpoint("llama")
    model = load(prepared, torch.bfloat16, int8(kernels, torch.bfloat16))
    runner = StackRunner(model, kernels, model._stacks[:1])
    runner.run()
    # The pages of sequence 1 follow those of sequence 0.
    runner.cache.buffer[1 + PAGES :] = float("nan")
    hidden = runner._step(((16, 1), (4, 1)))
    assert hidden[0].isfinite().all()
    assert hidden[1].isnan().all()


@best_variant
def test_positions_beyond_the_model_are_an_error(
    variant: KernelVariant, use_variant: Callable[[KernelVariant], Kernels], checkpoint: Checkpoint
) -> None:
    kernels = use_variant(variant)
    model = load(checkpoint("llama"), torch.float32, int8(kernels, torch.float32))
    for stack in model._stacks:
        runner = StackRunner(model, kernels, (stack,))
        runner.run()
        for position in (-1, 128):
            with pytest.raises(IndexError):
                runner.model.forward(
                    torch.zeros(70).long(), torch.full((70,), position), runner.attention
                )
