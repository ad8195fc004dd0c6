"""The model runner over several KV cache groups, against transformers.

The test plays the engine: every group has a block table of its own, all blocks come
from one pool, and what a window has passed is overwritten with NaN and used again.
"""

from pathlib import Path

import pytest
import torch

from proto.sampling_params import SamplingParams
from proto.scheduler_output import BlockIds, CachedRequestData, NewRequestData, SchedulerOutput
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.base import AttentionShape
from worker.attention.registry import create_backend
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache, kv_cache_geometry
from worker.kv_layout import KVLayout, kv_layout
from worker.loader.weights import load_model
from worker.model_runner import ModelRunner
from worker.models.decoder import Decoder
from worker.models.registry import spec_of
from worker.sampling.sampler import create_sampler

BLOCK = 4
NUM_BLOCKS = 81
NUM_OUTPUT_TOKENS = 40
CHUNKS = {1: (5, 1, 13, 10), 2: (23,), 3: (2,)}
"""How the prompt of each sequence is cut, so that steps are mixed."""


class Blocks:
    """The pool and the tables of the sequences; a passed block is None in its table."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))
        self._tables: dict[int, list[list[int | None]]] = {}
        self.most_used = 0

    def grow(self, handle: int, num_computed: int, num_scheduled: int) -> BlockIds:
        """Free what is out of sight, then add blocks for the step; returns the new ones."""
        windows = self._cache.layout.windows
        tables = self._tables.setdefault(handle, [[] for _ in windows])
        for table, window in zip(tables, windows, strict=True):
            if window is None:
                continue
            for page in range(max(0, num_computed + 1 - window) // BLOCK):
                self._release(table, page)
        pages = -(-(num_computed + num_scheduled) // BLOCK)
        added: BlockIds = []
        for table in tables:
            new = [self._free.pop() for _ in range(pages - len(table))]
            table.extend(new)
            added.append(new)
        self.most_used = max(self.most_used, NUM_BLOCKS - 1 - len(self._free))
        return added

    def finish(self, handle: int) -> None:
        for table in self._tables.pop(handle):
            for page in range(len(table)):
                self._release(table, page)

    def _release(self, table: list[int | None], page: int) -> None:
        block = table[page]
        if block is not None:
            self._cache.buffer[block] = float("nan")
            self._free.append(block)
            table[page] = None


class Engine:
    """Makes steps by hand and collects what they sample."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner = runner
        self.blocks = Blocks(cache)
        self._step = 0

    def generate(self, prompts: dict[int, list[int]]) -> dict[int, list[int]]:
        """Greedy tokens of each prompt; sequence n begins at step n."""
        outputs: dict[int, list[int]] = {handle: [] for handle in prompts}
        computed = dict.fromkeys(prompts, 0)
        chunks = {handle: list(CHUNKS[handle]) for handle in prompts}
        waiting, running, finished = list(prompts), [], []
        while waiting or running:
            fresh, cached = [], CachedRequestData([], [], [], [], [], [])
            for handle in running:
                count = chunks[handle].pop(0) if chunks[handle] else 1
                added = self.blocks.grow(handle, computed[handle], count)
                cached.handles.append(handle)
                cached.num_computed_tokens.append(computed[handle])
                cached.num_scheduled_tokens.append(count)
                cached.new_block_ids.append(added if any(added) else None)
                computed[handle] += count
            if waiting:
                handle = waiting.pop(0)
                running.append(handle)
                count = chunks[handle].pop(0)
                added = self.blocks.grow(handle, 0, count)
                fresh.append(new_request(handle, prompts[handle], added, count))
                computed[handle] = count
            sampled = self._execute(fresh, cached, finished)
            for handle, tokens in sampled.items():
                outputs[handle] += tokens
            finished = [each for each in running if len(outputs[each]) == NUM_OUTPUT_TOKENS]
            for handle in finished:
                running.remove(handle)
                self.blocks.finish(handle)
        return outputs

    def _execute(
        self, fresh: list[NewRequestData], cached: CachedRequestData, finished: list[int]
    ) -> dict[int, list[int]]:
        self._step += 1
        output = self._runner.execute(
            SchedulerOutput(
                epoch=1,
                step=self._step,
                new_requests=fresh,
                cached_requests=cached,
                total_num_scheduled_tokens=1,
                finished_handles=finished,
                preempted_handles=[],
            )
        )
        return dict(zip(output.handles, output.sampled_token_ids, strict=True))


def new_request(
    handle: int, prompt: list[int], block_ids: BlockIds, num_scheduled: int
) -> NewRequestData:
    return NewRequestData(
        handle=handle,
        prompt_token_ids=prompt,
        output_token_ids=[],
        sampling_params=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0),
        seed=0,
        choice=0,
        block_ids=block_ids,
        num_computed_tokens=0,
        num_scheduled_tokens=num_scheduled,
    )


def runner_of(decoder: Decoder, layout: KVLayout, backend: str) -> tuple[ModelRunner, KVCache]:
    spec = decoder.spec
    geometry = kv_cache_geometry(layout, spec.num_kv_heads, spec.head_dim, torch.float32)
    cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK)
    cache.buffer[1:] = float("nan")
    shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale)
    rows = InputBatch(len(CHUNKS), spec.max_position, BLOCK, layout.num_groups)
    attention = create_backend(backend, cache, shape)
    runner = ModelRunner(decoder, attention, create_sampler(), rows, cache)
    runner.warm_up()
    return runner, cache


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "qwen2-window"])
def test_greedy_tokens_equal_transformers_past_the_window(
    name: str, backend: str, tmp_path: Path
) -> None:
    model = save_tiny(name, tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    decoder = load_model(
        prepared, spec_of(prepared), torch.float32, torch.device("cpu"), lambda fraction: None
    )
    layout = kv_layout(decoder.spec.windows)
    runner, cache = runner_of(decoder, layout, backend)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        handle: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
        for handle, chunks in CHUNKS.items()
    }
    engine = Engine(runner, cache)
    outputs = engine.generate(prompts)
    for handle, prompt in prompts.items():
        tokens = torch.tensor([prompt + outputs[handle]])
        with torch.no_grad():
            best = model(tokens).logits[0, len(prompt) - 1 : -1].argmax(dim=-1)
        assert outputs[handle] == best.tolist()
    # What full attention would keep until the end.
    pages = sum(-(-(len(prompt) + NUM_OUTPUT_TOKENS - 1) // BLOCK) for prompt in prompts.values())
    assert engine.blocks.most_used < 0.7 * pages * layout.num_groups
