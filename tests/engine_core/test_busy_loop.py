"""The busy loop, with fake workers and scripted messages."""

from collections import deque
from itertools import pairwise

import pytest

from engine_core.busy_loop import IDLE_SECONDS, OVERLAPPED, SYNCHRONOUS, BusyLoop
from proto.messages.kv_connector import KVConnectorOutput
from proto.messages.model_runner_output import ModelRunnerOutput
from tests.fakes.engine_harness import EOS, EngineHarness
from tests.fakes.images import encoder_limits, with_pictures
from tests.fakes.paged_runner import PagedRunner, hashed_token, undisturbed


class LazyWorkers:
    """Workers that compute the oldest step when the engine waits.

    log: ("sent", step) and ("answered", step), of steps with a result.
    """

    def __init__(self, runner):
        self.runner = runner
        self.queue = deque()
        self.results = deque()
        self.sent = []
        self.log = []
        self.is_ready = True
        self.connected_epochs = []
        self.rejected = []
        self.reports = []

    def connect_workers(self, epoch):
        self.connected_epochs.append(epoch)
        self.runner = PagedRunner(self.runner.block_size)
        self.queue.clear()
        self.results.clear()
        self.is_ready = False

    def request_replacement(self, error):
        self.rejected.append(str(error))
        self.queue.clear()
        self.results.clear()
        self.is_ready = False

    def send_step(self, output):
        self.sent.append(output)
        self.queue.append(output)
        if output.has_result:
            self.log.append(("sent", output.step))

    def compute(self):
        """Compute the next step with a result, and the steps without before it."""
        while self.queue:
            output = self.queue.popleft()
            self.results.append(self.runner.execute(output))
            if output.has_result:
                self.log.append(("answered", output.step))
                return

    def pop_kv_reports(self):
        reports, self.reports = self.reports, []
        return reports

    def receive_results(self):
        results = list(self.results)
        self.results.clear()
        return results


class ScriptedIO:
    """Runs one action per wait; stops the engine at a wait that would never end."""

    def __init__(self, actions=()):
        self.actions = deque(actions)
        self.is_stopped = False
        self.published = []
        self.num_publishes = 0
        self.worker_epochs = []
        self.waits = []

    def receive_messages(self, timeout_seconds=None):
        self.waits.append(timeout_seconds)
        if self.actions:
            self.actions.popleft()(self)
            return True
        if timeout_seconds != 0:
            self.workers.compute()
        if self.workers.results or self.workers.reports:
            return True
        if timeout_seconds is None:
            self.is_stopped = True
        return False

    def pop_worker_epochs(self):
        epochs, self.worker_epochs = self.worker_epochs, []
        return epochs

    def publish(self, outputs):
        self.num_publishes += 1
        self.published += [each for front_end in outputs.values() for each in front_end]

    def answer_profile_call(self):
        pass

    def publish_crash_progress(self, progress):
        assert progress == []

    def publish_step(self, outputs):
        self.published += [each for front_end in outputs.values() for each in front_end]


class Loop:
    def __init__(self, actions=(), check=None, depth=SYNCHRONOUS, **settings):
        self.engine = EngineHarness(async_scheduling=depth == OVERLAPPED, **settings)
        self.workers = LazyWorkers(self.engine.runner)
        self.io = ScriptedIO(actions)
        self.io.workers = self.workers
        self.busy_loop = BusyLoop(
            self.engine.scheduler, self.engine.kv_cache, self.workers, self.io, depth
        )
        if check is not None:
            self.busy_loop._check_integrity = check

    def tokens_of(self, request):
        return [
            token
            for each in self.io.published
            if (each.request_id, each.choice) == (request.request_id, request.choice)
            for token in each.new_token_ids
        ]


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_the_loop_steps_until_idle_and_checks_the_kv_cache_once(depth):
    checks = []
    loop = Loop(check=lambda: iter([checks.append(1)]), depth=depth)
    request = loop.engine.add_one([1, 2], max_tokens=3)
    loop.busy_loop.run_until_shutdown()
    assert loop.tokens_of(request) == undisturbed([1, 2], 3)
    assert checks == [1]
    assert loop.workers.sent[-1].finished_seq_ids
    loop.engine.assert_idle()


