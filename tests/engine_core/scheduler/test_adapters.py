"""Adapters in the scheduler: which requests wait, for how long, and what the workers hold."""

from collections.abc import Sequence

import pytest

from engine_core.request import Request, RequestStatus
from proto.messages.engine_io import AgentHint
from proto.settings.config import LoRAConfig
from tests.fakes.engine_harness import EngineHarness, scheduled
from tests.fakes.lora import lora_request

WAITS = RequestStatus.WAITING_FOR_ADAPTER


class AdapterHarness(EngineHarness):
    """An engine that serves adapters; its workers load them at once, unless `loads_later`."""

    def __init__(self, *, loads_later: bool = False, **settings: object) -> None:
        names = LoRAConfig.__struct_fields__
        given = {name: settings.pop(name) for name in names if name in settings}
        super().__init__(lora=LoRAConfig(enable_lora=True, **given), **settings)  # type: ignore[arg-type]
        assert self.scheduler.adapters is not None
        assert self.adapters is not None
        self.gate, self.workers = self.scheduler.adapters, self.adapters
        self.workers.loads_later = loads_later

    def add_with(self, number: int, *prompt: int, max_tokens: int = 4, **fields: object) -> Request:
        if number:
            fields["lora_request"] = lora_request(number)
        return self.add_one(list(prompt) or [number, 1, 2], max_tokens, **fields)

    def run_adapters(self, requests: Sequence[Request]) -> None:
        for _ in range(1000):
            if all(self.finish_reason_of(request) is not None for request in requests):
                if self.scheduler.has_work and not self.scheduler.num_unfinished:
                    self.step()  # names the ended sequences
                return
            self.step()
        raise AssertionError("some requests never ended")


def test_a_request_is_skipped_only_under_its_four_conditions() -> None:
    """LoRA is on; it has an adapter; max_loras others run; and its own is not among them."""
    engine = AdapterHarness(max_loras=2)
    first, second = engine.add_with(1, max_tokens=9), engine.add_with(2, max_tokens=9)
    engine.step()  # loads
    engine.step()
    skipped = engine.add_with(3)
    same, base = engine.add_with(2), engine.add_with(0)
    engine.step()
    engine.step()
    assert skipped.status is WAITS
    running = RequestStatus.RUNNING
    assert [each.status for each in (first, second, same, base)] == [running] * 4
    engine.run_adapters([skipped, same, base])
    engine.assert_idle()


def test_without_lora_requests_have_no_gate() -> None:
    engine = EngineHarness()
    assert engine.scheduler.adapters is None
    assert engine.scheduler.pop_stats().lora is None


def test_a_load_blocks_no_other_request() -> None:
    engine = AdapterHarness(loads_later=True)
    waits, base = engine.add_with(1), engine.add_with(0, max_tokens=5)
    for _ in range(3):
        assert scheduled(engine.step()) == {base.seq_id: 1} or base.num_output_tokens == 1
    assert (waits.status, engine.workers.loads) == (WAITS, [1])
    assert engine.workers.finish(1) == [waits]
    assert waits.seq_id in scheduled(engine.step())
    engine.run_adapters([waits, base])
    engine.assert_idle()


def test_newcomers_of_running_adapters_do_not_starve_another_one() -> None:
    """Requests of the running adapter arrive all the time; the other one waits a bounded time."""
    engine = AdapterHarness(max_loras=1, max_lora_wait_steps=10)
    engine.add_with(1, max_tokens=6)
    engine.step()
    waits = engine.add_with(2)
    steps = 0
    while waits.status is not RequestStatus.RUNNING:
        engine.add_with(1, max_tokens=6)
        engine.step()
        steps += 1
        assert steps <= 10 + 6 + 2, "it starves"
    assert steps > 8, "it was not skipped"


