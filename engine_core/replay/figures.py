"""From the courses of a simulation to its figures."""

import math
from collections import defaultdict
from collections.abc import Iterable

from engine_core.replay.simulation import Course, Outcome
from proto.replay import ReplayFigures, Spread, StepModel


def figures_of(
    outcome: Outcome, policy: str, num_left_out: int, step_model: StepModel
) -> ReplayFigures:
    """Everything that the table shows; a request without a job is a job of one turn."""
    pins_taken, pins_hit, pins_expired, pins_unpinned = outcome.pins
    courses = list(outcome.courses.values())
    jobs: dict[str, list[Course]] = defaultdict(list)
    others: dict[int, list[Course]] = defaultdict(list)
    for course in courses:
        arrival = course.sequence.arrival
        if arrival.job:
            jobs[arrival.job].append(course)
        else:
            others[arrival.request_id].append(course)
    agents, alone = _seconds(jobs.values()), _seconds(others.values())
    return ReplayFigures(
        policy=policy,
        num_requests=len(courses),
        num_left_out=num_left_out,
        num_jobs=len(jobs) + len(others),
        num_steps=outcome.num_steps,
        seconds=outcome.seconds,
        output_tokens=sum(each.sequence.num_outputs for each in courses),
        completion=spread(_end(each) - each.arrived for each in courses),
        jobs=spread(agents + alone),
        agents=spread(agents),
        others=spread(alone),
        ttft=spread(each.first - each.arrived for each in courses if each.first is not None),
        preemptions=outcome.num_preemptions,
        hit_rate=outcome.num_hit / outcome.num_queried if outcome.num_queried else 0.0,
        step_model=step_model,
        pins_taken=pins_taken,
        pins_hit=pins_hit,
        pins_expired=pins_expired,
        pins_unpinned=pins_unpinned,
        num_prompt_tokens=sum(each.sequence.arrival.num_prompt_tokens for each in courses),
        num_found_tokens=sum(each.num_found for each in courses),
        other_prompt_tokens=sum(
            each.sequence.arrival.num_prompt_tokens for found in others.values() for each in found
        ),
    )


def spread(values: Iterable[float]) -> Spread:
    """Mean and percentiles (nearest rank); zeros of nothing."""
    ordered = sorted(values)
    if not ordered:
        return Spread()
    return Spread(
        math.fsum(ordered) / len(ordered), _percentile(ordered, 50), _percentile(ordered, 99)
    )


def _seconds(jobs: Iterable[list[Course]]) -> list[float]:
    """From the first arrival to the last end of each."""
    return [max(map(_end, turns)) - min(each.arrived for each in turns) for turns in jobs]


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _end(course: Course) -> float:
    assert course.end is not None, "a simulation runs until everybody is over"
    return course.end
