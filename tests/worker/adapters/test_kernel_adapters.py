"""Adapters by the C++ kernels: numbers, and bits that do not depend on the batch."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proto.messages.prepared_model import PreparedModel
from tests.fakes.adapters import SEVEN, Served, make_adapter
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import config_in_blocks, tiny_model
from tests.worker.kernel_variants import (
    LOADABLE,
    each_variant,
    load_variant,
    threads_of_torch,
    with_each,
)
from tests.worker.models.test_kernel_stack import STEPS, StackRunner, int8
from tests.worker.reference.low_rank import expected, random_update
from worker.cpu import kernel_choice
from worker.cpu.adapters import KernelAdapters
from worker.cpu.build_kernels import KernelVariant
from worker.cpu.formats import Bf16Format
from worker.cpu.kernels import Kernels
from worker.cpu.stack import KernelStack
from worker.layers.adapters import Adapter, AdapterRows
from worker.models.layer_stack import LayerStack

best_variant = with_each(LOADABLE[:1])
ATTENTION = SEVEN[:4]
TARGETS: dict[str, dict[str, Any]] = {
    "llama-biases": {"target_modules": SEVEN, "r": 6},
    "gemma3-pattern-untied": {"target_modules": SEVEN, "r": 17},
    "cohere2": {"target_modules": "all-linear"},
    "olmo2": {"target_modules": "all-linear"},
    "phi3-longrope": {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
    "starcoder2": {"target_modules": "all-linear", "r": 33},
    "deepseek3": {
        "target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "qwen2moe": {
        "target_modules": [
            *ATTENTION,
            *(f"shared_expert.{name}_proj" for name in ("gate", "up", "down")),
        ],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
    "gptoss": {
        "target_modules": ATTENTION,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


# ---- One product ----


SHAPES = (
    (64, ((16, 64),)),
    (576, ((16, 576), (16, 192), (16, 192))),
    (33, ((3, 7), (5, 40), (64, 18))),
    (96, ((1, 1),)),
    (40, ((20, 50), (20, 31))),
)
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@each_variant
def test_sums_are_those_of_float64(variant: KernelVariant) -> None:
    kernels = load_variant(variant)
    for dtype, error in ERRORS.items():
        for number, (in_features, shape) in enumerate(SHAPES):
            adapters = KernelAdapters(kernels)
            adapters.num_products = 1
            generator = torch.Generator().manual_seed(number)
            out_features = sum(outputs for _, outputs in shape)
            x = torch.randn(75, in_features + 8, generator=generator).to(dtype)[:, :in_features]
            y = torch.randn(75, out_features + 8, generator=generator).to(dtype)[:, :out_features]
            order = torch.randperm(75, generator=generator)
            before, wanted, groups = y.clone(), y.double().clone(), []
            for part, rows in enumerate((order[:1], order[1:3], order[3:8], order[8:70])):
                rows = rows.sort().values
                scales = torch.rand(len(rows), generator=generator) + 0.5
                plain = random_update(
                    in_features, shape, dtype, part, scales_outputs=bool(part % 2)
                )
                wanted[rows] = expected(plain, x[rows], y[rows], scales)
                adapter = Adapter(products={0: adapters.laid_out(plain)})
                groups.append(AdapterRows(adapter, rows, scales))
            with adapters.running(groups):
                adapters.add(0, x, y)
            assert (y.double() - wanted).abs().max() < error * wanted.abs().max()
            assert torch.equal(y[order[70:]], before[order[70:]])


@each_variant
def test_a_row_has_the_same_bits_in_every_batch(variant: KernelVariant) -> None:
    kernels = load_variant(variant)
    for dtype in ERRORS:
        adapters = KernelAdapters(kernels)
        adapters.num_products = 1
        in_features, shape = SHAPES[2]
        updates = [
            adapters.laid_out(random_update(in_features, shape, dtype, seed, scales_outputs=True))
            for seed in (1, 2)
        ]
        owners = [Adapter(products={0: update}) for update in updates]
        x, y = torch.randn(40, in_features).to(dtype), torch.randn(40, 65).to(dtype)
        found = []
        for threads, sizes in ((1, (40,)), (3, (40,)), (2, (1,) * 40), (1, (7, 33)), (2, (38, 2))):
            after, first = y.clone(), 0
            for size in sizes:
                rows = torch.arange(first, first + size)
                groups = [
                    AdapterRows(owner, own, torch.ones(len(own)))
                    for number, owner in enumerate(owners)
                    if len(own := torch.nonzero(rows % 2 == number)[:, 0])
                ]
                with threads_of_torch(threads), adapters.running(groups):
                    adapters.add(0, x[first : first + size], after[first : first + size])
                first += size
            found.append(after)
        assert not torch.equal(found[0], y)
        assert all(torch.equal(each, found[0]) for each in found)


# ---- All layers ----


class AdaptedRunner(StackRunner):
    """Runs STEPS with an adapter for each sequence; 0: without."""

    def __init__(
        self, served: Served, kernels: Kernels, stacks: tuple[LayerStack, ...], ids: list[int]
    ) -> None:
        super().__init__(served.decoder, kernels, stacks)
        self._served = served
        self._ids = ids

    def _step(self, step: tuple[tuple[int, int], ...]) -> torch.Tensor:
        ids = np.repeat(self._ids[: len(step)], [count for _, count in step])
        with self._served.running(ids):
            return super()._step(step)


@pytest.fixture
def use_variant(monkeypatch: pytest.MonkeyPatch) -> Callable[[KernelVariant], Kernels]:
    """use(variant) loads models with this kernel variant."""

    def choose(variant: KernelVariant) -> Kernels:
        kernels = load_variant(variant)
        monkeypatch.setattr(CPU, "_kernels", kernels)
        monkeypatch.setattr(kernel_choice, "candidate_kernels", lambda: (kernels,))
        return kernels

    return choose


Folder = Callable[[str], tuple[PreparedModel, list[Path]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """models(name): a tiny model with sizes that are multiples of 32, and two adapters."""

    @cache
    def saved(name: str) -> tuple[PreparedModel, list[Path]]:
        folder = tmp_path_factory.mktemp(name)
        model = tiny_model(config_in_blocks(name))
        model.save_pretrained(folder)
        settings = TARGETS[name]
        adapters = [make_adapter(model, folder / f"a{n}", seed=n, **settings) for n in (1, 2)]
        return prepare_checkpoint(folder, folder / "prepared"), adapters

    return saved


def serve(models: Folder, name: str, dtype: torch.dtype, kernels: Kernels, form: str) -> Served:
    prepared, adapters = models(name)
    weights = Bf16Format(kernels) if form == "bf16" else int8(kernels, dtype)
    served = Served(prepared, dtype, weights)
    for number, path in enumerate(adapters, 1):
        served.load(path, number)
    return served


@best_variant
@pytest.mark.parametrize("name", TARGETS)
def test_one_call_gives_the_bits_of_layer_by_layer(
    name: str,
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    models: Folder,
) -> None:
    """And rows without an adapter have the bits that they have when no row has one."""
    kernels = use_variant(variant)
    forms = ((torch.bfloat16, "bf16"), (torch.float32, "int8"), (torch.bfloat16, "int8"))
    for dtype, form in forms:
        served = serve(models, name, dtype, kernels, form)
        stack, parts = served.decoder._stacks
        assert isinstance(stack, KernelStack)
        plain = StackRunner(served.decoder, kernels, (stack,)).run()
        for threads in (1, 3):
            with threads_of_torch(threads):
                found = AdaptedRunner(served, kernels, (stack,), [1, 2]).run()
                wanted = AdaptedRunner(served, kernels, (parts,), [1, 2]).run()
                beside = AdaptedRunner(served, kernels, (stack,), [0, 2]).run()
                alone = AdaptedRunner(served, kernels, (stack,), [1, 0]).run()
            for step, rows in enumerate(found):
                assert torch.equal(rows, wanted[step])
                count = STEPS[step][0][1]
                assert torch.equal(beside[step][:count], plain[step][:count])
                assert torch.equal(beside[step][count:], rows[count:])
                assert torch.equal(alone[step][:count], rows[:count])
                assert torch.equal(alone[step][count:], plain[step][count:])
                assert (rows[:count] - plain[step][:count]).abs().max() > 0.1


@best_variant
def test_factors_of_outputs_run_layer_by_layer(
    variant: KernelVariant,
    use_variant: Callable[[KernelVariant], Kernels],
    tmp_path: Path,
) -> None:
    """A step with DoRA beside other adapters: the bits of the others stay."""
    kernels = use_variant(variant)
    model = tiny_model(config_in_blocks("llama-biases"))
    model.save_pretrained(tmp_path)
    served = Served(
        prepare_checkpoint(tmp_path, tmp_path / "prepared"), torch.bfloat16, Bf16Format(kernels)
    )
    served.load(make_adapter(model, tmp_path / "plain"), 1)
    served.load(make_adapter(model, tmp_path / "dora", use_dora=True), 2)
    stacks = served.decoder._stacks
    apart = AdaptedRunner(served, kernels, stacks[:1], [1, 0]).run()
    together = AdaptedRunner(served, kernels, stacks, [1, 2]).run()
    for step, (rows, others) in enumerate(zip(together, apart, strict=True)):
        count = STEPS[step][0][1]
        assert torch.equal(rows[:count], others[:count])
    with served.running([2] * 5):
        assert not stacks[0].takes(5, AdaptedRunner(served, kernels, stacks, [2]).attention)
