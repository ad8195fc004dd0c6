"""Logits edited on a device equal, bit for bit, logits edited on the host.

The kernels run in Triton's interpreter and are compiled for Hopper without a GPU.
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import (
    CachedRequestData,
    GrammarOutput,
    NewRequestData,
    SchedulerOutput,
)
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_device import on_host
from tests.fakes.triton import interpret_kernels, need_triton
from tests.worker.ahead_of_time import Kernel, compiled
from tests.worker.reference.torch_kernels import TorchEdits, draw_by_torch
from tests.worker.sampling.edit_cases import random_edits
from tests.worker.sampling.settings import last_positions
from worker.batch.input_batch import InputBatch
from worker.batch.transfers import HostTransfers
from worker.cuda.sampling.device_kernels import (
    NONE,
    SEEN,
    ListedEdits,
    RowEditArrays,
    TritonEdits,
    largest_edits,
)
from worker.cuda.sampling.device_sampler import (
    BatchLogitEdits,
    DeviceSampler,
    LogprobRequests,
    batch_logit_edits,
)
from worker.cuda.transfers import Transfers
from worker.reference.sampling import TorchBackend
from worker.sampling.logit_edits import apply_grammar_masks, edit_logits, grammar_masks
from worker.sampling.logprobs import pack_logprobs
from worker.sampling.sampler import Sampler, SamplingBatch

pytestmark = pytest.mark.suite("devices")

NUM_ROWS = 12
SIZES = [97, 1024, 1031, 2500]


@pytest.fixture(params=["torch", "triton"])
def edits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TritonEdits:
    if request.param == "torch":
        return TorchEdits()
    interpret_kernels(monkeypatch)
    return TritonEdits()


class Event:
    """An event of a device that is always finished."""

    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class HostAccelerator:
    """An Accelerator in host memory, for kernels that the interpreter runs."""

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return Event()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("sampling must not wait for the device")


def new_request(seq_id: int, rng: random.Random, **params: Any) -> NewRequestData:
    outputs = rng.choices(range(6), k=rng.randint(0, 20))
    return NewRequestData(
        seq_id=seq_id,
        prompt_token_ids=rng.choices(range(97), k=rng.randint(1, 30)),
        output_token_ids=outputs,
        sampling_params=SamplingParams(max_tokens=60, **params),
        seed=seq_id,
        choice=0,
        block_ids=[[1]],
        num_computed_tokens=0,
        num_scheduled_tokens=1,
    )


def step_of(new: list[NewRequestData], finished: Sequence[int] = ()) -> SchedulerOutput:
    return SchedulerOutput(
        epoch=1,
        step=1,
        new_requests=new,
        cached_requests=CachedRequestData(),
        total_num_scheduled_tokens=len(new),
        finished_seq_ids=list(finished),
        preempted_seq_ids=[],
    )


def random_params(rng: random.Random) -> dict[str, Any]:
    """Random parameters of a request; a third have no edits."""
    return {
        "edits": random_edits(rng) if rng.random() < 0.7 else None,
        "temperature": rng.choice([0.0, 0.8, 1.3]),
        "logprobs": rng.choice([None, None, 0, 4]),
        "min_tokens": rng.choice([0, 30]),
        "stop_token_ids": (3, 5),
    }


def random_masks(rng: random.Random, seq_ids: list[int], vocab_size: int) -> GrammarOutput:
    """Random masks of some sequences; every mask allows some token that no edit forbids."""
    some = [seq_id for seq_id in seq_ids if rng.random() < 0.4]
    draw = np.random.default_rng(rng.randrange(1 << 30))
    bits = draw.random((len(some), -(-vocab_size // 32) * 32)) < 0.5
    return GrammarOutput(1, 1, some, np.packbits(bits, bitorder="little").tobytes())


def random_logits_of(seed: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3


def edited_logits(
    logits: torch.Tensor, batch_edits: BatchLogitEdits, kernels: TritonEdits, last: torch.Tensor
) -> torch.Tensor:
    """Edit by the kernels, with token counts from the host."""
    vocab_size = logits.shape[1]
    counts = torch.zeros(max(1, len(batch_edits.penalised)), vocab_size, dtype=torch.int32)
    slots = np.full(len(batch_edits.positions), NONE, dtype=np.int64)
    for slot, each in enumerate(batch_edits.penalised):
        slots[each.edit_index] = slot
        output_counts = torch.from_numpy(each.edits.counts.counts.astype(np.int32))
        counts[slot, torch.from_numpy(each.edits.counts.ids)] = output_counts + SEEN
    send: Transfers = HostTransfers()
    logits = logits.clone()
    kernels.add_listed(logits, ListedEdits(*send.to_device(batch_edits.listed)), last)
    rows = [batch_edits.positions, slots, batch_edits.masks, batch_edits.rules, batch_edits.words]
    kernels.edit_rows(logits, RowEditArrays(*send.to_device(rows)), counts)
    return logits


@pytest.mark.parametrize("vocab_size", SIZES)
def test_random_edits_equal_those_of_the_host(vocab_size: int, edits: TritonEdits) -> None:
    rng = random.Random(vocab_size)
    rows = InputBatch(NUM_ROWS, 64, 16)
    seq_ids = list(range(50, 50 + NUM_ROWS))
    at = rows.apply(step_of([new_request(each, rng, **random_params(rng)) for each in seq_ids]))
    masks = random_masks(rng, seq_ids, vocab_size)
    positions = last_positions(rows, at, seq_ids)
    batch_edits = batch_logit_edits(rows, positions, masks, vocab_size)
    logits = random_logits_of(vocab_size, vocab_size)
    found = edited_logits(logits, batch_edits, edits, torch.zeros(NUM_ROWS, dtype=torch.int64))
    expected = logits.clone()
    short = rows.num_tokens[at] - rows.num_prompt_tokens[at] < rows.min_output[at]
    expected[np.ix_(short, [3, 5])] = float("-inf")  # type: ignore[index]
    edit_logits(expected, [(i, rows.edits[row]) for i, row in enumerate(at) if row in rows.edits])
    apply_grammar_masks(expected, grammar_masks(masks, seq_ids))
    assert torch.equal(found, expected)
    assert not torch.equal(found, logits)
    assert torch.equal(logits, random_logits_of(vocab_size, vocab_size))


class BatchPair:
    """Two equal input batches: a device's, whose last token is always in flight, and the host's."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.device_batch, self.host_batch = (
            InputBatch(NUM_ROWS, 64, 16),
            InputBatch(NUM_ROWS, 64, 16),
        )
        self.seq_ids: list[int] = []
        self.at = np.empty(0, dtype=np.int64)
        self._pending: tuple[Any, ...] | None = None

    def apply(self, step: SchedulerOutput) -> None:
        """Add and finish requests in both batches."""
        at = self.device_batch.apply(step)
        assert at.tolist() == self.host_batch.apply(step).tolist()
        stay = [seq_id not in step.finished_seq_ids for seq_id in self.seq_ids]
        self.at = np.concatenate((self.at[stay], at))
        self.seq_ids = [each for each, stays in zip(self.seq_ids, stay, strict=True) if stays] + [
            each.seq_id for each in step.new_requests
        ]

    def sample_on_device(
        self, sampler: DeviceSampler, logits: torch.Tensor, masks: GrammarOutput
    ) -> tuple[torch.Tensor, list[Any]]:
        """Sampled tokens, and log-probabilities as packed on the host."""
        positions = last_positions(self.device_batch, self.at, self.seq_ids)
        wanted = LogprobRequests.of(self.device_batch, positions)
        token_ids, logprobs = sampler.sample(logits, positions, masks, wanted)
        if self._pending is not None:
            self.device_batch.resolve_pending(*self._pending)
        found = on_host(token_ids).numpy()
        self._pending = (self.device_batch.append_pending(positions), found)
        arrays = [on_host(each).numpy().reshape(-1) for each in logprobs]
        if not wanted:
            return token_ids, []
        return token_ids, pack_logprobs(arrays, wanted.num_logprobs, wanted.position, wanted.named)

    def sample_on_host(self, logits: torch.Tensor, masks: GrammarOutput) -> tuple[Any, list[Any]]:
        rows, at = self.host_batch, self.at
        position = rows.num_tokens[at] - rows.num_prompt_tokens[at]
        late = np.flatnonzero(position < rows.min_output[at])
        asked = SamplingBatch(
            rows.params_of(last_positions(rows, at, self.seq_ids)),
            rows.num_logprobs[at],
            suppressed=tuple((int(i), np.array([3, 5])) for i in late),
            edits=tuple((i, rows.edits[row]) for i, row in enumerate(at) if row in rows.edits),
            masks=grammar_masks(masks, self.seq_ids),
        )
        token_ids, logprobs = Sampler(TorchBackend()).sample(logits.clone(), asked)
        rows.append_sampled(at, token_ids)
        return token_ids, [each for each in logprobs if each is not None]


