"""KVContents never accepts KV of other tokens, after random changes of blocks and rows."""

import random

import numpy as np
import pytest

from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from worker.batch.input_batch import InputBatch
from worker.speculation.draft_model import KVContents

BLOCK, NUM_BLOCKS, NUM_ROWS, MAX_LEN = 4, 40, 4, 40


class Rows:
    """Sequences that come, grow and go, with blocks at random; few tokens, so that many are equal.

    truth: of each slot, the salt and the tokens up to the one whose KV was computed there.
    """

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.batch = InputBatch(NUM_ROWS, MAX_LEN, BLOCK)
        self.contents = KVContents(self.batch, 0, NUM_BLOCKS)
        self.truth: dict[int, tuple[int, ...]] = {}
        self.running: list[int] = []
        self.next_id = 1
        self.num_found = 0

    def apply(self, new: list[NewRequestData], finished: list[int]) -> None:
        step = SchedulerOutput(
            epoch=1,
            step=1,
            new_requests=new,
            cached_requests=CachedRequestData(),
            total_num_scheduled_tokens=1,
            finished_seq_ids=finished,
            preempted_seq_ids=[],
        )
        self.batch.apply(step)

    def start(self) -> None:
        prompt = [self.dice.choice((0, 1)) for _ in range(self.dice.randint(1, 20))]
        blocks = self.dice.sample(range(1, NUM_BLOCKS), MAX_LEN // BLOCK)
        request = NewRequestData(
            seq_id=self.next_id,
            prompt_token_ids=prompt,
            output_token_ids=[],
            sampling_params=SamplingParams(max_tokens=9),
            seed=0,
            choice=0,
            block_ids=[sorted(blocks) if self.dice.random() < 0.8 else blocks],
            num_computed_tokens=0,
            num_scheduled_tokens=len(prompt),
            extra_key=self.dice.choice((0, 0, 7)),
        )
        self.apply([request], [])
        self.running.append(self.next_id)
        self.next_id += 1

    def end(self) -> None:
        self.apply([], [self.running.pop(self.dice.randrange(len(self.running)))])

    def grow(self, row: int) -> None:
        for _ in range(self.dice.randint(1, 3)):
            token = np.array([self.dice.choice((0, 1))])
            self.batch.append_sampled(np.array([row]), token)

    def slots(self, row: int, first: int, end: int) -> list[int]:
        return self.batch.block_table.slots(0, row, first, end).tolist()

    def compute(self, row: int) -> None:
        """Check what is valid, then compute a part of the rest, and perhaps a draft."""
        batch, num_tokens = self.batch, int(self.batch.num_tokens[row])
        valid = self.checked_num_valid(row, num_tokens)
        self.num_found += valid
        end = num_tokens
        if self.dice.random() < 0.3:
            end = self.dice.randint(valid + 1, num_tokens)
        elif self.dice.random() < 0.7:
            end = min(MAX_LEN, num_tokens + self.dice.randint(1, 5))
            draft = [self.dice.choice((0, 1)) for _ in range(end - num_tokens)]
            batch.token_ids[row, num_tokens:end] = draft
        for position, slot in zip(range(valid, end), self.slots(row, valid, end), strict=True):
            self.truth[slot] = self.content(row, position + 1)
        self.contents.record(row, valid, end)
        assert self.checked_num_valid(row, num_tokens) >= min(end, num_tokens - 1)

    def checked_num_valid(self, row: int, num_tokens: int) -> int:
        valid = self.contents.num_valid(row, num_tokens)
        assert 0 <= valid < num_tokens
        for position, slot in enumerate(self.slots(row, 0, valid)):
            assert self.truth[slot] == self.content(row, position + 1)
        return valid

    def content(self, row: int, num_tokens: int) -> tuple[int, ...]:
        """Return the salt and the first tokens of a row."""
        tokens = self.batch.token_ids[row, :num_tokens].tolist()
        return int(self.batch.extra_keys[row]), *tokens

    def copy(self) -> None:
        source, target = self.dice.sample(range(1, NUM_BLOCKS), 2)
        self.contents.copy_blocks(np.array([source]), np.array([target]))
        for offset in range(BLOCK):
            slot = source * BLOCK + offset
            self.truth.pop(target * BLOCK + offset, None)
            if slot in self.truth:
                self.truth[target * BLOCK + offset] = self.truth[slot]


@pytest.mark.parametrize("seed", range(20))
def test_only_kv_of_the_same_tokens_and_salt_is_valid(seed: int) -> None:
    rows = Rows(seed)
    for _ in range(400):
        choice = rows.dice.random()
        if len(rows.running) < NUM_ROWS and choice < 0.15:
            rows.start()
        elif rows.running and choice < 0.2:
            rows.end()
        elif choice < 0.3:
            rows.copy()
        elif rows.running:
            row = rows.batch._row_of[rows.dice.choice(rows.running)]
            if rows.batch.num_tokens[row] < MAX_LEN - 3:
                rows.grow(row)
            rows.compute(row)
    assert rows.num_found > 500
