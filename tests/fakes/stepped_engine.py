"""Requests whose steps are made by hand, for tests of runners."""

import torch

from proto.codec import changed
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    BlockIds,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from worker.attention.kv_cache import KVCache
from worker.models.decoder import Decoder
from worker.step.model_runner import ModelRunner

BLOCK = 4

NUM_BLOCKS = 81

NUM_OUTPUT_TOKENS = 40

CHUNKS = {1: (5, 1, 13, 10), 2: (23,), 3: (2,)}
"""The chunks of every sequence's prompt, so that steps are mixed."""


class Blocks:
    """The block pool and the block tables of sequences; a freed block is None in its table."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))
        self._tables: dict[int, list[list[int | None]]] = {}
        self.most_used = 0

    def grow(self, seq_id: int, num_computed: int, num_scheduled: int) -> BlockIds:
        """Free blocks behind the windows, then add blocks for the step; returns the new ones."""
        windows = self._cache.layout.windows
        tables = self._tables.setdefault(seq_id, [[] for _ in windows])
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

    def finish(self, seq_id: int) -> None:
        for table in self._tables.pop(seq_id):
            for page in range(len(table)):
                self._release(table, page)

    def _release(self, table: list[int | None], page: int) -> None:
        block = table[page]
        if block is not None:
            self._cache.buffer[block] = float("nan")
            self._free.append(block)
            table[page] = None


class Engine:
    """Builds steps by hand and collects the sampled tokens."""

    def __init__(self, runner: ModelRunner, cache: KVCache) -> None:
        self._runner = runner
        self.blocks = Blocks(cache)
        self._step = 0

    def generate(
        self, prompts: dict[int, list[int]], decoder: Decoder | None = None
    ) -> dict[int, list[int]]:
        """Greedy tokens of every prompt; sequence n begins at step n.

        decoder: the prompts are given as its embeddings of their tokens.
        """
        outputs: dict[int, list[int]] = {seq_id: [] for seq_id in prompts}
        computed = dict.fromkeys(prompts, 0)
        chunks = {seq_id: list(CHUNKS[seq_id]) for seq_id in prompts}
        waiting, running, finished = list(prompts), [], []
        while waiting or running:
            fresh, cached = [], CachedRequestData([], [], [], [], [], [])
            for seq_id in running:
                count = chunks[seq_id].pop(0) if chunks[seq_id] else 1
                added = self.blocks.grow(seq_id, computed[seq_id], count)
                cached.seq_ids.append(seq_id)
                cached.num_computed_tokens.append(computed[seq_id])
                cached.num_scheduled_tokens.append(count)
                cached.new_block_ids.append(added if any(added) else None)
                computed[seq_id] += count
            if waiting:
                seq_id = waiting.pop(0)
                running.append(seq_id)
                count = chunks[seq_id].pop(0)
                added = self.blocks.grow(seq_id, 0, count)
                new = new_request(seq_id, prompts[seq_id], added, count)
                fresh.append(new if decoder is None else as_embeddings(new, decoder))
                computed[seq_id] = count
            sampled = self._execute(fresh, cached, finished)
            for seq_id, tokens in sampled.items():
                outputs[seq_id] += tokens
            finished = [each for each in running if len(outputs[each]) == NUM_OUTPUT_TOKENS]
            for seq_id in finished:
                running.remove(seq_id)
                self.blocks.finish(seq_id)
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
                finished_seq_ids=finished,
                preempted_seq_ids=[],
            )
        )
        return dict(zip(output.seq_ids, output.sampled_token_ids, strict=True))


def new_request(
    seq_id: int, prompt: list[int], block_ids: BlockIds, num_scheduled: int
) -> NewRequestData:
    return NewRequestData(
        seq_id=seq_id,
        prompt_token_ids=prompt,
        output_token_ids=[],
        sampling_params=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0),
        seed=0,
        choice=0,
        block_ids=block_ids,
        num_computed_tokens=0,
        num_scheduled_tokens=num_scheduled,
    )


def as_embeddings(new: NewRequestData, decoder: Decoder) -> NewRequestData:
    ids = new.prompt_token_ids
    rows = decoder.embed(torch.tensor(ids)).float().numpy()
    return changed(new, prompt_token_ids=[0] * len(ids), prompt_embeds=rows.tobytes())