@pytest.mark.parametrize("on", ["host", "fake device"])
@pytest.mark.parametrize("vocab_size", [97, 1031])
def test_a_row_is_sampled_while_its_last_token_is_still_on_the_device(
    vocab_size: int, on: str, edits: TritonEdits
) -> None:
    """Sequences start and end, and their rows are reused."""
    if on == "fake device" and isinstance(edits, TritonEdits):
        pytest.skip("the interpreter computes on the host")
    rng = random.Random(vocab_size)
    cuda = FakeCuda()
    with cuda, torch.inference_mode():
        accelerator: Any = cuda.device if on == "fake device" else HostAccelerator()
        pair = BatchPair(vocab_size)
        last = accelerator.zeros(NUM_ROWS, torch.int64)
        sampler = DeviceSampler(
            accelerator, pair.device_batch, last, vocab_size, draw_by_torch, edits
        )
        seq_id = 0
        for step in range(24):
            finished = [each for each in pair.seq_ids if rng.random() < 0.08]
            count = NUM_ROWS - len(pair.seq_ids) + len(finished)
            new = [
                new_request(seq_id + i, rng, **random_params(rng))
                for i in range(rng.randint(0, count))
            ]
            seq_id += len(new)
            pair.apply(step_of(new, finished))
            if not pair.seq_ids:
                continue
            logits = random_logits_of(step, vocab_size)[: len(pair.seq_ids)]
            logits[:, :6] += 5.0  # the tokens of bad words
            masks = random_masks(rng, pair.seq_ids, vocab_size)
            device_logits = accelerator.zeros(logits.numel(), torch.float32).view(logits.shape)
            on_host(device_logits).copy_(logits)
            token_ids, logprobs = pair.sample_on_device(sampler, device_logits, masks)
            expected, wanted = pair.sample_on_host(logits, masks)
            assert on_host(token_ids).tolist() == expected.tolist()
            assert [each.token_ids for each in logprobs] == [each.token_ids for each in wanted]
            assert [each.ranks for each in logprobs] == [each.ranks for each in wanted]
            for one, other in zip(logprobs, wanted, strict=True):
                values = [np.frombuffer(each.logprobs, "<f4") for each in (one, other)]
                assert np.allclose(*values, atol=1e-6)
            rows = accelerator.zeros(len(pair.at), torch.int64)
            on_host(rows).copy_(torch.from_numpy(pair.at))
            last.index_copy_(0, rows, token_ids)
        assert sampler._counts.counts.shape == (NUM_ROWS, vocab_size)
        assert seq_id > NUM_ROWS


