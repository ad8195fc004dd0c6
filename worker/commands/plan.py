"""The process of `tokend plan`: prints the memory that a model takes, and the times to expect.

It reads a PlanBoot from its standard input. It has a worker's threads, so it measures what a worker
will reach. Exit status 0: the model fits; 2: it does not, or cannot be used.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import torch

from proto.codec import MessageDecoder
from proto.errors import TokendError
from proto.messages.lifecycle import PlanBoot
from proto.messages.prepared_model import PreparedModel
from proto.runtime.host_resources import ALLOWED_CPUS
from proto.settings.config import ServeConfig, memory_size
from proto.settings.pooler_config import pooler_of
from proto.settings.turn_ends import with_end_tokens
from worker.create_device import create_device
from worker.device import Device
from worker.layers.linear import Linear
from worker.loader.formats import PACKED, activation_dtype
from worker.loader.kernel_choices import KernelChoice, describe_choices
from worker.loader.weights import DecoderBuilder, create_builder
from worker.models.registry import model_spec, runs_on_transformers
from worker.parallel.group import RankGroup
from worker.plan.draft_settings import require_draft_model
from worker.plan.memory_plan import MemoryPlan, plan_memory
from worker.plan.memory_refusal import fitting_flags, refusal

PROMPT_TOKENS: Final = 512
"""Length of the prompt whose first token is estimated."""
TEXT_TOKENS: Final = (128, 512)
"""Lengths of the texts whose times are estimated for an encoder."""
_SAMPLE_BYTES: Final = 256 << 20
"""Weights for steps of one token: more than a processor's caches hold."""
_SAMPLE_SECONDS: Final = 0.7
"""Longest time for reading them, after the first product."""
_PROMPT_NUMBERS: Final = 1 << 25
"""Numbers of the weights for steps of many tokens, which no cache makes faster."""
_MEASURE_SECONDS: Final = 0.4
_READ_BYTES: Final = 256 << 20
"""Memory that is read to learn the rate at which attention can read the KV of a long context."""


BUSY_CORES: Final = 0.15
"""Cores in use by other programs from which rates count as those of a busy machine."""


@dataclass(frozen=True)
class SampledProduct:
    """A product of the model. num_bytes: of its weights in the form for a step of one token.

    row_fraction: as in worker.loader.formats.Product.
    """

    rows: int
    columns: int
    num_bytes: int
    row_fraction: float
    linear: Linear

    def rows_of_step(self, num_tokens: int) -> int:
        """Return the rows that a step of `num_tokens` tokens multiplies; at least one."""
        return max(1, round(num_tokens * self.row_fraction))


@dataclass(frozen=True, kw_only=True)
class TextEstimate:
    """Times of texts that an encoder computes, from products of the model's own weights.

    seconds: by the number of tokens of a text. flops: FLOP/s of products in steps of `step_tokens`.
    """

    seconds: Mapping[int, float]
    flops: float
    step_tokens: int
    products: Sequence[KernelChoice]

    def lines(self) -> list[str]:
        times = (
            f"{seconds * 1e3:,.1f} ms with {tokens} tokens ({1 / seconds:,.0f} texts a second)"
            for tokens, seconds in self.seconds.items()
        )
        return [
            f"  time per text    {', '.join(times)}",
            f"  measured         {self.flops / 1e9:,.0f} GFLOP/s "
            f"in steps of {self.step_tokens} tokens",
            f"  products         {describe_choices(self.products) or 'no choice of kernels'}",
            "  assumed          an idle machine, texts enough to fill steps; products alone take "
            "time, and attention is as fast as they are",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds_per_text": {str(tokens): each for tokens, each in self.seconds.items()},
            "flops_per_second": self.flops,
            "product_kernels": {choice.name: choice.variant for choice in self.products},
        }


