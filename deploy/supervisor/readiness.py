"""What has to be up before the daemon is ready, and what is printed then."""

import json
import shlex
from collections.abc import Iterable, Sequence

from proto.codec import Message
from proto.config import ServeConfig
from proto.lifecycle import (
    EngineReady,
    FrontEndReady,
    PhaseClock,
    ProcessStart,
    StartPhase,
    process_name,
)
from proto.prepared_model import PreparedModel


class Readiness:
    """Collects the reports that the daemon needs: of every engine and every front end."""

    def __init__(self, engines: int, front_ends: Iterable[int]) -> None:
        self._engines_missing = engines
        self._front_ends_missing = set(front_ends)
        self._engines: list[EngineReady] = []
        self._front_ends: dict[int, ProcessStart] = {}

    def note(self, message: EngineReady | FrontEndReady) -> None:
        """Take a report into account."""
        if isinstance(message, EngineReady):
            self._engines.append(message)
            self._engines_missing -= 1
        else:
            self._front_ends_missing.discard(message.index)
            start = ProcessStart("api_server", message.index, message.phases)
            self._front_ends[message.index] = start

    def note_again(self, message: Message) -> None:
        """An engine that has taken the place of another counts in its stead."""
        if isinstance(message, EngineReady):
            self._engines = [message]

    @property
    def engine(self) -> EngineReady:
        """What it told of itself; there is one when this is complete."""
        return self._engines[-1]

    @property
    def starts(self) -> tuple[ProcessStart, ...]:
        """How the processes came to be ready: workers, engine, front ends."""
        return (*self.engine.starts, *self._front_ends.values())

    @property
    def complete(self) -> bool:
        return self._engines_missing <= 0 and not self._front_ends_missing


def render(
    url: str, config: ServeConfig, model: PreparedModel, readiness: Readiness, clock: PhaseClock
) -> str:
    """The ready line, where the time went until then, and a command to try it with.

    clock: of the command, up to the start of the processes.
    """
    engine, seconds = readiness.engine, clock.seconds
    name = config.model.served_model_name or model.name
    request = {"model": name, "prompt": "The sea is", "max_tokens": 48, "stream": True}
    guarded = config.frontend.api_key or config.frontend.api_key_file
    key = ' -H "Authorization: Bearer $TOKEND_API_KEY"' if guarded else ""
    return "\n".join(
        [
            f"tokend is ready: {name} on {engine.device_name} at {url} "
            f"(length {engine.max_model_len:,}, {engine.num_blocks:,} KV blocks "
            f"of {engine.block_size}, weights: {_weights(engine)}, {seconds:.1f} s)",
            f"  started in {seconds:.2f} s: {_phases(clock.phases)}; "
            + "; ".join(map(_start, readiness.starts)),
            f"  curl -N {url}/v1/completions -H 'Content-Type: application/json'{key} "
            f"-d {shlex.quote(json.dumps(request))}",
        ]
    )


def _start(start: ProcessStart) -> str:
    return f"{process_name(start.role, start.index)}: {_phases(start.phases)}"


def _phases(phases: Sequence[StartPhase]) -> str:
    return ", ".join(f"{each.what} {each.seconds:.2f} s" for each in phases)


def _weights(engine: EngineReady) -> str:
    """The forms of the weights and their memory, for people."""
    forms = [f"{each.form} {each.num_bytes / (1 << 20):,.0f} MiB" for each in engine.weights]
    return " + ".join(forms) or "none"
