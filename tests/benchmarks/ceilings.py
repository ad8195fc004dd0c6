"""`tokend bench compare` with the ceiling of every daemon: the hardware limit for its load.

The limits are measured before each turn of a daemon while all servers are idle.
The cost of a step is the sum of its matrix products, reading K and V of decoding sequences at the
memory bandwidth, and the attention of prompts:

    rows of a step    | one of every decoding sequence    | prompts, in order, up to the budget |
    products          |<------------------------- rows of the layers --------------------->|
                      |<-- head: all of these ----------->| and one of every finished prompt
    K and V           |<-- visible tokens, read once ---->|
    attention                                             |<-- pairs that attend to each other ->|
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from tempfile import TemporaryDirectory
from typing import Final

from deploy import flags
from deploy.bench.compare import (
    ALONE,
    ClosedLoad,
    ComparedFigure,
    TurnFigures,
)
from deploy.bench.servers import PORT, ServerSpec
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.codec import to_json_line
from proto.settings.config import ServeConfig
from tests.benchmarks.command import run
from tests.benchmarks.line_program import LineProgram, worker_program
from tests.benchmarks.messages import LimitsTimings, LimitsWorkload
from tests.benchmarks.sizes import WEIGHTS_READ, SizesBench, parse, specs_of, weights_read_figures

TARGET_SHARE = 0.8
"""Target share of the ceiling."""


@dataclass(frozen=True)
class Budget:
    """Limits of a step. step_tokens: maximal rows. longest_chunk: maximal tokens of one prompt."""

    step_tokens: int
    longest_chunk: int


@dataclass
class Step:
    """The work of a step. contexts: visible tokens of every decoding sequence.

    prompt_tokens: rows of prompts. prompt_pairs: pairs of their tokens and visible tokens.
    num_sampled: rows whose logits are computed.
    """

    contexts: list[int]
    prompt_tokens: int = 0
    prompt_pairs: int = 0
    num_sampled: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.contexts) + self.prompt_tokens


@dataclass
class _Sequence:
    num_computed: int = 0
    num_outputs: int = 0


@dataclass(frozen=True)
class Cost:
    """Milliseconds of steps, by part."""

    layers: float = 0.0
    head: float = 0.0
    kv: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        return self.layers + self.head + self.kv + self.attention

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.layers + other.layers,
            self.head + other.head,
            self.kv + other.kv,
            self.attention + other.attention,
        )


@dataclass(frozen=True)
class Ceiling:
    """The ceiling of a load.

    cost: of all its steps. decode: of its steps without prompts, and their number.
    num_output_tokens: output tokens of the load.
    """

    cost: Cost
    decode: Cost
    num_steps: int
    num_decode_steps: int
    num_output_tokens: int

    @property
    def output_tokens_per_s(self) -> float:
        return 1e3 * self.num_output_tokens / self.cost.total

    def describe(self) -> str:
        """Return a description of the parts of the time."""
        cost, decode, number = self.cost, self.decode, max(1, self.num_decode_steps)
        return (
            f"{self.output_tokens_per_s:.0f} tokens/s in {self.num_steps} steps: "
            f"layers {cost.layers / cost.total:.0%}, head {cost.head / cost.total:.0%}, "
            f"K and V {cost.kv / cost.total:.0%}, prompts' attention "
            f"{cost.attention / cost.total:.0%}; a step of decoding {decode.total / number:.1f} ms "
            f"(products {(decode.layers + decode.head) / number:.1f}, K and V "
            f"{decode.kv / number:.1f})"
        )


def steps_of(load: ClosedLoad, budget: Budget) -> Iterator[Step]:
    """Yield the steps of a load in order, as the scheduler composes them: decodes first."""
    waiting = load.num_requests
    running: list[_Sequence] = []
    while waiting or running:
        while waiting and len(running) < load.concurrency:
            running.append(_Sequence())
            waiting -= 1
        yield _next_step(running, load, budget)
        running = [each for each in running if each.num_outputs < load.output_tokens]


def _next_step(running: Sequence[_Sequence], load: ClosedLoad, budget: Budget) -> Step:
    decoding = [each for each in running if each.num_outputs]
    step = Step([load.input_tokens + each.num_outputs for each in decoding])
    for each in decoding:
        each.num_outputs += 1
    for each in running:
        missing = load.input_tokens - each.num_computed
        count = min(missing, budget.longest_chunk, max(0, budget.step_tokens - step.num_rows))
        if count <= 0:
            continue
        first = each.num_computed + 1
        step.prompt_tokens += count
        step.prompt_pairs += count * (2 * first + count - 1) // 2
        each.num_computed += count
        each.num_outputs += count == missing
        step.num_sampled += count == missing
    step.num_sampled += len(decoding)
    return step


@dataclass(frozen=True)
class Hardware:
    """The measured speed of the hardware, from which the cost of a step follows."""

    timings: LimitsTimings

    def ceiling(self, load: ClosedLoad, budget: Budget) -> Ceiling:
        """Return the ceiling of a load on an idle machine without overhead."""
        total = decode = Cost()
        num_steps = num_decode_steps = 0
        for step in steps_of(load, budget):
            cost = self.cost(step)
            total += cost
            num_steps += 1
            if not step.prompt_tokens:
                decode += cost
                num_decode_steps += 1
        tokens = load.num_requests * load.output_tokens
        return Ceiling(total, decode, num_steps, num_decode_steps, tokens)

    def cost(self, step: Step) -> Cost:
        """Return the cost of one step."""
        rows, timings = self.timings.rows, self.timings
        return Cost(
            layers=between(rows, timings.layer_products_ms, step.num_rows),
            head=between(rows, timings.head_product_ms, step.num_sampled),
            kv=sum(map(self._kv_bytes, step.contexts)) / (1e6 * timings.read_gb_per_s),
            attention=1e-6 * timings.attention_ns_per_pair * step.prompt_pairs,
        )

    @property
    def weights_ms(self) -> float:
        """Return the time to read the weights for a step of one row."""
        return self.timings.weight_bytes / (1e6 * self.timings.read_gb_per_s)

    def describe(self) -> str:
        """Return a description of the measured speeds."""
        timings = self.timings
        return (
            f"weights {timings.weights}, {timings.num_threads} threads, memory read at "
            f"{timings.read_gb_per_s:.1f} GB/s; {timings.weight_bytes / 1e6:.0f} MB of weights "
            f"a step of one row: {self.weights_ms:.1f} ms"
        )

    def _kv_bytes(self, context: int) -> int:
        return sum(
            num_bytes * (context if window is None else min(context, window))
            for num_bytes, window in self.timings.kv_bytes_per_token
        )


def row_counts(concurrency: Sequence[int], budget: Budget) -> list[int]:
    """Return the numbers of rows to measure products for; others are interpolated."""
    most = budget.step_tokens
    doubled = {1 << power for power in range(most.bit_length())}
    return sorted({*doubled, *(min(each, most) for each in concurrency), most})


def between(rows: Sequence[int], values: Sequence[float], at: int) -> float:
    """Return the interpolated value for `at` rows; 0 for no rows."""
    if at == 0:
        return 0.0
    if at <= rows[0]:
        return values[0]
    for (low, below), (high, above) in pairwise(zip(rows, values, strict=True)):
        if at <= high:
            return below + (above - below) * (at - low) / (high - low)
    return values[-1] * at / rows[-1]


# Measuring the hardware limits of a daemon: the parts of a worker, run separately.


_ROUNDS: Final = 5
_PROMPT_TOKENS: Final = 256


@dataclass(frozen=True)
class MeasuredLimits:
    """Hardware limits of a daemon, measured by a program that has loaded its weights."""

    name: str
    program: LineProgram
    workload: LimitsWorkload

    @property
    def budget(self) -> Budget:
        return budget_of(self.workload.config)

    def measure(self) -> Hardware:
        """Measure now; the machine should be idle."""
        what = f"the parts of a step of {self.name}"
        return Hardware(self.program.play(self.workload, LimitsTimings, what))


def limits_program(
    name: str,
    config: ServeConfig,
    rows: Sequence[int],
    rounds: int = _ROUNDS,
    prompt_tokens: int = _PROMPT_TOKENS,
) -> MeasuredLimits:
    """Start the program for a daemon with these settings; the caller ends it.

    rows: numbers of rows of the products.
    """
    around = HostEnvironment.of(os.environ)
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(config.model.model, around, display)
    workload = LimitsWorkload(
        config=config, model=model, rows=list(rows), prompt_tokens=prompt_tokens, rounds=rounds
    )
    program = worker_program("tests.benchmarks.limits_program", config.device, around)
    return MeasuredLimits(name, program, workload)


def settings_of(spec: ServerSpec, settings: Mapping[str, object]) -> ServeConfig | None:
    """Return the settings of a server started by `tokend serve`; None for any other.

    settings: those from the environment. Raises ConfigError for flags that the daemon refuses.
    """
    for place, (word, follower) in enumerate(zip(spec.command, spec.command[1:], strict=False)):
        if follower == "serve" and PurePath(word).name in ("tokend", "deploy.cli"):
            words = [each.replace(PORT, "0") for each in spec.command[place + 2 :]]
            return flags.build(flags.parse(words), settings)
    return None


def budget_of(config: ServeConfig) -> Budget:
    """Return the scheduler's limits of a step."""
    tokens = config.scheduler.token_budget
    return Budget(tokens, min(config.scheduler.long_prefill_token_threshold or tokens, tokens))


