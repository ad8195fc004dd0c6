"""The input batch across steps (add, grow, preempt, resume, finish) against plain lists."""

import random

import numpy as np
import pytest

from proto.messages.logit_edits import LogitEdits
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from tests.worker.sampling.settings import last_positions
from worker.batch.input_batch import InputBatch, build_inputs
from worker.sampling.logit_edits import RowEdits

BLOCK = 4


def new(seq_id: int, prompt: list[int], blocks: list[int], **changes: object) -> NewRequestData:
    fields = {
        "seq_id": seq_id,
        "prompt_token_ids": prompt,
        "output_token_ids": [],
        "sampling_params": SamplingParams(max_tokens=8, temperature=0.5, logprobs=2),
        "seed": 2**64 - 1,
        "choice": 3,
        "block_ids": [blocks],
        "num_computed_tokens": 0,
        "num_scheduled_tokens": len(prompt),
    }
    return NewRequestData(**(fields | changes))


def step(
    new_requests: list[NewRequestData] | None = None,
    cached: CachedRequestData | None = None,
    finished: list[int] | None = None,
    preempted: list[int] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=1,
        new_requests=new_requests or [],
        cached_requests=cached or CachedRequestData(),
        total_num_scheduled_tokens=1,
        finished_seq_ids=finished or [],
        preempted_seq_ids=preempted or [],
    )


@pytest.fixture
def rows() -> InputBatch:
    return InputBatch(num_rows=3, max_model_len=32, block_size=BLOCK)


def test_a_new_sequence_has_its_tokens_and_parameters(rows: InputBatch) -> None:
    (row,) = rows.apply(step([new(7, [5, 6, 7, 8, 9], [3, 4])]))
    assert rows.token_ids[row, :5].tolist() == [5, 6, 7, 8, 9]
    assert rows.num_tokens[row] == rows.num_prompt_tokens[row] == 5
    params = rows.row_params[row]
    assert (params["temperature"], params["seed"], params["choice"]) == (0.5, 2**64 - 1, 3)
    assert rows.num_logprobs[row] == 2
    assert rows.block_table.ids[0, row, :2].tolist() == [3, 4]


def test_inputs_of_a_mixed_step(rows: InputBatch) -> None:
    (first,) = rows.apply(step([new(1, [10, 11, 12], [2])]))
    rows.append_sampled(np.array([first]), np.array([13]))
    mixed = step(
        [new(2, [20, 21, 22, 23, 24, 25], [5, 6], num_scheduled_tokens=5)],
        CachedRequestData([1], [3], [1], [None], [], []),
    )
    inputs = build_inputs(mixed, rows.apply(mixed), rows)
    assert inputs.token_ids.tolist() == [20, 21, 22, 23, 24, 13]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 3]
    assert inputs.query_start.tolist() == [0, 5, 6]
    assert inputs.seq_lens.tolist() == [5, 4]
    assert inputs.attention[0].slot_mapping.tolist() == [20, 21, 22, 23, 24, 11]
    assert inputs.attention[0].block_table.tolist() == [[5, 6], [2, 0]]
    assert inputs.sample_start.tolist() == [0, 0, 1]
    assert inputs.sample_tokens.tolist() == [5]


def test_every_group_has_its_own_block_table() -> None:
    """Both tables grow, and resuming replaces them."""
    rows = InputBatch(num_rows=2, max_model_len=32, block_size=BLOCK, num_groups=2)
    begin = step([new(1, [10, 11, 12, 13, 14], [], block_ids=[[2, 3], [4, 5]])])
    inputs = build_inputs(begin, rows.apply(begin), rows)
    assert [each.slot_mapping.tolist() for each in inputs.attention] == [
        [8, 9, 10, 11, 12],
        [16, 17, 18, 19, 20],
    ]
    (row,) = inputs.rows
    rows.append_sampled(np.array([row]), np.array([15]))
    grown = step(cached=CachedRequestData([1], [5], [4], [[[6], [7]]], [], []))
    inputs = build_inputs(grown, rows.apply(grown), rows)
    assert [each.block_table.tolist() for each in inputs.attention] == [[[2, 3, 6]], [[4, 5, 7]]]
    assert all(each.block_table.flags.c_contiguous for each in inputs.attention)
    rows.apply(step(preempted=[1]))
    tables = [[8, 9, 10], [0, 9, 2]]
    resumed = step(cached=CachedRequestData([1], [4], [2], [tables], [1], [[15]]))
    inputs = build_inputs(resumed, rows.apply(resumed), rows)
    assert [each.slot_mapping.tolist() for each in inputs.attention] == [[36, 37], [36, 37]]
    assert [each.block_table.tolist() for each in inputs.attention] == [[[8, 9]], [[0, 9]]]