def test_requests_without_an_adapter_pass_one_that_comes_first() -> None:
    engine = AdapterHarness(max_loras=1, max_lora_wait_steps=2)
    engine.add_with(1, max_tokens=30)
    engine.step()
    waits = engine.add_with(2)
    for _ in range(6):
        engine.step()
    same, base = engine.add_with(1), engine.add_with(0)
    engine.step()
    engine.step()
    assert (waits.status, same.status, base.status) == (WAITS, WAITS, RequestStatus.RUNNING)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_one_that_comes_first_gets_the_next_free_slot(policy: str) -> None:
    """Not a request of a third adapter, although it may have been added, or be more urgent."""
    engine = AdapterHarness(max_loras=2, max_lora_wait_steps=3, scheduling_policy=policy)
    more = {"priority": 1} if policy == "priority" else {}
    engine.add_with(1, max_tokens=12, **more)
    engine.add_with(2, max_tokens=40, **more)
    engine.step()
    engine.step()
    waits = engine.add_with(3, **more)
    for _ in range(5):
        engine.step()
    urgent = engine.add_with(4)
    held = engine.add_with(2)
    while waits.status is not RequestStatus.RUNNING:
        engine.step()
        assert urgent.status is not RequestStatus.RUNNING
    engine.run_adapters([waits, urgent, held])


def test_a_pause_frees_what_a_request_that_comes_first_holds_back() -> None:
    """Paused requests hold back none that continue."""
    engine = AdapterHarness(max_loras=1, max_lora_wait_steps=2, num_blocks=5, max_num_seqs=4)
    begun = engine.add_with(1, *range(20), max_tokens=20)
    engine.step()
    engine.step()
    waits = engine.add_with(2)
    for _ in range(6):
        engine.step()
    assert waits.status is WAITS
    engine.scheduler.pause("finish_running")
    engine.scheduler.reset_prefix_cache(preempting=True)
    engine.run_adapters([begun])
    engine.scheduler.resume()
    engine.run_adapters([waits])
    engine.assert_idle()


def test_the_least_recently_used_adapter_is_evicted_and_loaded_again() -> None:
    engine = AdapterHarness(max_loras=1, max_cpu_loras=2)
    for number in (1, 2, 1, 3):
        engine.run_adapters([engine.add_with(number, max_tokens=1)])
    assert (engine.workers.loads, engine.workers.held) == ([1, 2, 3], {1, 3})
    engine.run_adapters([engine.add_with(2, max_tokens=1)])
    assert (engine.workers.loads, engine.workers.held) == ([1, 2, 3, 2], {2, 3})
    stats = engine.scheduler.pop_stats().lora
    assert stats is not None
    assert (stats.num_evicted, len(stats.load_seconds)) == (2, 4)
    assert engine.gate.usage(1).num_resident == 2


def test_adapters_of_running_and_of_waiting_requests_stay() -> None:
    """One that is loaded for a waiting request is not evicted for the next one."""
    engine = AdapterHarness(max_loras=1, max_cpu_loras=2)
    runs = engine.add_with(1, max_tokens=8)
    engine.step()
    second, third = engine.add_with(2), engine.add_with(3)
    for _ in range(4):
        engine.step()
    assert engine.workers.held == {1, 2}
    engine.run_adapters([runs, second, third])
    assert engine.workers.loads == [1, 2, 3]


def test_a_crowd_of_adapters_is_served_with_memory_for_few() -> None:
    engine = AdapterHarness(max_loras=2, max_cpu_loras=2, max_lora_wait_steps=5)
    requests = [engine.add_with(1 + number % 7, number, 5) for number in range(40)]
    engine.run_adapters(requests)
    engine.assert_idle()
    assert not engine.gate.num_unfinished


def test_a_failed_load_names_the_requests_that_wait_for_it() -> None:
    engine = AdapterHarness(loads_later=True)
    bad, good = engine.add_with(1), engine.add_with(2)
    engine.step()
    failed = engine.workers.finish(1, succeeded=False)
    assert failed == [bad]
    engine.scheduler.abort_request(bad.request_id)
    engine.workers.finish(2)
    engine.run_adapters([good])
    engine.assert_idle()