@dataclass(frozen=True, kw_only=True)
class TimeEstimate:
    """Times of a request that is alone, from products of the model's own weights.

    bytes_per_second: at which steps of one token read weights. read_bytes_per_second: of a plain
    read, as that of the KV of a long context. flops_prompt: FLOP/s of products in steps of
    `step_tokens`.
    """

    seconds_per_token: float
    seconds_per_1k_context: float
    first_token_seconds: float
    bytes_per_second: float
    read_bytes_per_second: float
    flops_prompt: float
    step_tokens: int
    products: Sequence[KernelChoice]

    def lines(self) -> list[str]:
        return [
            f"  time per token   {self.seconds_per_token * 1e3:,.1f} ms, "
            f"and {self.seconds_per_1k_context * 1e3:,.2f} ms for 1,000 tokens of context",
            f"  first token      {self.first_token_seconds * 1e3:,.0f} ms "
            f"after a prompt of {PROMPT_TOKENS} tokens",
            f"  measured         {self.bytes_per_second / 1e9:,.1f} GB/s of weights in steps of "
            f"one token, {self.flops_prompt / 1e9:,.0f} GFLOP/s in steps of {self.step_tokens}, "
            f"{self.read_bytes_per_second / 1e9:,.1f} GB/s of memory that is only read",
            f"  products         {describe_choices(self.products) or 'no choice of kernels'}",
            "  assumed          one request on an idle machine; products and reading KV alone take "
            "time; attention to the prompt is as fast as its products",
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds_per_token": self.seconds_per_token,
            "seconds_per_1k_tokens_of_context": self.seconds_per_1k_context,
            "prompt_tokens": PROMPT_TOKENS,
            "first_token_seconds": self.first_token_seconds,
            "weight_bytes_per_second": self.bytes_per_second,
            "read_bytes_per_second": self.read_bytes_per_second,
            "flops_per_second": self.flops_prompt,
            "product_kernels": {choice.name: choice.variant for choice in self.products},
        }


