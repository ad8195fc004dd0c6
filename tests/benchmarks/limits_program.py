"""Reads workloads from stdin and prints their timings, one JSON line each, until EOF.

Measures the essential parts of a model's step separately: matrix products with the daemon's weight
formats by number of rows, the attention of a prompt, and the memory bandwidth. A model is loaded
once for all lines that name it. The steps of a load are counted in ceilings.py.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import torch

from proto.codec import from_json, to_json_line
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig
from tests.benchmarks.attention_program import AttentionStep
from tests.benchmarks.messages import AttentionWorkload, LimitsTimings, LimitsWorkload
from worker.cpu.kernels import KernelsUnavailableError
from worker.create_device import create_device
from worker.host.large_pages import large_pages
from worker.layers.embedding import EmbeddingTable
from worker.layers.linear import Linear
from worker.loaded_model import load
from worker.loader.files import read_index
from worker.loader.formats import (
    BuildEnds,
    BuildExperts,
    BuildLinear,
    ExpertProducts,
    Product,
    WeightFormat,
    head_name,
)
from worker.loader.kernel_choices import KernelChoice
from worker.loader.source import WeightSource
from worker.parallel.group import RankGroup

_READ_FLOATS: Final = 1 << 27
_SECONDS_OF_A_PART: Final = 0.03
_DENSE_BYTES: Final = {"bf16": 2, "f16": 2, "f32": 4}

Part = Sequence[Callable[[], object]]
"""Calls made in sequence, as in a step; a single head would stay in the CPU caches."""


class NotedFormat:
    """A weight format that records the products it creates for a model.

    layers: (input columns, product) in the order of a step. head: the product of the logits.
    """

    def __init__(self, form: WeightFormat) -> None:
        self._form = form
        self.layers: list[tuple[int, Linear]] = []
        self.head: list[tuple[int, Linear]] = []

    @property
    def name(self) -> str:
        return self._form.name

    @property
    def memory(self) -> Counter[str]:
        return self._form.memory

    @property
    def dense_names(self) -> list[str]:
        return self._form.dense_names

    @property
    def shared_forms(self) -> frozenset[str]:
        return self._form.shared_forms

    @property
    def arithmetic(self) -> set[str]:
        return self._form.arithmetic

    def is_batch_invariant(self, dtype: torch.dtype) -> bool:
        return self._form.is_batch_invariant(dtype)

    def choose_kernels(self, dtype: torch.dtype, folder: str) -> list[KernelChoice]:
        return self._form.choose_kernels(dtype, folder)

    def read_product(self, source: WeightSource, product: Product) -> BuildLinear:
        finish = self._form.read_product(source, product)
        columns = source.columns_of(product.weights[0])

        def noted() -> Linear:
            self.layers.append((columns, finish()))
            return self.layers[-1][1]

        return noted

    def read_experts(self, source: WeightSource, experts: ExpertProducts) -> BuildExperts:
        return self._form.read_experts(source, experts)

    def read_ends(self, source: WeightSource, *, tied: bool) -> BuildEnds:
        finish = self._form.read_ends(source, tied=tied)
        columns = source.columns_of(head_name(tied=tied))

        def noted() -> tuple[EmbeddingTable, Linear]:
            table, head = finish()
            self.head.append((columns, head))
            return table, head

        return noted

    def product_bytes(self, source: WeightSource, product: Product) -> Counter[str]:
        return self._form.product_bytes(source, product)

    def ends_bytes(self, source: WeightSource, *, tied: bool) -> Counter[str]:
        return self._form.ends_bytes(source, tied=tied)


class LimitsWorker:
    """The model of a worker like in the daemon, whose products can be run separately."""

    def __init__(self, config: ServeConfig, prepared: PreparedModel) -> None:
        device = create_device(config, 0)
        noted = NotedFormat(device.weight_format(config, prepared))
        self.loaded = load(config, prepared, device, RankGroup(), lambda message: None, noted)
        assert isinstance(self.loaded.weight_format, NotedFormat)
        self.products = self.loaded.weight_format

    def attention(self, workload: LimitsWorkload) -> AttentionWorkload:
        """Return inputs of a step with as many prompts as fit."""
        spec, config = self.loaded.model.spec, workload.config
        tokens = min(workload.prompt_tokens, config.scheduler.step_tokens)
        return AttentionWorkload(
            name="prompts",
            num_seqs=config.scheduler.step_tokens // tokens,
            context_tokens=tokens,
            query_tokens=tokens,
            dtype=str(self.loaded.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            kv_cache_dtype=config.cache.kv_cache_dtype,
            rounds=workload.rounds,
            num_layers=spec.num_layers,
            num_heads=spec.attention_shape.num_heads,
            num_kv_heads=spec.attention_shape.num_kv_heads,
            head_dim=spec.attention_shape.head_dim,
            block_size=config.cache.block_size,
        )

    @property
    def kv_bytes_per_token(self) -> list[tuple[int, int | None]]:
        """Return bytes per token and window of every KV group."""
        size = self.loaded.geometry.bytes_per_token
        return [(size, group.sliding_window) for group in self.loaded.geometry.groups]


def weight_bytes(form: WeightFormat, prepared: PreparedModel, *, tied: bool) -> int:
    """Return the bytes of weights that a step of one row reads in this format.

    tied: embedding and head share one weight; otherwise the embedding is excluded.
    """
    index = read_index(prepared)
    numbers = {each.name: math.prod(each.shape) for each in index.tensors if len(each.shape) == 2}
    embedding, head = (
        ("token_embd", "output") if index.format == "gguf" else ("model.embed_tokens", "lm_head")
    )
    unused = f"{head if tied else embedding}.weight"
    read = sum(number for name, number in numbers.items() if name != unused)
    few, plus, _ = form.name.partition("+")
    if few in _DENSE_BYTES:
        return read * _DENSE_BYTES[few]
    held = form.memory[few] if plus else form.memory.total()
    return held if tied else round(held * read / sum(numbers.values()))


@torch.inference_mode()
def measure(worker: LimitsWorker, workload: LimitsWorkload) -> LimitsTimings:
    """Measure the parts in alternation; the best round of every part counts."""
    products, attention = worker.products, worker.attention(workload)
    # the same kind of pages as weights and KV
    memory = large_pages(4 * _READ_FLOATS).view(torch.float32).fill_(1.0)
    parts: list[Part] = [
        [_product(each, rows, worker.loaded.dtype) for each in (products.layers, products.head)]
        for rows in workload.rows
    ]
    parts += [[AttentionStep(attention).run], [memory.sum]]
    *times, (attention_ms,), (read_ms,) = _best_ms(parts, workload.rounds)
    pairs = attention.num_seqs * attention.query_tokens * (attention.query_tokens + 1) // 2
    return LimitsTimings(
        device=worker.loaded.device.name,
        num_threads=torch.get_num_threads(),
        weights=products.name,
        rows=workload.rows,
        layer_products_ms=[layers for layers, _ in times],
        head_product_ms=[head for _, head in times],
        attention_ns_per_pair=1e6 * attention_ms / pairs,
        read_gb_per_s=memory.nbytes / 1e6 / read_ms,
        weight_bytes=weight_bytes(
            products, workload.model, tied=worker.loaded.model.spec.tied_embeddings
        ),
        kv_bytes_per_token=worker.kv_bytes_per_token,
    )


def _product(
    products: Sequence[tuple[int, Linear]], num_rows: int, dtype: torch.dtype
) -> Callable[[], None]:
    inputs = {columns: torch.randn(num_rows, columns).to(dtype) for columns, _ in products}

    def run() -> None:
        for columns, linear in products:
            linear(inputs[columns])

    return run


def _best_ms(parts: Sequence[Part], rounds: int) -> list[list[float]]:
    """Return the best time of every call; short parts run several times a round."""
    best = [[math.inf] * len(part) for part in parts]
    for number in range(rounds + 1):
        for place, part in enumerate(parts):
            spent = 0.0
            while spent < _SECONDS_OF_A_PART:
                times = [_seconds(call) for call in part]
                spent += sum(times)
                if number:  # the first round is the warm-up
                    best[place] = list(map(min, best[place], times))
    return [[1e3 * seconds for seconds in each] for each in best]


def _seconds(call: Callable[[], object]) -> float:
    started = perf_counter()
    call()
    return perf_counter() - started


def main() -> None:
    """Run workloads until EOF."""
    loaded: list[tuple[object, LimitsWorker]] = []
    for line in sys.stdin.buffer:
        workload = from_json(line, LimitsWorkload)
        key = (workload.config, workload.model)
        if not loaded or loaded[0][0] != key:
            loaded[:] = [(key, LimitsWorker(workload.config, workload.model))]
        try:
            timings = measure(loaded[0][1], workload)
        except KernelsUnavailableError as reason:
            sys.exit(f"without kernels there are no limits to measure: {reason}")
        sys.stdout.buffer.write(to_json_line(timings))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