def test_a_preempted_sequence_resumes_with_its_outputs(rows: InputBatch) -> None:
    (row,) = rows.apply(step([new(1, [1, 2, 3], [2])]))
    rows.append_sampled(np.array([row]), np.array([4]))
    rows.apply(step(preempted=[1]))
    assert len(rows._sequences) == 1
    resumed = step(cached=CachedRequestData([1], [0], [5], [[[8, 9]]], [1], [[4, 5]]))
    step_rows = rows.apply(resumed)
    inputs = build_inputs(resumed, step_rows, rows)
    assert inputs.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert inputs.attention[0].block_table.tolist() == [[8, 9]]
    assert inputs.sample_start.tolist() == [0, 1]
    assert rows.num_tokens[step_rows[0]] == 5
    assert rows.num_prompt_tokens[step_rows[0]] == 3


def test_a_pending_token_is_written_only_to_its_own_sequence() -> None:
    """A preempted sequence's row is reused by another that awaits a token at the same position."""
    rows = InputBatch(num_rows=1, max_model_len=32, block_size=BLOCK)
    at = rows.apply(step([new(1, [1, 2, 3], [2])]))
    first = last_positions(rows, at, [1])
    of_first = rows.append_pending(first)
    assert rows.apply(step([new(2, [5, 6, 7], [3])], preempted=[1])).tolist() == at.tolist()
    second = last_positions(rows, at, [2])
    of_second = rows.append_pending(second)
    assert of_second.indices.tolist() == of_first.indices.tolist()
    rows.resolve_pending(of_first, np.array([40]))
    assert rows.last_is_pending(int(at[0]))
    rows.resolve_pending(of_second, np.array([8]))
    assert rows.token_ids[at[0], :4].tolist() == [5, 6, 7, 8]


def test_a_token_of_a_step_in_vain_is_not_counted() -> None:
    """Two steps are in flight when a sequence is sent again, as if it had no outputs."""
    rows = InputBatch(num_rows=1, max_model_len=32, block_size=BLOCK)
    params = SamplingParams(max_tokens=8, edits=LogitEdits(frequency_penalty=1.0))
    sent = new(1, [1, 2, 3], [2], sampling_params=params)
    at = rows.apply(step([sent]))
    in_flight = []
    for _ in range(2):
        in_flight.append(rows.append_pending(last_positions(rows, at, [1])))
    assert rows.apply(step([sent])).tolist() == at.tolist()
    for pending in in_flight:
        rows.resolve_pending(pending, np.array([42]))
    assert rows.num_tokens[at[0]] == 3
    assert counted(rows.edits[at[0]]) == {}


def test_logits_edits_survive_a_preemption(rows: InputBatch) -> None:
    """Rebuilt edits equal the grown ones, and the row's next sequence has none of them."""
    edits = LogitEdits(repetition_penalty=1.5, frequency_penalty=1.0, bad_words=((4, 5), (7,)))
    params = SamplingParams(max_tokens=8, edits=edits)
    (row,) = rows.apply(step([new(1, [1, 2, 2], [2], sampling_params=params)]))
    assert not rows.greedy[row]
    for token_id in (9, 9, 4):
        rows.append_sampled(np.array([row]), np.array([token_id]))
    grown = rows.edits[row]
    assert counted(grown) == {1: 0, 2: 0, 9: 2, 4: 1}
    assert sorted(grown.bad_words.forbidden) == [5, 7]
    rows.apply(step(preempted=[1]))
    assert rows.edits == {}
    resumed = step(cached=CachedRequestData([1], [0], [6], [[[8, 9]]], [1], [[9, 9, 4]]))
    (row,) = rows.apply(resumed)
    assert counted(rows.edits[row]) == counted(grown)
    assert sorted(rows.edits[row].bad_words.forbidden) == [5, 7]
    (again,) = rows.apply(step([new(2, [1], [3])], finished=[1]))
    assert again == row
    assert rows.edits == {}


