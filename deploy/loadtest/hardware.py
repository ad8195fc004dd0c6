"""The ceilings of a daemon's loads, measured beside it: a worker's parts by themselves.

Owns the program that measures and knows which servers are daemons of this installation. What a
ceiling is, is in ceiling.py.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, Protocol

from deploy import flags
from deploy.display import open_display
from deploy.loadtest.ceiling import Budget, Hardware
from deploy.loadtest.line_program import LineProgram, worker_program
from deploy.loadtest.servers import PORT, ServerSpec
from deploy.prepare.store import prepared_model
from deploy.surroundings import Surroundings
from proto.benchmark import LimitsTimings, LimitsWorkload
from proto.config import ServeConfig

_ROUNDS: Final = 5
_PROMPT_TOKENS: Final = 256


class Limits(Protocol):
    """What bounds a server. name: of the server."""

    @property
    def name(self) -> str: ...

    @property
    def budget(self) -> Budget: ...

    def measure(self) -> Hardware: ...


@dataclass(frozen=True)
class MeasuredLimits:
    """Of a daemon: measured by a program that has its weights, and sleeps in between."""

    name: str
    program: LineProgram
    workload: LimitsWorkload

    @property
    def budget(self) -> Budget:
        return budget_of(self.workload.config)

    def measure(self) -> Hardware:
        """Now; the machine should have nothing else to do."""
        what = f"the parts of a step of {self.name}"
        return Hardware(self.program.play(self.workload, LimitsTimings, what))


def limits_program(
    name: str,
    config: ServeConfig,
    rows: Sequence[int],
    rounds: int = _ROUNDS,
    prompt_tokens: int = _PROMPT_TOKENS,
) -> MeasuredLimits:
    """For a daemon with these settings; the caller ends the program.

    rows: numbers of rows that are multiplied.
    """
    around = Surroundings.of(os.environ)
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(config.model.model, around, display)
    workload = LimitsWorkload(
        config=config, model=model, rows=list(rows), prompt_tokens=prompt_tokens, rounds=rounds
    )
    program = worker_program("worker.bench_limits", config.device, around)
    return MeasuredLimits(name, program, workload)


def settings_of(spec: ServerSpec, settings: Mapping[str, object]) -> ServeConfig | None:
    """Of a server that is started as `tokend serve`; None for any other.

    settings: what the environment sets. Raises ConfigError for flags that the daemon would refuse.
    """
    for place, (word, follower) in enumerate(zip(spec.command, spec.command[1:], strict=False)):
        if follower == "serve" and PurePath(word).name in ("tokend", "deploy.cli"):
            words = [each.replace(PORT, "0") for each in spec.command[place + 2 :]]
            return flags.build(flags.parse(words), settings)
    return None


def budget_of(config: ServeConfig) -> Budget:
    """How the scheduler cuts steps."""
    tokens = config.scheduler.step_tokens
    return Budget(tokens, min(config.scheduler.long_prefill_token_threshold or tokens, tokens))
