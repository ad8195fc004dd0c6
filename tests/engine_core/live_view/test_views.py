"""Live views: when they are sent, to which front ends, and their counts."""

import pytest

from engine_core.frontend_io import OutputDispatcher
from engine_core.live_view import ViewCounters
from engine_core.transport import FrontEndLinks
from proto.messages.engine_io import (
    EngineCoreEvent,
    EngineCoreOutput,
    EngineCoreOutputs,
    EventType,
    FinishReason,
)
from proto.messages.view import (
    MAX_SHOWN_REQUESTS,
    PREEMPTED,
    RUNNING,
    VIEW_SECONDS,
    WAITING,
    EngineView,
)
from tests.fakes.clock import FakeClock
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EngineHarness

EPOCH = 3


class KeptViews(FrontEndLinks):
    """views: (front end, view), in order. slow: front ends that do not read their messages."""

    def __init__(self) -> None:
        super().__init__("", EPOCH, ())
        self.views = []
        self.slow = set()

    @property
    def alive(self):
        return [0, 1]

    def keeps_up(self, front_end):
        return front_end not in self.slow

    def send(self, front_end, message) -> None:
        if isinstance(message, EngineView):
            self.views.append((front_end, message))
        else:
            assert isinstance(message, EngineCoreOutputs)

    def take(self):
        taken, self.views = self.views, []
        return taken


class Rig:
    """An engine that flushes after every step and then waits, like that of the daemon."""

    def __init__(self, **config) -> None:
        self.clock = FakeClock()
        self.engine = EngineHarness(**config)
        self.links = KeptViews()
        self.outputs = OutputDispatcher(
            self.links, self.engine.scheduler, self.engine.kv_cache, EPOCH, clock=self.clock
        )
        self.views = self.outputs.live_view

    def step(self, number=1) -> None:
        for _ in range(number):
            before = {key: len(each) for key, each in self.engine.outputs.items()}
            self.engine.step()
            outputs = {
                0: [
                    output
                    for key, each in self.engine.outputs.items()
                    for output in each[before.get(key, 0) :]
                ]
            }
            self.outputs.add_outputs(outputs)
            self.wait()

    def wait(self, seconds=0.0) -> None:
        """Flush, and send a view if one is due after these seconds."""
        self.outputs.flush()
        self.clock.now += seconds
        self.views.send_if_due()

    def view(self, seconds=VIEW_SECONDS) -> EngineView:
        """Return the view that is sent after these seconds."""
        self.links.take()
        self.clock.now += seconds
        self.views.send_if_due()
        ((_, view),) = self.links.take()
        return view


def test_no_views_without_subscribers() -> None:
    rig = Rig()
    rig.engine.add([1] * 20, 4)
    rig.step(2)
    rig.wait(10)
    assert rig.views.seconds_to_next is None
    rig.views.watch(0, wanted=True)
    assert rig.views.seconds_to_next == 0.0
    rig.views.watch(0, wanted=False)
    assert rig.views.seconds_to_next is None
    rig.step()
    rig.wait(10)
    assert rig.links.views == []


def test_views_are_sent_at_most_four_times_a_second_on_changes() -> None:
    rig = Rig()
    rig.views.watch(0, wanted=True)
    rig.views.send_if_due()
    ((front_end, view),) = rig.links.take()
    assert (front_end, view.epoch, view.requests, view.num_running) == (0, EPOCH, [], 0)
    assert rig.views.seconds_to_next is None, "nothing has changed"
    rig.engine.add([1] * 20, 4)
    rig.step()
    assert rig.links.take() == [], "too soon"
    assert rig.views.seconds_to_next == VIEW_SECONDS
    assert rig.view().num_running == 1
    assert rig.views.seconds_to_next == VIEW_SECONDS, "a last view follows with the final counts"
    last = rig.view()
    assert (last.prompt_tokens, last.generation_tokens) == (0, 0)
    assert rig.views.seconds_to_next is None


def test_all_subscribers_get_the_same_view_and_slow_ones_none() -> None:
    rig = Rig()
    for front_end in (0, 1):
        rig.views.watch(front_end, wanted=True)
    rig.views.send_if_due()
    (first, one), (second, other) = rig.links.take()
    assert {first, second} == {0, 1}
    assert one is other
    rig.links.slow = {0}
    rig.wait(VIEW_SECONDS)
    assert [front_end for front_end, _ in rig.links.take()] == [1]
    rig.links.slow = {0, 1}
    rig.engine.add([1] * 20, 4)
    rig.step()
    rig.wait(VIEW_SECONDS)
    assert rig.links.take() == []
    assert rig.views.seconds_to_next == VIEW_SECONDS, "it is retried after a delay"
    rig.links.slow = set()
    rig.clock.now += VIEW_SECONDS
    rig.views.send_if_due()
    counts = {(view.prompt_tokens, view.generation_tokens) for _, view in rig.links.take()}
    assert counts == {(20, 1)}, "counts of the interval are not lost"