@pytest.mark.parametrize("is_ready", [True, False])
def test_an_idle_engine_starts_what_grammars_need_once_the_workers_are_ready(is_ready):
    class Grammars:
        num_calls = 0

        def warm_up(self):
            self.num_calls += 1

    loop, grammars = Loop([lambda io: None]), Grammars()
    loop.workers.is_ready = is_ready
    loop.busy_loop._structured_output = grammars
    loop.busy_loop._receive(wait=True)
    assert grammars.num_calls == 0, "a message came"
    loop.busy_loop._receive(wait=True)
    assert grammars.num_calls == is_ready


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_steps_without_tokens_leave_no_memory(depth):
    """They only tell workers which sequences have ended, and no result is processed for them."""
    loop = Loop(depth=depth)
    loop.engine.add_one([1, 2], max_tokens=3)
    loop.busy_loop.run_until_shutdown()
    assert not loop.workers.sent[-1].total_num_scheduled_tokens
    assert loop.engine.scheduler._row_counts == {}


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_steps_that_only_encode_an_image_are_awaited(depth):
    """Nothing runs meanwhile; what workers must forget is sent without a step's work."""
    loop = Loop(depth=depth, encoder=encoder_limits(max_input_tokens=2))
    prompt, features = with_pictures([(1, 7), [5]])
    request = loop.engine.add_one(prompt, max_tokens=3, mm_features=features)
    loop.busy_loop.run_until_shutdown()
    assert loop.tokens_of(request) == undisturbed(prompt, 3)
    only_encode = [
        output
        for output in loop.workers.sent
        if output.scheduled_encoder_inputs and not output.total_num_scheduled_tokens
    ]
    assert len(only_encode) == 3
    assert loop.engine.scheduler.reset_encoder_cache()
    loop.io.is_stopped = False
    loop.busy_loop.run_until_shutdown()
    assert loop.workers.sent[-1].free_encoder_mm_hashes == [features[0].mm_hash]
    loop.workers.compute()
    loop.engine.assert_idle()


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_a_token_that_comes_after_the_end_is_counted_and_dropped(depth):
    loop = Loop(depth=depth)
    wanted = undisturbed([1, 2], 2)
    request = loop.engine.add_one([1, 2], max_tokens=9, stop_token_ids=(wanted[1],))
    loop.busy_loop.run_until_shutdown()
    assert loop.tokens_of(request) == wanted
    stats = loop.engine.scheduler.pop_stats()
    assert stats.num_discarded_tokens == (1 if depth == OVERLAPPED else 0)


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_the_loop_sleeps_while_all_requests_are_blocked(depth):
    def pause(io):
        loop.engine.scheduler.pause("finish_running")

    def resume(io):
        assert loop.engine.scheduler.num_unfinished == 1
        assert not loop.engine.scheduler.has_work
        assert io.waits[-1], "it waits for messages"
        loop.engine.scheduler.resume()

    loop = Loop([pause, lambda _: None, resume], depth=depth)
    request = loop.engine.add_one([1, 2], max_tokens=2)
    loop.busy_loop.run_until_shutdown()
    assert loop.tokens_of(request) == undisturbed([1, 2], 2)
    loop.engine.assert_idle()


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_new_workers_recompute_steps_in_flight(depth):
    """Until they are ready nothing is sent, and the engine waits."""

    def die(io):
        assert len(loop.workers.sent) == depth
        io.worker_epochs = [7]

    def wait(io):
        assert io.waits[-1] != 0
        assert len(loop.workers.sent) == depth

    def come_back(io):
        wait(io)
        loop.workers.is_ready = True

    loop = Loop([*[lambda _: None] * depth, die, wait, come_back], depth=depth)
    request = loop.engine.add_one([1, 2], max_tokens=4)
    loop.busy_loop.run_until_shutdown()
    assert loop.workers.connected_epochs == [7]
    assert [each.epoch for each in loop.workers.sent][depth:][:1] == [7]
    assert loop.tokens_of(request) == undisturbed([1, 2], 4)
    loop.engine.runner = loop.workers.runner
    loop.engine.assert_idle()


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_finished_copy_is_reported_at_once_without_a_step(is_idle):
    def report(io):
        io.workers.reports.append(KVConnectorOutput())

    loop = Loop([report] if is_idle else [lambda io: None, report])
    if not is_idle:
        loop.engine.add_one([1, 2, 3], max_tokens=2)
    loop.busy_loop.run_until_shutdown()
    assert loop.io.num_publishes == is_idle