def test_named_tokens_replace_the_best_ones_in_logprobs() -> None:
    pair = BatchPair(97)
    rng = random.Random(1)
    named = {"logprobs": 2, "logprob_token_ids": (9, 2, 50)}
    pair.apply(step_of([new_request(1, rng, logprobs=3), new_request(2, rng, **named)]))
    accelerator: Any = HostAccelerator()
    last = accelerator.zeros(NUM_ROWS, torch.int64)
    sampler = DeviceSampler(accelerator, pair.device_batch, last, 97, draw_by_torch, TorchEdits())
    logits = random_logits_of(1, 97)[:2]
    nothing = GrammarOutput(1, 1, [], b"")
    token_ids, (first, second) = pair.sample_on_device(sampler, logits, nothing)
    assert (first.width, second.width) == (4, 4)
    ids = np.frombuffer(second.token_ids, "<i4").tolist()
    assert ids == [int(token_ids[1]), 9, 2, 50]
    expected = logits[1].double().log_softmax(0)[ids].numpy()
    assert np.abs(np.frombuffer(second.logprobs, "<f4") - expected).max() < 1e-5


def test_the_kernels_compile_for_a_gpu_and_round_like_the_host() -> None:
    need_triton()
    pointers = dict.fromkeys(("rows", "slots", "masks"), "*i64")
    rows = Kernel(
        "sampling.edit_chunk",
        {"logits": "*fp32", "counts": "*i32", "words": "*i32"}
        | pointers
        | {"rules": "*fp32", "vocab_size": "i32", "num_words": "i32"},
        {"seen": SEEN, "chunk_size": 1024},
        {"enable_fp_fusion": False},
    )
    listed = Kernel(
        "sampling.add_listed",
        {"logits": "*fp32", "indices": "*i64", "values": "*fp32"}
        | dict.fromkeys(("sources", "needed", "last"), "*i64")
        | {"count": "i32"},
        {"any_token": -1, "block_size": 128},
    )
    changes, additions = compiled([rows, listed])
    assert "fma." not in changes
    assert "div.rn.f32" in changes
    assert "atom" in additions or "red." in additions


def test_the_largest_edits_cover_every_row() -> None:
    """Penalties of all rows by their token counts, and masks as long as those of grammars."""
    vocab_size = 97
    at, slots, masks, rules, words = map(torch.from_numpy, largest_edits(3, vocab_size))
    logits = random_logits_of(1, vocab_size)[:3].contiguous()
    counts = torch.zeros(3, vocab_size, dtype=torch.int32)
    counts[1, 5] = SEEN + 2
    edited_logits = logits.clone()
    changes = RowEditArrays(at, slots, masks, rules.view(-1, 3), words.view(3, -1))
    TorchEdits().edit_rows(edited_logits, changes, counts)
    expected = logits.clone()
    score = float(logits[1, 5])
    expected[1, 5] = (score / 1.1 if score > 0 else score * 1.1) - 0.1 * 2 - 0.1
    assert torch.allclose(edited_logits, expected, atol=1e-6)
    assert edited_logits[1, 5] != logits[1, 5]
