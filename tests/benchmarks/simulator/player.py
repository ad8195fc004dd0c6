"""Executes replay orders: loads the recording, then follows or simulates it."""

from proto.codec import changed
from tests.benchmarks.agent_jobs.load import AgentLoad
from tests.benchmarks.simulator.follow import Follower
from tests.benchmarks.simulator.messages import ReplayAnswer, ReplayFigures, ReplayOrder, StepModel
from tests.benchmarks.simulator.recording import (
    Arrivals,
    InTime,
    Recording,
    Together,
    read,
    recording_of,
)
from tests.benchmarks.simulator.rig import NO_TIER, SimulatedTier, settings
from tests.benchmarks.simulator.simulation import Simulation, figures_of, fit, live_blocks


class Player:
    """Keeps the last recording for further orders."""

    def __init__(self) -> None:
        self._key: tuple[str, AgentLoad | None] = ("", None)
        self._recording: Recording | None = None

    def play(self, order: ReplayOrder) -> ReplayAnswer:
        """Execute an order; raise UnreadableTraceError, or ValueError if it cannot be simulated."""
        recording = self._read(order)
        if order.load is not None and order.path and order.step_model is None:
            order = changed(order, step_model=_model_of(read(order.path)))
        if order.verify:
            return ReplayAnswer(verdict=Follower(recording).run())
        return ReplayAnswer(figures=simulate(recording, order))

    def _read(self, order: ReplayOrder) -> Recording:
        key = ("" if order.load else order.path, order.load)
        if self._recording is None or key != self._key:
            self._recording = recording_of(order.load) if order.load else read(order.path)
            self._key = key
        return self._recording


def simulate(recording: Recording, order: ReplayOrder) -> ReplayFigures:
    """Simulate with the order's policy; raise ValueError if step times are unknown."""
    header = settings(recording.header, order)
    scheduler = header.scheduler
    step_model = order.step_model or _model_of(recording)
    ended = [each for each in recording.sequences.values() if each.finish is not None]
    _check_size(recording, header.num_blocks)
    arrivals: Arrivals = InTime(ended, order.rate, order.open_loop)
    if order.together:
        arrivals = Together(ended, order.together)
    tier = SimulatedTier(order.tier, header) if order.tier else NO_TIER
    outcome = Simulation(
        recording, header, arrivals, step_model, order.one_tenant, order.tape_path, tier
    ).run()
    left_out = len(recording.sequences) - len(ended)
    figures = figures_of(outcome, scheduler.scheduling_policy, left_out, step_model)
    mean, peak = live_blocks(recording, outcome.courses.values())
    return changed(figures, live_blocks_mean=mean, live_blocks_peak=peak)


def _model_of(recording: Recording) -> StepModel:
    return fit(recording.lines, bool(recording.header.scheduler.async_scheduling))


def _check_size(recording: Recording, num_blocks: int) -> None:
    """Raise ValueError for a pool too small for the longest sequence."""
    size = recording.header.block_size
    longest = max(
        (
            each.arrival.num_prompt_tokens + each.num_outputs
            for each in recording.sequences.values()
        ),
        default=0,
    )
    needed = -(-longest // size) + 1
    if needed > num_blocks:
        raise ValueError(
            f"the longest sequence has {longest} tokens: it needs {needed} blocks, "
            f"the null block included, and there are {num_blocks}"
        )
