"""Metrics shared by several front ends: each of them returns the same."""

import os

from prometheus_client.parser import text_string_to_metric_families

from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from proto.messages.stats import SchedulerStats, metric_bytes

ENGINE = 4


class Daemon:
    """The shared memory and its front ends."""

    def __init__(self, num_front_ends=2):
        self.descriptor = os.memfd_create("metrics")
        os.ftruncate(self.descriptor, num_front_ends * metric_bytes(1))
        self.front_ends = [self.front_end(row, num_front_ends) for row in range(num_front_ends)]

    def front_end(self, row, num_rows=2, incarnation=0, num_hung=0):
        sheet = MetricSheet.shared(self.descriptor, row, num_rows)
        metrics = Metrics("toy", sheet, incarnation, num_hung)
        metrics.add_engine(ENGINE)
        return metrics

    def shown(self, name):
        """Return a value that all front ends must report alike."""
        (value,) = {sample(each, name) for each in self.front_ends}
        return value


def sample(metrics, name, **labels):
    wanted = {**labels}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for each in family.samples:
            if each.name == name and wanted.items() <= each.labels.items():
                return each.value
    raise AssertionError(f"{name} is not shown")


def test_counters_and_histograms_sum_all_front_ends():
    daemon = Daemon()
    first, second = daemon.front_ends
    first.engines[0].record_prompt(7)
    second.engines[0].record_prompt(40)
    second.engines[0].count_finished_choice("stop", 3)
    assert daemon.shown("vllm:prompt_tokens_total") == 47
    assert daemon.shown("vllm:request_prompt_tokens_count") == 2
    assert daemon.shown("vllm:request_prompt_tokens_sum") == 47
    for each in daemon.front_ends:
        assert sample(each, "vllm:request_prompt_tokens_bucket", le="10.0") == 1
        assert sample(each, "vllm:request_success_total", finished_reason="stop") == 1


def test_a_step_counts_once_and_sets_gauges_in_any_front_end():
    daemon = Daemon()
    first, second = daemon.front_ends
    first.record_scheduler_stats(SchedulerStats(3, 4, 0.25, num_preemptions=2), ENGINE, 10.0)
    second.record_scheduler_stats(SchedulerStats(5, 0, 0.5, num_preemptions=1), ENGINE, 11.0)
    assert daemon.shown("vllm:num_requests_running") == 5
    assert daemon.shown("vllm:kv_cache_usage_perc") == 0.5
    assert daemon.shown("vllm:num_preemptions_total") == 3
    first.record_scheduler_stats(SchedulerStats(1, 0, 0.125), ENGINE, 12.0)
    assert daemon.shown("vllm:num_requests_running") == 1
    assert daemon.shown("vllm:kv_cache_usage_perc") == 0.125


def test_gauges_sum_parallel_engines_and_drop_ended_ones():
    daemon = Daemon()
    first, second = daemon.front_ends
    for each in daemon.front_ends:
        each.add_engine(9)
    first.record_scheduler_stats(SchedulerStats(3, 1, 0.25), ENGINE, 10.0)
    second.record_scheduler_stats(SchedulerStats(2, 0, 0.5), 9, 11.0)
    assert daemon.shown("vllm:num_requests_running") == 5
    for each in daemon.front_ends:
        each.remove_engine(ENGINE)
    assert daemon.shown("vllm:num_requests_running") == 2
    for epoch in range(20, 40):
        for each in daemon.front_ends:
            each.add_engine(epoch)
        first.record_scheduler_stats(SchedulerStats(epoch, 0, 0.0), epoch, float(epoch))
        assert daemon.shown("vllm:num_requests_running") == epoch + 2
        for each in daemon.front_ends:
            each.remove_engine(epoch)


def test_engines_have_gauges_and_counters_of_their_own():
    sheet = MetricSheet.of_one(num_engines=3)
    metrics = Metrics("toy", sheet, num_engines=3)
    for engine in range(3):
        metrics.add_engine(10 + engine, engine)
        stats = SchedulerStats(engine, 0, 0.1 * engine, num_preemptions=engine, num_pins_taken=1)
        metrics.record_scheduler_stats(stats, 10 + engine, 1.0, engine)
        metrics.engines[engine].record_prompt(5)
    for engine in range(3):
        label = {"engine": str(engine)}
        assert sample(metrics, "vllm:num_requests_running", **label) == engine
        assert sample(metrics, "vllm:num_preemptions_total", **label) == engine
        assert sample(metrics, "vllm:request_prompt_tokens_count", **label) == 1
    assert sample(metrics, "tokend:pins_taken_total") == 3


def test_the_memory_holds_the_metrics_of_many_engines():
    metrics = Metrics("toy", MetricSheet.of_one(num_engines=64), num_engines=64)
    metrics.engines[63].record_prompt(5)
    assert sample(metrics, "vllm:prompt_tokens_total", engine="63") == 5
    assert sample(metrics, "vllm:prompt_tokens_total", engine="62") == 0


def test_counts_of_a_dead_front_end_are_kept():
    daemon = Daemon()
    first, second = daemon.front_ends
    first.engines[0].record_prompt(7)
    first.record_scheduler_stats(SchedulerStats(3, 4, 0.25, num_preemptions=2), ENGINE, 10.0)
    second.count_restart("api_server", hung=False)
    daemon.front_ends[0] = daemon.front_end(0, incarnation=1)
    assert daemon.shown("vllm:prompt_tokens_total") == 7
    assert daemon.shown("vllm:num_preemptions_total") == 2
    assert daemon.shown("vllm:num_requests_running") == 3
    daemon.front_ends[0].engines[0].record_prompt(1)
    assert daemon.shown("vllm:prompt_tokens_total") == 8


def test_broadcast_messages_count_once_even_if_a_front_end_was_dead():
    daemon = Daemon()
    second = daemon.front_ends[1]
    for each in daemon.front_ends:
        each.count_restart("worker", hung=True)
    second.count_restart("api_server", hung=False)  # front end 0 is dead
    second.count_restart("worker", hung=False)
    daemon.front_ends[0] = daemon.front_end(0, incarnation=1)
    for each in daemon.front_ends:
        each.count_restart("worker", hung=False)
        assert sample(each, "tokend:restarts_total", role="api") == 1
    for each in daemon.front_ends:
        assert sample(each, "tokend:restarts_total", role="worker") == 3
        assert sample(each, "tokend:watchdog_kills_total", role="worker") == 1


def test_a_single_front_end_counts_its_own_restarts():
    """No other front end could count them while it was dead."""
    daemon = Daemon(1)
    reborn = daemon.front_end(0, 1, incarnation=2, num_hung=1)
    assert sample(reborn, "tokend:restarts_total", role="api") == 2
    assert sample(reborn, "tokend:watchdog_kills_total", role="api") == 1


def test_process_metrics_are_present_for_existing_processes():
    assert "process_resident_memory_bytes" in Metrics("toy", MetricSheet.of_one()).render().decode()
    assert "process_resident_memory_bytes" not in Daemon().front_ends[0].render().decode()