def test_an_inconsistent_kv_cache_ends_the_engine():
    def check():
        yield
        raise RuntimeError("lost block")

    loop = Loop(check=check)
    with pytest.raises(RuntimeError, match="lost block"):
        loop.busy_loop.run_until_shutdown()
    assert loop.io.waits == [0, IDLE_SECONDS, 0]


def test_an_integrity_check_ends_when_a_message_arrives():
    """It starts again when the engine is idle again, because the KV cache may have changed."""
    begun, pieces = [], []

    def check():
        begun.append(len(loop.tokens_of(request)))
        for piece in range(5):
            pieces.append(piece)
            if len(begun) == 1 and piece == 2:
                loop.io.actions.append(resume)
            yield

    def resume(io):
        loop.engine.scheduler.resume()

    loop = Loop(check=check)
    loop.engine.scheduler.pause("finish_running")
    request = loop.engine.add_one([1, 2], max_tokens=3)
    loop.busy_loop.run_until_shutdown()
    assert pieces == [0, 1, 2, 0, 1, 2, 3, 4]
    assert begun == [0, 3]
    assert loop.tokens_of(request) == undisturbed([1, 2], 3)


def test_the_loop_stops_between_steps():
    def stop(io):
        io.is_stopped = True

    loop = Loop([stop])
    loop.engine.add_one([1], max_tokens=3)
    loop.busy_loop.run_until_shutdown()
    assert loop.workers.sent == []


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
def test_the_loop_stops_during_a_step(depth):
    def stop(io):
        io.is_stopped = True

    loop = Loop([lambda _: None] * depth + [stop], depth=depth)
    loop.engine.add_one([1], max_tokens=3)
    loop.busy_loop.run_until_shutdown()
    assert len(loop.workers.sent) == depth
    assert loop.io.published == []


@pytest.mark.parametrize("depth", [SYNCHRONOUS, OVERLAPPED])
@pytest.mark.parametrize(
    ("nonsense", "words"),
    [
        (lambda step, seq_ids: ModelRunnerOutput(1, 99, [5], [[1]]), "step 99 unasked"),
        (lambda step, seq_ids: ModelRunnerOutput(1, step, [77], [[1]]), "[77]"),
        (lambda step, seq_ids: ModelRunnerOutput(1, step, seq_ids, [[5], []]), "0 tokens"),
    ],
    ids=["unasked", "other sequences", "half of it"],
)
def test_workers_that_send_nonsense_are_replaced_and_nothing_is_lost(depth, nonsense, words):
    """Earlier results are kept; new workers compute the missing tokens."""

    def babble(io):
        step = loop.workers.queue[0]
        seq_ids = [each.seq_id for each in step.new_requests] + step.cached_requests.seq_ids
        loop.workers.results.append(nonsense(step.step, seq_ids))

    def replace(io):
        assert words in loop.workers.rejected[0]
        assert loop.workers.rejected[0].startswith("rank 0 ")
        assert io.waits[-1] != 0, "it does not spin"
        io.worker_epochs = [7]

    def come_back(io):
        loop.workers.is_ready = True

    loop = Loop([*[lambda _: None] * depth, babble, replace, come_back], depth=depth)
    requests = [loop.engine.add_one([1, 2], max_tokens=5), loop.engine.add_one([3], max_tokens=5)]
    loop.busy_loop.run_until_shutdown()
    assert len(loop.workers.rejected) == 1
    assert loop.workers.connected_epochs == [7]
    for request, prompt in zip(requests, ([1, 2], [3]), strict=True):
        tokens = loop.tokens_of(request)
        assert tokens[1:] == undisturbed([*prompt, *tokens[:1]], 4), (
            "all tokens after the claimed ones"
        )
    loop.engine.runner = loop.workers.runner
    loop.engine.assert_idle()