@pytest.mark.parametrize("overlapped", [False, True])
def test_counts_add_up_to_the_computed_tokens(overlapped: bool) -> None:
    rig = Rig(async_scheduling=overlapped, max_num_batched_tokens=16, max_num_seqs=4)
    rig.views.watch(0, wanted=True)
    rig.views.send_if_due()
    prompts = [[seed] * length for seed, length in ((1, 40), (2, 7), (3, 33), (4, 16), (5, 64))]
    for prompt in prompts:
        rig.engine.add(prompt, 6, ignore_eos=True)
    views = []
    for _ in range(60):
        rig.step()
        views += [rig.view()]
    assert rig.engine.scheduler.num_unfinished == 0
    assert sum(each.generation_tokens for each in views) == 30
    num_prompt_tokens = sum(map(len, prompts))
    computed = sum(each.prompt_tokens for each in views)
    if overlapped:
        assert num_prompt_tokens <= computed <= num_prompt_tokens + 4, "one step in flight"
    else:
        assert computed == num_prompt_tokens
    assert sum(each.queried_tokens for each in views) == num_prompt_tokens


def test_a_request_that_fails_without_a_token_has_no_prompt_computed() -> None:
    counters = ViewCounters()
    event = EngineCoreEvent(EventType.QUEUED, 1.0)
    failed = EngineCoreOutput(1, 0, 0, [], FinishReason.ERROR, events=[event])
    counters.add_flush({0: [failed]}, None)
    assert counters.prompt_tokens == 0
    counters.add_flush({0: [EngineCoreOutput(2, 0, 0, [7], events=[event])]}, None)
    assert (counters.prompt_tokens, counters.generation_tokens) == (0, 1)


def test_found_tokens_and_preemptions_are_counted() -> None:
    rig = Rig(num_blocks=9, block_size=16)
    rig.engine.add([1] * 40, 2, ignore_eos=True)
    rig.step(3)
    rig.views.watch(0, wanted=True)
    rig.views.send_if_due()
    for seed in (1, 2):
        rig.engine.add([seed] * 40, 60, ignore_eos=True)
    rig.step(1)
    view = rig.view()
    assert (view.queried_tokens, view.found_tokens) == (80, 32)
    assert [each.cached_tokens for each in view.requests] == [32, 0]
    num_preemptions = 0
    states = set()
    while rig.engine.scheduler.num_unfinished:
        rig.step()
        view = rig.view()
        num_preemptions += view.preemptions
        states |= {each.state for each in view.requests}
    assert num_preemptions > 0
    assert states == {RUNNING, PREEMPTED}


def test_drafts_are_counted() -> None:
    drafting = SyntheticDrafts(0.7)
    rig = Rig(drafting=drafting)
    rig.views.watch(0, wanted=True)
    rig.engine.add([1] * 20, 40, ignore_eos=True)
    views = []
    while rig.engine.scheduler.num_unfinished:
        rig.step()
        views += [rig.view()]
    counts = [(each.num_drafts, each.draft_tokens, each.accepted_tokens) for each in views]
    num_drafts, num_drafted, num_accepted = map(sum, zip(*counts, strict=True))
    assert (num_drafted, num_accepted) == (drafting.num_drafted, drafting.num_accepted)
    assert 0 < num_drafts < num_accepted < num_drafted
    rig.engine.add([2] * 20, 1)
    rig.step()
    assert rig.view().num_drafts == 0, "a view has what is new"


def test_running_ones_are_shown_first_and_the_rest_is_counted() -> None:
    rig = Rig(max_num_seqs=3, max_num_queued_reqs=0)
    number = MAX_SHOWN_REQUESTS + 10
    for each in range(number):
        rig.engine.add([each + 1] * 20, 50, ignore_eos=True, label=f"cmpl-{each}", reader=each % 2)
    rig.step()
    rig.views.watch(0, wanted=True)
    rig.views.send_if_due()
    ((_, view),) = rig.links.take()
    assert (view.num_running, view.num_waiting) == (3, number - 3)
    assert (len(view.requests), view.more_requests) == (MAX_SHOWN_REQUESTS, 10)
    assert [each.state for each in view.requests[:4]] == [RUNNING] * 3 + [WAITING]
    assert len({each.owner for each in view.requests}) == MAX_SHOWN_REQUESTS
    first = view.requests[0]
    assert (first.label, first.reader) == ("cmpl-0", 0)
    assert (first.prompt_tokens, first.output_tokens, first.computed_tokens) == (20, 1, 20)
    assert first.num_blocks == 2