class OtherLoad:
    """Measures how busy other programs keep the cores that this process may use.

    Time that a virtual machine does not get counts, too. root: holds the `proc` tree.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._start, self._busy, self._own = self._now()

    def cores(self) -> float:
        """Return the average number of cores that others have used since the creation."""
        now, busy, own = self._now()
        used = (busy - self._busy) - (own - self._own)
        return max(0.0, used / max(now - self._start, 1e-3))

    def _now(self) -> tuple[float, float, float]:
        """Return the present time, and CPU seconds of all programs and of this one."""
        ticks = 0
        for line in (self._root / "proc/stat").read_text().splitlines():
            match line.split():
                case [name, user, nice, system, _, _, irq, softirq, steal, *_] if (
                    name[3:].isdecimal() and int(name[3:]) in ALLOWED_CPUS
                ):
                    ticks += sum(map(int, (user, nice, system, irq, softirq, steal)))
        return time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), time.process_time()


def busy_line(other_cores: float) -> str:
    """Return the line of the plan about other programs; "" if they use little."""
    if other_cores < BUSY_CORES:
        return ""
    return (
        f"  busy             other programs used {other_cores:.1f} of "
        f"{len(ALLOWED_CPUS)} CPUs meanwhile: these are the rates of a busy machine, "
        "and an idle one is faster"
    )


def why_not_estimated(config: ServeConfig, prepared: PreparedModel, device: Device) -> str:
    """Return what products cannot be measured for; "" if they can."""
    if runs_on_transformers(prepared, config.model.model_impl):
        return "transformers' code"
    return device.why_not_timed(prepared, device.resolve_dtype(activation_dtype(config.model)))


def estimate_times(
    config: ServeConfig, prepared: PreparedModel, device: Device, plan: MemoryPlan
) -> TimeEstimate | TextEstimate:
    """Measure products of this model for about two seconds; return what follows for requests.

    One rank is measured: ranks compute at the same time.
    """
    dtype = device.resolve_dtype(activation_dtype(config.model))
    builder = create_builder(
        prepared,
        model_spec(prepared, config, device.head_dims),
        dtype,
        device,
        device.weight_format(config, prepared),
        RankGroup(0, config.parallel.tensor_parallel_size),
    )
    step_tokens = min(device.step_tokens(config.scheduler), PROMPT_TOKENS)
    with torch.inference_mode():
        products = _sample_products(builder)
        choices = builder.choose_products()
        if builder.spec.is_bidirectional:
            return _estimate_texts(builder, device, products, choices, step_tokens)
        alone = _seconds(products, 1, dtype, device)
        few = products[: _count_for_prompts(products)]
        many = _seconds(few, step_tokens, dtype, device)
    flops_alone, flops_prompt = _flops(products, 1) / alone, _flops(few, step_tokens) / many
    reading = _read_rate(device.torch_device)
    shape = builder.spec.compute_shape
    # A token sees half of the prompt on average, or its window.
    attention = sum(
        flops * PROMPT_TOKENS * min(window or PROMPT_TOKENS, PROMPT_TOKENS / 2)
        for window, flops in shape.attention_flops
    )
    prompt = shape.linear_flops * PROMPT_TOKENS + shape.head_flops + attention
    return TimeEstimate(
        seconds_per_token=(shape.linear_flops + shape.head_flops) / flops_alone,
        seconds_per_1k_context=plan.kv_bytes_per_1k / reading,
        first_token_seconds=prompt / flops_prompt,
        bytes_per_second=sum(product.num_bytes for product in products) / alone,
        read_bytes_per_second=reading,
        flops_prompt=flops_prompt,
        step_tokens=step_tokens,
        products=choices,
    )


def _estimate_texts(
    builder: DecoderBuilder,
    device: Device,
    products: Sequence[SampledProduct],
    choices: Sequence[KernelChoice],
    step_tokens: int,
) -> TextEstimate:
    """Return the times of texts of a few lengths; every token sees a window to both sides."""
    few = products[: _count_for_prompts(products)]
    seconds = _seconds(few, step_tokens, builder.source.dtype, device)
    flops = _flops(few, step_tokens) / seconds
    shape, longest = builder.spec.compute_shape, builder.spec.max_position

    def of_text(tokens: int) -> float:
        seen = sum(
            each * min(tokens, 2 * (window or tokens) - 1) for window, each in shape.attention_flops
        )
        return (shape.linear_flops + seen) * tokens / flops

    lengths = [length for length in TEXT_TOKENS if length <= longest] or [longest]
    return TextEstimate(
        seconds={length: of_text(length) for length in lengths},
        flops=flops,
        step_tokens=step_tokens,
        products=choices,
    )


def _sample_products(builder: DecoderBuilder) -> list[SampledProduct]:
    """Read products from the bottom until they are more than caches hold, or time is up."""
    source, weight_format = builder.source, builder.weight_format
    found: list[SampledProduct] = []
    num_bytes, end = 0, time.perf_counter() + _SAMPLE_SECONDS
    for layer in range(builder.spec.num_layers):
        for product in builder.products(layer):
            size = weight_format.product_bytes(source, product)
            rows, columns = source.joined_shape(*product.weights)
            linear = weight_format.read_product(source, product)()
            # A second form beside the blocks is for steps of many tokens.
            one_row = size[PACKED] or size.total()
            found.append(SampledProduct(rows, columns, one_row, product.row_fraction, linear))
            num_bytes += found[-1].num_bytes
            if num_bytes > _SAMPLE_BYTES or time.perf_counter() > end:
                return found
    return found


def _count_for_prompts(products: Sequence[SampledProduct]) -> int:
    """Return how many of the products are enough to measure steps of many tokens."""
    numbers = accumulate(product.rows * product.columns for product in products)
    return 1 + sum(number < _PROMPT_NUMBERS for number in numbers)


def _flops(products: Sequence[SampledProduct], num_tokens: int) -> int:
    return sum(
        2 * product.rows_of_step(num_tokens) * product.rows * product.columns
        for product in products
    )


def _seconds(
    products: Sequence[SampledProduct], num_tokens: int, dtype: torch.dtype, device: Device
) -> float:
    """Return the median seconds of one pass through all products in a step of `num_tokens`."""
    shapes = [(product.rows_of_step(num_tokens), product.columns) for product in products]
    inputs = {shape: torch.ones(shape, dtype=dtype, device=device.torch_device) for shape in shapes}

    def run() -> float:
        start = time.perf_counter()
        for product, shape in zip(products, shapes, strict=True):
            product.linear(inputs[shape])
        device.synchronize()
        return time.perf_counter() - start

    run()  # memory is allocated, threads are started
    times = [run()]
    end = time.perf_counter() + _MEASURE_SECONDS
    while time.perf_counter() < end:
        times.append(run())
    return statistics.median(times)


def _read_rate(device: torch.device) -> float:
    """Return the bytes per second at which the threads of a worker, or a GPU, read memory."""
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)

    def run() -> float:
        start = time.perf_counter()
        memory.sum().item()
        return time.perf_counter() - start

    return memory.nbytes / min(run() for _ in range(5))


def main() -> int:
    """Print the plan; return the exit status."""
    boot = MessageDecoder[PlanBoot](PlanBoot).decode(sys.stdin.buffer.read())
    config, prepared, draft = boot.config, boot.model, boot.draft_model
    num_engines = config.parallel.data_parallel_size
    try:
        device = create_device(config, 0)
        device.check_kv_dtype(config.cache.kv_cache_dtype)
        if draft is not None:
            require_draft_model(config, prepared, draft, device)
        plan = plan_memory(config, prepared, device, draft=draft)
        generates = pooler_of(config.model, prepared) is None
        prepared = with_end_tokens(prepared, config.model)
        times, not_estimated = None, why_not_estimated(config, prepared, device)
        others = OtherLoad()
        if plan.fits and not not_estimated:
            times = estimate_times(config, prepared, device, plan)
        other_cores = others.cores()
        if boot.as_json:
            flags = [] if plan.fits else fitting_flags(plan, config, prepared, device, draft=draft)
            figures = {
                "model": prepared.name,
                "device": device.name,
                "engines": num_engines,
                **plan.to_dict(),
            }
            if generates:
                ends = zip(prepared.eos_token_ids, prepared.end_reasons, strict=True)
                figures["end_tokens"] = dict(ends)
            figures |= {"flags_that_fit": flags} if times is None else times.to_dict()
            if times is not None:
                figures["cores_used_by_others"] = round(other_cores, 2)
            print(json.dumps(figures, indent=1))
        elif not plan.fits:
            print(refusal(plan, config, prepared, device, draft=draft))
        else:
            title = f"{prepared.name} on {device.name}"
            if draft is not None:
                title += f", drafts by {draft.name}"
            if num_engines > 1:
                title += f"; {num_engines} engines, and for each of them"
            if prepared.unloaded_parts:
                title += f"; {prepared.text_only_notice}"
            print("\n".join((title, *plan.table(), "")))
            lines = [f"  times            not estimated for {not_estimated}"]
            if times is not None:
                lines = [*times.lines(), busy_line(other_cores)]
            print("\n".join(filter(None, lines)))
            if standby := config.reliability.standby:
                size = plan.work["standby processes"]
                memory = f"{memory_size(size)} of the work space" if size else "on the host alone"
                print(f"  standby          {standby}, {memory}; their threads sleep")
            if generates:
                print(f"  end tokens       {prepared.ends_notice}")
    except TokendError as error:
        print(f"tokend: {error}", file=sys.stderr)
        return 2
    return 0 if plan.fits else 2


if __name__ == "__main__":
    sys.exit(main())
