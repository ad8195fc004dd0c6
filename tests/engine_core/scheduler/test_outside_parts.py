"""Parts of the scheduler from outside: a policy, a feature, an order of eviction, a proposer."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine_core.kv_cache.free_queue import NULL_BLOCK, OrderedFreeQueue, make_free_queue
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.outside import FeatureContext, OutsideFeature
from engine_core.speculation.drafting import make_drafting
from proto.errors import ConfigError
from proto.runtime import plugins
from proto.settings.speculative_config import parse_speculative_config
from tests.fakes.engine_harness import EngineHarness
from worker.models.families import family_of, use_families

EXAMPLE = Path(__file__).parents[2] / "example_plugin"
HERE = "tests.engine_core.scheduler.test_outside_parts"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


class OddTurns(OutsideFeature):
    """Holds back requests with an odd prompt until one with an even one has ended."""

    made: "list[OddTurns]" = []

    def __init__(self, context: FeatureContext) -> None:
        super().__init__(context)
        self.held: list[Request] = []
        self.made.append(self)

    def is_blocked(self, candidate: Any) -> bool:
        is_odd = candidate.request.num_prompt_tokens % 2 == 1
        if is_odd and candidate.request not in self.held:
            self.held.append(candidate.request)
            return True
        return False

    def on_released(self, request: Request) -> None:
        for each in self.held:
            self.context.unblock(each)


def admitted(engine: EngineHarness, requests: list[Request]) -> list[int]:
    """Run to the end; return the lengths of the prompts in the order of admission."""
    order: list[Request] = []
    while engine.scheduler.num_unfinished:
        engine.step()
        order += [each for each in requests if each.scheduled_at and each not in order]
    return [each.num_prompt_tokens for each in order]


def test_a_policy_from_outside_orders_waiting_requests_and_preemption() -> None:
    engine = EngineHarness(
        max_num_seqs=1, scheduling_policy="tokend_example.engine:LongestFirst", num_blocks=20
    )
    requests = [engine.add_one([number] * length, 3) for number, length in enumerate((5, 40, 9))]
    assert admitted(engine, requests) == [40, 9, 5]
    engine = EngineHarness(
        scheduling_policy="tokend_example.engine:LongestFirst", num_blocks=11, block_size=4
    )
    requests = [engine.add_one([number] * length, 14) for number, length in enumerate((6, 12, 9))]
    engine.run()
    shortest, longest, _ = requests
    assert shortest.num_preemptions > 0, "the one that was admitted last"
    assert longest.num_preemptions == 0
    engine.assert_idle()


def test_a_feature_from_outside_holds_requests_back_and_sees_their_ends() -> None:
    engine = EngineHarness(scheduler_features=(f"{HERE}:OddTurns",))  # type: ignore[arg-type]
    feature = OddTurns.made[-1]
    odd, even = engine.add_one([1] * 7, 2), engine.add_one([2] * 8, 4)
    engine.step()
    assert odd.status is RequestStatus.WAITING_FOR_FEATURE
    assert even.status is RequestStatus.RUNNING
    engine.run()
    assert odd.status.is_finished
    assert feature.held == [odd]
    engine.assert_idle()


def test_an_order_of_eviction_from_outside_keeps_what_the_queue_promises() -> None:
    num_blocks, rng = 40, random.Random(0)
    queue = make_free_queue("tokend_example.engine:MostRecentFirst", num_blocks)
    assert isinstance(queue, OrderedFreeQueue)
    counts = [0] * num_blocks
    for _ in range(2000):
        free = {block for block in range(1, num_blocks) if not counts[block]}
        assert set(queue) == free
        assert len(queue) == queue.num_free == len(free)
        assert list(queue.ref_counts) == counts
        match rng.randrange(4):
            case 0:
                number = rng.randrange(1, 6)
                expected = list(queue)[:number]
                if number > len(free):
                    with pytest.raises(ValueError, match="No free blocks"):
                        queue.popleft_n(number)
                    continue
                assert queue.peek() == expected[0]
                assert queue.popleft_n(number) == expected
                for block in expected:
                    counts[block] = 1
            case 1:
                used = [block for block in range(1, num_blocks) if counts[block]]
                blocks = rng.sample(used, min(len(used), rng.randrange(6)))
                queue.release([*blocks, NULL_BLOCK])
                for block in blocks:
                    counts[block] -= 1
                last = [block for block in blocks if not counts[block]]
                assert list(queue)[: len(last)] == last, "the first of them goes first"
            case 2:
                blocks = rng.sample(range(num_blocks), 5)
                queue.touch(blocks)
                for block in set(blocks) - {NULL_BLOCK}:
                    counts[block] += 1
            case 3:
                blocks = rng.sample(range(num_blocks), 5)
                queue.move_to_front(blocks)
                wanted = [block for block in blocks if block in free]
                assert list(queue)[: len(wanted)] == wanted


def test_a_proposer_from_outside_drafts() -> None:
    text = '{"method": "tokend_example.engine:RepeatedToken", "num_speculative_tokens": 2}'
    drafting = make_drafting(parse_speculative_config(text, 4), None)
    assert drafting is not None
    assert "RepeatedToken" in drafting.description
    engine = EngineHarness(
        drafting=drafting, next_token=lambda tokens, choice: 7, num_draft_positions=64
    )
    request = engine.add_one([7] * 20, 60)
    steps = engine.run()
    assert request.num_output_tokens == 60
    assert steps < 60, "some drafts were accepted"
    counts = drafting.pop_source_counts()
    ((tried, accepted),) = counts.values()
    assert tried == accepted > 0


def test_a_family_from_outside_is_found_while_it_is_named() -> None:
    with pytest.raises(Exception, match="is not supported"):
        family_of("ExampleForCausalLM")
    use_families(["tokend_example.family:FAMILY"])
    try:
        assert family_of("ExampleForCausalLM").model_types == ("example",)
    finally:
        use_families([])
    with pytest.raises(Exception, match="is not supported"):
        family_of("ExampleForCausalLM")


def test_a_tool_call_format_from_outside_parses_calls() -> None:
    from api_server.parsers.tools.registry import tool_call_format

    found = tool_call_format("tokend_example.tools:ANGLED", None, template_has_tools=False)
    assert found is not None
    assert (found.name, found.call_markers) == ("angled", ("<<call>>",))


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (lambda: make_free_queue("unknown", 9), "unknown is not registered in tokend.plugins"),
        (lambda: make_free_queue("json:JSONDecoder", 9), "no subclass of .*EvictionOrder"),
        (
            lambda: EngineHarness(scheduling_policy="json:loads"),
            "no subclass of .*Policy",
        ),
        (lambda: EngineHarness(scheduler_features=("json:x",)), "json has no x"),  # type: ignore[arg-type]
        (lambda: use_and_find("json:loads"), "is no Family"),
    ],
)
def test_what_is_no_part_is_refused(load: Callable[[], object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load()


def use_and_find(name: str) -> None:
    use_families([name])
    try:
        family_of("ExampleForCausalLM")
    finally:
        use_families([])


def test_names_come_from_one_group_of_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    target = "tokend_example.engine:LongestFirst"
    entry = EntryPoint("scheduling_policy.longest", target, plugins.GROUP)
    plugins._installed.cache_clear()
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    assert plugins.installed_names("scheduling_policy") == ["longest"]
    assert plugins.target_of("scheduling_policy", "longest") == target
    assert plugins.target_of("eviction_policy", "longest") == ""
    engine = EngineHarness(max_num_seqs=1, scheduling_policy="longest")
    requests = [engine.add_one([number] * length, 1) for number, length in enumerate((5, 40))]
    assert admitted(engine, requests) == [40, 5]
    plugins._installed.cache_clear()