def counted(edits: RowEdits) -> dict[int, float]:
    return dict(zip(edits.counts.ids.tolist(), edits.counts.counts.tolist(), strict=True))


def test_tokens_sent_by_the_engine_are_appended_like_sampled_ones(rows: InputBatch) -> None:
    params = SamplingParams(max_tokens=8, beam_width=2, eos_token_ids=(0,))
    (row,) = rows.apply(step([new(1, [1, 2, 3], [2], sampling_params=params)]))
    assert rows.num_candidates[row] == 3
    dictated = step(cached=CachedRequestData([1], [3], [1], [None], [], [], [1], [17]))
    inputs = build_inputs(dictated, rows.apply(dictated), rows)
    assert inputs.token_ids.tolist() == [17]
    assert inputs.sample_start.tolist() == [0, 1]


def test_a_running_sequence_can_replace_its_tokens_and_blocks(rows: InputBatch) -> None:
    (row,) = rows.apply(step([new(1, [1, 2, 3], [2])]))
    rows.append_sampled(np.array([row]), np.array([4]))
    other = step(cached=CachedRequestData([1], [4], [1], [[[8, 9]]], [1], [[5, 6]]))
    assert rows.apply(other).tolist() == [row]
    inputs = build_inputs(other, np.array([row]), rows)
    assert inputs.token_ids.tolist() == [6]
    assert inputs.attention[0].block_table.tolist() == [[8, 9]]
    rows.apply(step([new(2, [1], [3]), new(3, [1], [4])]))
    assert len(rows._sequences) == 3


def test_a_sequence_of_an_earlier_engine_continues(rows: InputBatch) -> None:
    (row,) = rows.apply(step([new(1, [1, 2], [2], output_token_ids=[9], num_scheduled_tokens=3)]))
    assert rows.token_ids[row, :3].tolist() == [1, 2, 9]
    assert rows.num_tokens[row] - rows.num_prompt_tokens[row] == 1


def test_rows_are_freed_by_finishing_in_any_state(rows: InputBatch) -> None:
    for seq_id in (1, 2, 3):
        rows.apply(step([new(seq_id, [1], [seq_id])]))
    rows.apply(step(preempted=[2]))
    rows.apply(step(finished=[1, 2, 3]))
    assert len(rows._sequences) == 0
    assert sorted(rows.apply(step([new(h, [1], [h]) for h in (4, 5, 6)])).tolist()) == [0, 1, 2]


def test_a_finished_seq_id_frees_its_row_for_the_same_step(rows: InputBatch) -> None:
    rows.apply(step([new(h, [1], [h]) for h in (1, 2, 3)]))
    assert len(rows.apply(step([new(4, [1], [9])], finished=[2]))) == 1


def test_clear_frees_all_rows(rows: InputBatch) -> None:
    rows.apply(step([new(h, [1], [h]) for h in (1, 2, 3)]))
    rows.clear()
    assert len(rows._sequences) == 0
    assert len(rows.apply(step([new(h, [1], [h]) for h in (4, 5, 6)]))) == 3