# Figures of a daemon's run, compared with the limits measured just before it.


def ceiling_figures(load: str, title: str) -> list[ComparedFigure]:
    """Return the rows of one load; for a single stream also those of its token and its prompt."""
    found = [
        ComparedFigure(f"{load}_ceiling_output_tokens_per_s", f"ceiling, output tokens/s, {title}"),
        ComparedFigure(
            f"{load}_share_of_ceiling", f"share of the ceiling, {title} (>= {TARGET_SHARE})", 3
        ),
    ]
    if load == ALONE:
        found += [
            *WEIGHTS_READ,
            ComparedFigure(f"{load}_prompt_ms", "products and attention of a prompt, ms"),
            ComparedFigure(f"{load}_ttft_of_prompt", "first token alone / computing the prompt"),
        ]
    return found


class CeilingBench(SizesBench):
    """A comparison with the ceiling of every server started by `tokend serve`."""

    def __init__(
        self, options: argparse.Namespace, specs: Sequence[ServerSpec], stack: ExitStack
    ) -> None:
        """Start the measuring programs, which run until the stack is closed."""
        super().__init__(options, specs)
        settings = HostEnvironment.of(os.environ).settings
        self._limits: dict[str, MeasuredLimits] = {}
        self._hardware: dict[str, Hardware] = {}
        concurrency = [load.concurrency for load in self.loads().values()]
        for spec in self.specs:
            config = settings_of(spec, settings)
            if config is not None:
                rows = row_counts(concurrency, budget_of(config))
                limits = limits_program(spec.name, config, rows, prompt_tokens=options.input_tokens)
                stack.enter_context(limits.program)
                self._limits[spec.name] = limits

    def extra_figures(self, load: str, title: str) -> Sequence[ComparedFigure]:
        return ceiling_figures(load, title) if self._limits else ()

    def before_turn(self, spec: ServerSpec) -> None:
        if spec.name in self._limits:
            self._hardware[spec.name] = self._limits[spec.name].measure()

    def after_turn(self, spec: ServerSpec, turn: TurnFigures) -> TurnFigures:
        if spec.name not in self._limits:
            return turn
        hardware, budget = self._hardware[spec.name], self._limits[spec.name].budget
        found = {**turn, "limits": json.loads(to_json_line(hardware.timings))}
        for name, load in self.loads().items():
            rate = hardware.ceiling(load, budget).output_tokens_per_s
            found[f"{name}_ceiling_output_tokens_per_s"] = rate
            found[f"{name}_share_of_ceiling"] = turn[f"{name}_output_tokens_per_s"] / rate
        prompt = ClosedLoad(1, 1, self.loads()[ALONE].input_tokens, output_tokens=1)
        prompt_ms = hardware.ceiling(prompt, budget).cost.total
        found |= weights_read_figures(turn, hardware.weights_ms)
        found[f"{ALONE}_prompt_ms"] = prompt_ms
        if f"{ALONE}_ttft_ms_p50" in turn:  # absent if every request failed
            found[f"{ALONE}_ttft_of_prompt"] = turn[f"{ALONE}_ttft_ms_p50"] / prompt_ms
        return found

    def notes(self) -> Sequence[str]:
        lines = []
        for name, hardware in self._hardware.items():
            lines.append(f"{name}, last measured: {hardware.describe()}")
            for load, each in self.loads().items():
                ceiling = hardware.ceiling(each, self._limits[name].budget)
                lines.append(f"  {load.replace('_', ' ')}: {ceiling.describe()}")
        return lines


def main(words: Sequence[str]) -> None:
    """Compare servers as `tokend bench compare` does, with their ceilings."""
    options = parse(words, "python -m tests.benchmarks.ceilings", __doc__)
    with ExitStack() as stack:
        caches = TemporaryDirectory(prefix="tokend-compare-", ignore_cleanup_errors=True)
        specs = specs_of(options, stack.enter_context(caches))
        CeilingBench(options, specs, stack).run()


if __name__ == "__main__":
    sys.exit(run(main))
