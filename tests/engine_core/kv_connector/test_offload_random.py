"""Random requests over a small pool and a small medium, whose copies end late or fail.

The runner reads every position back, so it detects KV of a wrong prefix at once. The tokens must be
those of each request running alone, and at the end no block may stay referenced.
"""

import random

import pytest

from engine_core.kv_cache.integrity import check
from engine_core.request import Request
from proto.messages.engine_io import FinishReason
from proto.messages.kv_connector import TransferJob
from tests.fakes.beam_reference import beam_search
from tests.fakes.engine_harness import EOS
from tests.fakes.offload_rig import OffloadRig
from tests.fakes.paged_runner import hashed_logprobs, undisturbed

NUM_STEPS = 80


class Machine:
    """An OffloadRig and random operations on it."""

    def __init__(self, seed: int, *, has_states: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self.reliability = rng.choice([1.0, 1.0, 0.8])
        windows = rng.choice([(None,), (None,), (None, 14), (20, None, 14), (14,), (1, None)])
        size = 4 if has_states or 1 in windows else rng.choice([4, 8, 12])
        # Some of them so few that requests wait for slots, or are computed one after the other.
        self.num_state_slots = rng.choice([5, 9, 40]) if has_states else 0
        self.rig = OffloadRig(
            size=size,
            windows=windows,
            num_state_slots=self.num_state_slots,
            num_slots=rng.choice([3, 10, 40, 200]),
            num_blocks=rng.choice([24, 40, 80]) * len(windows),
            num_ranks=rng.choice([1, 2]),
            finishes=self.finishes,
            extra={
                "eviction_policy": rng.choice(["lru", "arc"]),
                "store_threshold": rng.choice([0, 0, 2]),
            },
            max_num_batched_tokens=rng.choice([16, 40, 8192]),
            async_scheduling=rng.random() < 0.5,
        )
        self.prompts = [[rng.randrange(1000) for _ in range(60)] for _ in range(3)]
        self.requests: list[tuple[Request, list[int], int]] = []
        self.searches: list[tuple[list[Request], list[int]]] = []
        self.aborted: set[int] = set()
        self.is_patient = True

    def finishes(self, job: TransferJob) -> bool | None:
        if self.is_patient and self.rng.random() < 0.6:
            return None
        return self.rng.random() < self.reliability

    def add(self) -> None:
        prompt = self.rng.choice(self.prompts)[: self.rng.randint(1, 60)]
        prompt = prompt + [self.rng.randrange(1000)] * self.rng.choice([0, 0, 1, 5])
        if self.num_state_slots and self.rng.random() < 0.15:
            rows = self.rig.add(prompt, 8, n=2, beam_width=2)
            self.searches.append((rows, prompt))
            return
        num_tokens = self.rng.randint(1, 20)
        request = self.rig.add_one(prompt, num_tokens, ignore_eos=True)
        self.requests.append((request, prompt, num_tokens))

    def disturb(self) -> None:
        action = self.rng.random()
        if action < 0.3:
            self.add()
        elif action < 0.35 and self.requests:
            request, _, _ = self.rng.choice(self.requests)
            if self.rig.scheduler.abort_request(request.request_id):
                self.aborted.add(request.seq_id)
        elif action < 0.37:
            self.rig.scheduler.reset_prefix_cache(preempting=True)
        elif action < 0.38:
            self.rig.offloading.reset_cache()
        elif action < 0.385:
            self.rig.lose_workers(self.rig.scheduler.worker_epoch + 1)

    def run(self) -> None:
        rig = self.rig
        for _ in range(NUM_STEPS):
            self.disturb()
            rig.step()
            assert check(rig.kv_cache) == []
        self.is_patient = False
        rig.run_until_idle()
        for request, prompt, num_tokens in self.requests:
            if request.seq_id not in self.aborted:
                assert rig.tokens_of(request) == undisturbed(prompt, num_tokens)
                assert rig.finish_reason_of(request) is FinishReason.LENGTH
        for rows, prompt in self.searches:
            assert [rig.tokens_of(row) for row in rows] == beam_search(
                prompt, hashed_logprobs, width=2, max_tokens=8, stop_ids=(EOS,)
            )
        rig.assert_idle()
        assert rig.offloading.reset_cache()
        assert not rig.offloading._loads._loading
        assert not rig.offloading._requests


@pytest.mark.parametrize("first", [0, 3, 6, 9])
def test_random_requests_keep_the_invariants(first: int) -> None:
    """Run three random lives each, all of which load at least once."""
    machines = [Machine(seed) for seed in range(first, first + 3)]
    for each in machines:
        each.run()
    assert sum(len(each.rig.loads) for each in machines) > 5


@pytest.mark.parametrize("first", [100, 108, 116, 124])
def test_random_requests_with_states_keep_the_invariants(first: int) -> None:
    """Run eight random lives each, all of which load states at least once."""
    machines = [Machine(seed, has_states=True) for seed in range(first, first + 8)]
    for each in machines:
        each.run()
    loads = [job for each in machines for job in each.rig.loads]
    assert sum(job.is_of_states for job in loads) > 5
    assert sum(not job.is_of_states for job in loads) > 5