def test_new_workers_load_what_is_needed_again() -> None:
    engine = AdapterHarness(max_loras=2)
    runs, waits = engine.add_with(1, max_tokens=8), engine.add_with(2, max_tokens=8)
    engine.step()
    engine.step()
    engine.lose_workers()
    engine.run_adapters([runs, waits])
    assert sorted(engine.workers.loads) == [1, 1, 2, 2]
    engine.assert_idle()


def test_an_adapter_that_is_forgotten_goes_with_its_last_request() -> None:
    engine = AdapterHarness()
    request = engine.add_with(1)
    engine.step()
    engine.gate.residency.unnamed.add(1)
    engine.run_adapters([request])
    engine.step()
    assert (engine.workers.held, engine.gate.residency.resident) == (set(), {})


def test_kv_is_apart_by_content_and_scale_and_shared_by_equal_contents() -> None:
    engine = AdapterHarness(block_size=4, enable_prefix_caching=True)
    prompt = list(range(12))

    def cached(**fields: object) -> int:
        request = engine.add_one(prompt, 1, **fields)
        engine.run_adapters([request])
        return request.num_cached_tokens

    assert cached() == 0
    assert cached(lora_request=lora_request(1)) == 0
    assert cached(lora_request=lora_request(1, lora_name="other", path="/elsewhere")) == 8
    assert cached(lora_request=lora_request(2)) == 0
    assert cached(lora_request=lora_request(1, scale=0.5)) == 0
    assert cached(lora_request=lora_request(1, scale=0.5)) == 8
    assert cached() == 8
    assert cached(lora_request=lora_request(1), cache_salt="s") == 0


def test_workers_and_statistics_name_the_adapters() -> None:
    engine = AdapterHarness(max_loras=1)
    engine.add_one([1], 5, lora_request=lora_request(7, scale=0.25))
    engine.step()
    (new,) = engine.step().new_requests
    assert (new.lora_int_id, new.lora_scale) == (7, 0.25)
    assert new.extra_key
    engine.add_with(8)
    engine.step()
    usage = engine.gate.usage(1)
    assert (usage.running, usage.waiting) == (["adapter-7"], ["adapter-8"])


def test_a_session_keeps_its_adapter_from_turn_to_turn() -> None:
    engine = AdapterHarness()
    request = engine.add_one([1, 2], 2, resumable=True, lora_request=lora_request(5))
    for _ in range(4):
        engine.step()
    engine.add_session_input(request, [3], 2, last=True)
    engine.run_adapters([request])
    assert set(engine.workers.adapter_of.values()) == {5}


def test_a_turn_with_another_adapter_uses_no_retained_kv() -> None:
    engine = AdapterHarness(block_size=4, scheduling_policy="continuum", pin_policy="fixed")
    prompt, found = list(range(20)), []
    for adapter in (lora_request(1), lora_request(2), None, lora_request(2)):
        agent = AgentHint("a", ttl_ms=1e9)
        turn = engine.add_one(prompt, 4, agent=agent, lora_request=adapter)
        engine.run_adapters([turn])
        found.append(turn.num_cached_tokens)
        engine.scheduler.report_tool(turn.request_id, "a", "tool")
    assert found == [0, 0, 0, 16]
    assert engine.scheduler.pop_stats().num_pins_taken == 4


def test_the_rows_of_a_search_have_its_adapter() -> None:
    engine = AdapterHarness(max_loras=1)
    other = engine.add_with(1, max_tokens=12)
    engine.step()
    rows = engine.add([1, 2, 3], 6, n=2, beam_width=2, lora_request=lora_request(2))
    engine.run_adapters([other])
    engine.run_adapters(rows[:1])
    engine.assert_idle()
    assert set(engine.workers.adapter_of.values()) == {1, 2}