def test_one_at_a_time_a_step_is_sent_after_the_answer_to_the_last():
    loop = Loop()
    loop.engine.add_one([1, 2], max_tokens=4)
    loop.busy_loop.run_until_shutdown()
    assert [what for what, _ in loop.workers.log] == ["sent", "answered"] * 4


def test_overlapped_a_step_is_sent_before_the_answer_to_the_last():
    loop = Loop(depth=OVERLAPPED)
    loop.engine.add_one([1, 2], max_tokens=4)
    loop.busy_loop.run_until_shutdown()
    assert loop.workers.log == [
        *(("sent", 1), ("sent", 2), ("answered", 1)),
        *(("sent", 3), ("answered", 2), ("sent", 4), ("answered", 3), ("answered", 4)),
    ]


def test_a_request_that_comes_while_the_last_tokens_of_others_compute_is_sent_at_once():
    def arrive(io):
        loop.late = loop.engine.add_one([9], max_tokens=2)

    loop = Loop([lambda _: None, lambda _: None, arrive], depth=OVERLAPPED)
    first = loop.engine.add_one([1, 2], max_tokens=1)
    loop.busy_loop.run_until_shutdown()
    assert [what for what, _ in loop.workers.log[:2]] == ["sent", "sent"]
    assert loop.tokens_of(first) == undisturbed([1, 2], 1)
    assert loop.tokens_of(loop.late) == undisturbed([9], 2)
    loop.engine.assert_idle()


def stops_now_and_then(token_ids, choice):
    token = hashed_token(token_ids, choice)
    return EOS if token % 23 == 0 else token


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_workers_nearly_always_have_the_next_step_before_they_answer_the_last(policy):
    """Requests arrive, stop, reach their length, are aborted and preempted meanwhile."""

    def disturb(number):
        def act(io):
            scheduler = loop.engine.scheduler
            if number % 3 == 0 and number < 1200:
                prompt = [(number * 7 + each) % 900 for each in range(20 + number % 30)]
                loop.requests.append(loop.engine.add_one(prompt, 40, priority=number % 5))
            if number % 31 == 0 and scheduler.running:
                scheduler.abort_request(
                    scheduler.running[number % len(scheduler.running)].request_id
                )
            if io.waits[-1] != 0:
                io.workers.compute()

        return act

    loop = Loop(
        [disturb(number) for number in range(1500)],
        depth=OVERLAPPED,
        num_blocks=30,
        max_num_batched_tokens=128,
        scheduling_policy=policy,
        next_token=stops_now_and_then,
    )
    loop.requests = []
    loop.busy_loop.run_until_shutdown()
    reasons = {each.finish_reason for each in loop.io.published} - {None}
    assert len(reasons) == 2, "some stop, some end at their length"
    assert sum(each.num_preemptions for each in loop.requests) > 50
    aborted = [each for each in loop.requests if each.status.name == "FINISHED_ABORTED"]
    assert len(aborted) > 20
    log = loop.workers.log
    steps = [step for what, step in log if what == "sent"]
    place = {event: index for index, event in enumerate(log)}
    early = [place["sent", after] < place["answered", before] for before, after in pairwise(steps)]
    assert len(early) > 500
    assert sum(early) >= 0.95 * len(early)
    loop.engine.assert_idle()