def test_random_operations_agree_with_plain_lists() -> None:
    """Decodes, preemptions and finishes in random order; inputs are checked in every step."""
    rng = random.Random(0)
    rows = InputBatch(num_rows=4, max_model_len=64, block_size=BLOCK)
    tokens: dict[int, list[int]] = {}
    blocks: dict[int, list[int]] = {}
    running: list[int] = []
    parked: list[int] = []
    next_seq_id, next_block = 1, 1

    def take(count: int) -> list[int]:
        nonlocal next_block
        next_block += count
        return list(range(next_block - count, next_block))

    for _ in range(400):
        finished, preempted, fresh = [], [], []
        ended = [h for h in running if len(tokens[h]) > 50 or rng.random() < 0.05]
        for seq_id in ended:
            running.remove(seq_id)
            finished.append(seq_id)
        if running and rng.random() < 0.1:
            preempted.append(running.pop())
            parked.extend(preempted)
        seq_ids, computed, scheduled, grown, resumed, outputs = [], [], [], [], [], []
        for seq_id in running:
            seq_ids.append(seq_id)
            computed.append(len(tokens[seq_id]) - 1)
            scheduled.append(1)
            needs = -(-len(tokens[seq_id]) // BLOCK) - len(blocks[seq_id])
            added = take(needs)
            blocks[seq_id] += added
            grown.append([added] if added else None)
        if parked and not preempted and len(running) < 4:
            seq_id = parked.pop(0)
            running.append(seq_id)
            blocks[seq_id] = take(-(-len(tokens[seq_id]) // BLOCK))
            seq_ids.append(seq_id)
            computed.append(0)
            scheduled.append(len(tokens[seq_id]))
            grown.append([blocks[seq_id]])
            resumed.append(seq_id)
            outputs.append(tokens[seq_id][3:])
        elif len(running) < 4:
            tokens[next_seq_id] = [rng.randrange(1000) for _ in range(3)]
            blocks[next_seq_id] = take(1)
            fresh.append(new(next_seq_id, tokens[next_seq_id][:], blocks[next_seq_id]))
            running.append(next_seq_id)
            next_seq_id += 1
        message = step(
            fresh,
            CachedRequestData(seq_ids, computed, scheduled, grown, resumed, outputs),
            finished,
            preempted,
        )
        step_rows = rows.apply(message)
        if len(step_rows) == 0:
            continue
        inputs = build_inputs(message, step_rows, rows)
        order = [each.seq_id for each in fresh] + seq_ids
        counts = [3] * len(fresh) + scheduled
        expected_tokens, expected_slots = [], []
        for seq_id, count in zip(order, counts, strict=True):
            for position in range(len(tokens[seq_id]) - count, len(tokens[seq_id])):
                expected_tokens.append(tokens[seq_id][position])
                block = blocks[seq_id][position // BLOCK]
                expected_slots.append(block * BLOCK + position % BLOCK)
        assert inputs.token_ids.tolist() == expected_tokens
        assert inputs.attention[0].slot_mapping.tolist() == expected_slots
        assert inputs.sample_tokens.tolist() == (inputs.query_start[1:] - 1).tolist()
        sampled = np.array([rng.randrange(1000) for _ in order])
        rows.append_sampled(step_rows, sampled)
        for seq_id, token in zip(order, sampled.tolist(), strict=True):
            tokens[seq_id].append(token)


def test_the_estimated_bytes_cover_the_arrays():
    rows = InputBatch(num_rows=5, max_model_len=33, block_size=BLOCK, num_groups=3)
    arrays = [each for each in vars(rows).values() if isinstance(each, np.ndarray)]
    taken = sum(each.nbytes for each in [*arrays, rows.block_table.ids])
    needed = InputBatch.bytes_needed(5, 33, BLOCK, 3)
    assert taken <= needed <= taken + 5 * 256


def test_embeddings_of_a_prompt_are_given_for_the_tokens_of_the_step(rows: InputBatch) -> None:
    """In chunks, again after a preemption, and not for output tokens."""
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    penalised = SamplingParams(max_tokens=8, edits=LogitEdits(repetition_penalty=2.0))
    given = new(
        7,
        [0] * 6,
        [3, 4],
        prompt_embeds=embeds.tobytes(),
        num_scheduled_tokens=4,
        sampling_params=penalised,
    )
    first = step([new(5, [1, 2, 3], [1]), given])
    inputs = build_inputs(first, rows.apply(first), rows)
    ((start, found),) = inputs.embeddings
    assert (start, found.tolist()) == (3, embeds[:4].tolist())
    (edits,) = rows.edits.values()
    assert not len(edits.counts.ids), "placeholders are not penalised"

    def cached(**fields: list[object]) -> SchedulerOutput:
        return step(cached=CachedRequestData(seq_ids=[7], new_block_ids=[None], **fields))

    second = cached(num_computed_tokens=[4], num_scheduled_tokens=[2])
    inputs = build_inputs(second, rows.apply(second), rows)
    assert [(start, rows.tolist()) for start, rows in inputs.embeddings] == [
        (0, embeds[4:].tolist())
    ]
    rows.append_sampled(rows.apply(cached()), np.array([9]))
    third = cached(num_computed_tokens=[6], num_scheduled_tokens=[1])
    assert build_inputs(third, rows.apply(third), rows).embeddings == ()

    rows.apply(step(preempted=[7]))
    again = step(
        cached=CachedRequestData([7], [0], [7], [[[3, 4]]], [7], [[9]]),
    )
    ((start, found),) = build_inputs(again, rows.apply(again), rows).embeddings
    assert (start, found.tolist()) == (0, embeds.tolist())
    rows.apply(step(finished=[7]))
    assert rows.prompt_embeds == {}
