"""Random runs of a scheduler: all operations in any order.

A kind defines settings and the frequencies of operations. A run is drawn from a seed, and each step
is checked (`invariants.py`). At its end all requests have had exactly one final output, with the
tokens of an undisturbed run, and no state of them is left.

    draw settings ─▶ draw an operation, apply, check ─▶ … ─▶ no more arrivals: finish ─▶ compare
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine_core.kv_cache.integrity import check
from engine_core.kv_connector.base import NO_MATCH, NOT_KNOWN_YET, Match
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.prefix_sharing import PrefixWait, SiblingForks
from proto.errors import InvalidRequestError
from proto.messages.engine_io import AgentHint, FinishReason
from proto.messages.kv_connector import KVConnectorOutput
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from proto.messages.multimodal import SharedPixels
from proto.settings.config import LoRAConfig
from tests.engine_core.scheduler.invariants import CheckedEngine
from tests.fakes.clock import FakeClock
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.engine_harness import EOS
from tests.fakes.images import encoder_limits, with_pictures
from tests.fakes.kv_connector import FakeConnector, FakeLoad
from tests.fakes.lora import lora_request
from tests.fakes.paged_runner import undisturbed
from tests.fakes.pool_model import max_blocks

LONGEST = 48
"""Tokens that a request may have; every pool has room for one such request."""
WINDOWS = [(None, 6), (9,), (5, None, 14), (2, 12), (None, 4, 4), (None, 1)]
STOPS = tuple(range(EOS % 12, 1000, 12))
"""The end token among them."""
MOST_UNFINISHED = 24
TIMEOUT = 10.0
"""Seconds that a session may be at rest."""
ACCEPTANCE = (0.7, 0.7, 1.0, 0.3, 0.0, 1.0, 0.3)
"""Of drafts, by seed."""
CALM = ("step", 60), ("add", 22), ("abort", 2)

Operation = tuple[Any, ...]


@dataclass(frozen=True)
class Kind:
    """A kind of run. weights: frequency of each operation. draw: settings of some runs.

    has_drafts: requests are drafted for, with an acceptance that is drawn too; in every second pair
    of runs a model in the workers proposes drafts as well. num_adapters: that requests may have,
    beside those without.
    """

    draw: Callable[[random.Random], dict[str, Any]] = lambda rng: {}
    weights: tuple[tuple[str, int], ...] = ()
    num_tenants: int = 1
    num_adapters: int = 0
    has_connector: bool = False
    has_drafts: bool = False
    has_images: bool = False
    expects: dict[str, int] = field(default_factory=dict)

    def settings(self, rng: random.Random, seed: int) -> dict[str, Any]:
        """Four seeds in a row have each policy with and without overlapped steps."""
        block_size = rng.choice([1, 2, 4, 4])
        settings: dict[str, Any] = {
            "block_size": block_size,
            "windows": (None,),
            "max_model_len": LONGEST,
            "enable_prefix_caching": rng.random() < 0.85,
            "max_num_batched_tokens": rng.choice([4, 8, 16, 40, 64]),
            "long_prefill_token_threshold": rng.choice([0, 0, 4, 6, 12]),
            "enable_chunked_prefill": rng.random() < 0.8,
            "max_num_seqs": rng.choice([1, 4, 8, 8, 16, 16]),
            "scheduling_policy": ("fcfs", "priority")[seed // 2 % 2],
            "async_scheduling": seed % 2 == 1,
            "crashes_until_isolated": 10**6,
            "session_timeout": TIMEOUT,
            **self.draw(rng),
        }
        windows = settings["windows"]
        if self.has_connector:
            least = -(-LONGEST // block_size) * len(windows)
        else:
            longest = settings["long_prefill_token_threshold"] or LONGEST
            longest = min(longest, settings["max_num_batched_tokens"])
            seen = [window and max(window, 2) for window in windows]
            least = max_blocks(seen, block_size, LONGEST, longest)
        settings.setdefault("num_blocks", 1 + int(least * rng.choice([1.0, 1.2, 1.5, 2.5])))
        return settings


def with_windows(rng: random.Random) -> dict[str, Any]:
    return {"windows": rng.choice(WINDOWS)}


def with_pressure(rng: random.Random) -> dict[str, Any]:
    resume, stop, preempt = sorted(rng.choices([0.3, 0.5, 0.7, 0.9, 1.0], k=3))
    return {
        "resume_admission_below": rng.choice([resume, 0.9 * stop]),
        "stop_admission_above": stop,
        "preempt_above": preempt,
        "watermark": rng.choice([0.0, 0.1, 0.3]),
        "scheduler_reserve_full_isl": rng.random() < 0.3,
        "max_prefill_slowdown": rng.choice([0.0, 0.0, 1.1]),
    }


def with_everything(rng: random.Random) -> dict[str, Any]:
    return {**with_pressure(rng), "windows": rng.choice([(None,), *WINDOWS])}


def with_drafts(rng: random.Random) -> dict[str, Any]:
    """Steps with room for drafts, and pools that are full now and then."""
    return {
        **with_everything(rng),
        "max_num_batched_tokens": rng.choice([16, 40, 64]),
        "max_num_seqs": rng.choice([8, 16, 32]),
        "long_prefill_token_threshold": rng.choice([0, 0, 4, 12]),
        "num_dropped_blocks": int(rng.random() < 0.4),
    }


def with_pins(rng: random.Random) -> dict[str, Any]:
    return {
        "windows": rng.choice([(None,), (None,), (None, 6), (9,)]),
        "scheduling_policy": "continuum",
        "pin_policy": rng.choice(["rule", "fixed", "fixed"]),
        "max_pinned_share": rng.choice([0.3, 0.5, 1.0]),
        "max_pinned_share_per_tenant": rng.choice([0.2, 1.0]),
        "enable_prefix_caching": rng.random() < 0.9,
    }


def with_states(rng: random.Random) -> dict[str, Any]:
    """Recurrent states; agents whose KV is retained while their states are not, in some runs."""
    windows = rng.choice([(None,), (None,), (None, 6)])
    return {
        **(with_pins(rng) if rng.random() < 0.5 else {}),
        "windows": windows,
        "groups": (*map(KVGroup, windows), KVGroup(kind=RECURRENT_STATE)),
        "num_state_slots": rng.choice([5, 9, 17, 40]),
    }


def with_loads(rng: random.Random) -> dict[str, Any]:
    return {
        "windows": rng.choice([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
        "watermark": rng.choice([0.0, 0.0, 0.3]),
        "load_failure_policy": rng.choice(["recompute", "recompute", "fail"]),
    }


PICTURES = (2, 4, 4, 7)
"""Rows of the encoder output of each picture."""


def with_images(rng: random.Random) -> dict[str, Any]:
    """Caches for one large image or all, budgets from a part of an image to several."""
    splits = rng.random() < 0.7
    is_bidirectional = rng.random() < 0.3
    rows = [None, 1, 3, 10] if splits else [7, 10, 20]
    settings = {
        **with_everything(rng),
        "encoder": encoder_limits(
            max_embeds=max(PICTURES),
            is_bidirectional=is_bidirectional,
            cache_size=rng.choice([7, 8, 11, 40]),
            max_input_tokens=rng.choice(rows),
            splits=splits,
        ),
    }
    if is_bidirectional:
        settings["max_num_batched_tokens"] = rng.choice([8, 16, 40, 64])
        settings["long_prefill_token_threshold"] = rng.choice([0, 0, 7, 12])
    return settings


def with_adapters(rng: random.Random) -> dict[str, Any]:
    max_loras = rng.choice([1, 1, 2, 3])
    lora = LoRAConfig(
        enable_lora=True,
        max_loras=max_loras,
        max_cpu_loras=max_loras + rng.choice([0, 0, 1, 3]),
        max_lora_wait_steps=rng.choice([1, 3, 10]),
    )
    return {**with_everything(rng), "lora": lora}


LOADS = ("finish_load", 30), ("lose_early", 3), ("wake", 8), ("end_copy", 12)
KINDS = {
    "plain": Kind(weights=CALM, expects={"preempted": 80, "found": 200, "copies": 25}),
    "windows": Kind(with_windows, CALM, expects={"preempted": 200, "found": 200, "copies": 50}),
    "pressure": Kind(with_pressure, CALM, expects={"preempted": 60, "found": 200}),
    "tenants": Kind(with_pressure, CALM, num_tenants=3, expects={"preempted": 80, "found": 200}),
    "disturbed": Kind(
        with_everything,
        (*CALM, ("abort_in_flight", 2), ("reset", 1), ("lose_workers", 1), ("pause", 2),
         ("resume", 4), ("hold", 3), ("release", 4)),
        num_tenants=3,
        expects={"lose_workers": 15, "reset": 15, "preempted": 80},
    ),
    "sessions": Kind(
        with_everything,
        (("step", 60), ("add", 8), ("open", 7), ("give", 24), ("close", 4), ("abort", 2),
         ("abort_in_flight", 1), ("reset", 1), ("lose_workers", 1), ("tick", 3)),
        num_tenants=2,
        expects={"give": 200, "turns": 60},
    ),
    "loads": Kind(
        with_loads,
        (*CALM, *LOADS, ("abort_in_flight", 1), ("reset", 1), ("lose_workers", 1)),
        has_connector=True,
        expects={"loads": 300, "lost": 20, "preempted": 50},
    ),
    "sessions and loads": Kind(
        lambda rng: {**with_loads(rng), "load_failure_policy": "recompute"},
        (("step", 60), ("add", 8), ("open", 7), ("give", 24), ("close", 4), ("abort", 2),
         ("abort_in_flight", 1), ("reset", 1), ("lose_workers", 1), ("tick", 3), *LOADS),
        num_tenants=2,
        has_connector=True,
        expects={"give": 150, "turns": 40, "loads": 100},
    ),
    "pins": Kind(
        with_pins,
        (("step", 60), ("add", 4), ("turn", 18), ("read", 12), ("tick", 6), ("abort", 1),
         ("stop", 2), ("lose_workers", 1)),
        num_tenants=2,
        expects={"pins": 80, "pins hit": 20, "pins given up": 15},
    ),
    "pins and loads": Kind(
        lambda rng: {**with_pins(rng), **with_loads(rng)},
        (("step", 60), ("add", 4), ("turn", 18), ("read", 12), ("tick", 6), ("abort", 1),
         ("stop", 2), ("reset", 1), ("lose_workers", 1), *LOADS),
        num_tenants=2,
        has_connector=True,
        expects={"pins": 40, "loads": 300},
    ),
    "states": Kind(
        with_states,
        (("step", 60), ("add", 8), ("open", 4), ("give", 12), ("close", 2), ("abort", 2),
         ("abort_in_flight", 1), ("turn", 8), ("read", 6), ("reset", 1), ("lose_workers", 1),
         ("tick", 3)),
        expects={"preempted": 150, "found": 25, "turns": 20, "pins": 20},
    ),
    "adapters": Kind(
        with_adapters,
        (("step", 60), ("add", 16), ("finish_adapter", 14), ("open", 3), ("give", 9), ("close", 2),
         ("abort", 2), ("abort_in_flight", 1), ("reset", 1), ("lose_workers", 1), ("pause", 1),
         ("resume", 3), ("hold", 1), ("release", 3)),
        num_tenants=2,
        num_adapters=5,
        expects={"adapter loads": 80, "preempted": 40, "found": 40, "lose_workers": 10},
    ),
    "images": Kind(
        with_images,
        (("step", 60), ("add", 14), ("open", 3), ("give", 9), ("close", 2), ("abort", 3),
         ("abort_in_flight", 2), ("reset", 1), ("lose_workers", 1), ("pause", 1), ("resume", 3),
         ("hold", 1), ("release", 3), ("forget_images", 2), ("break_image", 1)),
        num_tenants=2,
        has_images=True,
        expects={"slices": 200, "encoder evictions": 50, "preempted": 40, "found": 40,
                 "waits for the encoder": 50, "failed images": 5},
    ),
    "images and adapters": Kind(
        lambda rng: {**with_adapters(rng), **with_images(rng)},
        (("step", 60), ("add", 14), ("finish_adapter", 14), ("open", 3), ("give", 9), ("close", 2),
         ("abort", 3), ("abort_in_flight", 2), ("reset", 1), ("lose_workers", 1), ("pause", 1),
         ("resume", 3), ("hold", 1), ("release", 3), ("forget_images", 2), ("break_image", 1)),
        num_tenants=2,
        num_adapters=5,
        has_images=True,
        expects={"adapter loads": 60, "adapted slices": 50, "waits for the encoder": 20},
    ),
    "images and loads": Kind(
        lambda rng: {**with_images(rng), **with_loads(rng)},
        (*CALM, *LOADS, ("abort_in_flight", 1), ("reset", 1), ("lose_workers", 1)),
        has_connector=True,
        has_images=True,
        expects={"slices": 150, "loads": 100, "waits for the encoder": 50},
    ),
    "images and drafts": Kind(
        lambda rng: {
            **with_images(rng),
            "max_num_batched_tokens": rng.choice([40, 64]),
            "max_num_seqs": rng.choice([8, 16, 32]),
            "num_dropped_blocks": int(rng.random() < 0.4),
        },
        (("step", 60), ("add", 9), ("abort", 2), ("abort_in_flight", 1), ("lose_workers", 1)),
        has_drafts=True,
        has_images=True,
        expects={"slices": 200, "accepted": 200},
    ),
    "drafts": Kind(
        with_drafts, (("step", 60), ("add", 9), ("abort", 2)), has_drafts=True,
        expects={"accepted": 800, "rejected": 400, "preempted": 10, "found": 50, "proposed": 150},
    ),
    "drafts, disturbed": Kind(
        with_drafts,
        (("step", 60), ("add", 8), ("abort", 2), ("abort_in_flight", 2), ("reset", 1),
         ("lose_workers", 1), ("open", 4), ("give", 14), ("close", 3), ("pause", 1),
         ("resume", 3), ("hold", 1), ("release", 3)),
        num_tenants=3,
        has_drafts=True,
        expects={
            "accepted": 150, "rejected": 100, "lose_workers": 10, "turns": 20, "proposed": 50,
        },
    ),
    "drafts, pins and loads": Kind(
        lambda rng: {**with_drafts(rng), **with_pins(rng), **with_loads(rng)},
        (("step", 60), ("add", 4), ("turn", 8), ("read", 12), ("tick", 6), ("abort", 1),
         ("stop", 2), ("reset", 1), ("lose_workers", 1), *LOADS),
        num_tenants=2,
        has_connector=True,
        has_drafts=True,
        expects={"accepted": 50, "rejected": 50, "loads": 100, "proposed": 50},
    ),
}  # fmt: skip


@dataclass
class Talk:
    """A request with all its choices, or a session with all its inputs: (tokens, max_tokens)."""

    requests: list[Request]
    inputs: list[tuple[list[int], int]]
    stops: frozenset[int]
    is_session: bool = False
    is_ended: bool = False  # by an abort or a deadline
    cut_short: set[int] = field(default_factory=set)  # choices that were aborted

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    def expected(self, choice: int) -> tuple[list[list[int]], bool]:
        """Return the expected tokens turn by turn, and whether an input does not fit."""
        prompt: list[int] = []
        found = []
        for tokens, max_tokens in self.inputs:
            prompt = prompt + tokens
            if self.is_session and len(prompt) + max_tokens > LONGEST:
                return found, True
            outputs = undisturbed(prompt, max_tokens, choice)
            ends = [place for place, token in enumerate(outputs, 1) if token in self.stops]
            found.append(outputs[: ends[0]] if ends else outputs)
            prompt = prompt + found[-1][:-1]
        return found, False


class Life:
    """One run. operations: the applied operations with all details, for `replay`."""

    kinds = KINDS
    engine_class: Any = CheckedEngine

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = self.kinds[kind]
        self.rng = random.Random(f"{kind} {seed}")
        self.settings = self.kind.settings(self.rng, seed)
        self.clock = FakeClock()
        self.dice = random.Random(seed + 1)  # of the connector
        self.connector = None
        if self.kind.has_connector:
            self.connector = FakeConnector(self._match, fails=self._fails, delays=self._delays)
        self.drafting = None
        if self.kind.has_drafts:
            self.drafting = SyntheticDrafts(
                ACCEPTANCE[seed % len(ACCEPTANCE)], seed=seed, has_draft_model=seed // 2 % 2 == 0
            )
        self.engine = self.engine_class(
            connector=self.connector, clock=self.clock, drafting=self.drafting, **self.settings
        )
        if self.engine.runner.encoder is not None:
            self.engine.runner.encoder.row_seconds = self.rng.choice([0.01, 0.1, 1.0])
        self.engine.step_seconds = lambda output: 0.02 * output.total_num_scheduled_tokens
        if self.engine.adapters is not None:
            self.engine.adapters.loads_later = True
        self.num_of = self.engine.num_of
        self.operations: list[Operation] = []
        self.talks: list[Talk] = []
        self.asked: list[Request] = []
        self.ends_early = False
        self.limit = self._limit_of_pins()

    def run(self, num_operations: int) -> Counter[str]:
        """Draw and apply `num_operations`, then run to the end; returns the counts of events."""
        names, weights = zip(*self.kind.weights, strict=True)
        while len(self.operations) < num_operations:
            (name,) = self.rng.choices(names, weights)
            crowded = self.engine.scheduler.num_unfinished > MOST_UNFINISHED
            if not (crowded and name in ("add", "open", "turn")):
                self.do((name, *self._details(name)))
        self.run_out()
        return self.num_of

    def do(self, operation: Operation) -> None:
        self.operations.append(operation)
        name, *details = operation
        self.num_of[name] += 1
        getattr(self, name)(*details)
        self.judge()

    def judge(self) -> None:
        """Check the state after an operation, in addition to the checks of each step."""
        if len(self.operations) % 20 == 0:
            assert check(self.engine.kv_cache) == []
        if self.settings["scheduling_policy"] == "continuum":
            self._check_pins()

    def _details(self, name: str) -> tuple[Any, ...]:
        rng = self.rng
        match name:
            case "add":
                prompt, max_tokens = self._draw_prompt()
                stops = rng.random() < 0.3
                n = rng.choice([1, 1, 1, 2, 3])
                more = {
                    "priority": rng.randrange(3),
                    "arrival_time": float(rng.randrange(5)),
                    "tenant": rng.choice([0, *range(self.kind.num_tenants)]),
                    "cache_salt": "salt" if rng.random() < 0.1 else None,
                    "prompt_logprobs": 0 if rng.random() < 0.05 else None,
                    **self._draw_adapter(),
                }
                prompt, images = self._draw_images(prompt, max_tokens)
                return (prompt, max_tokens, n, stops, more | images)
            case "open":
                prompt, max_tokens = self._draw_prompt()
                tenant = rng.randrange(self.kind.num_tenants)
                more = {"tenant": tenant, "priority": rng.randrange(3), **self._draw_adapter()}
                prompt, images = self._draw_images(prompt, max_tokens)
                return (prompt, max_tokens, more | images)
            case "turn":
                prompt, max_tokens = self._draw_prompt()
                ttl = rng.choice([None, None, None, 0.0, 500.0, 1e9, math.nan])
                agent = (f"session {rng.randrange(5)}", rng.random() < 0.15, ttl)
                return (prompt, min(max_tokens, 4), rng.choice([1, 1, 1, 2]), agent)
            case "give":
                return (rng.randrange(100), rng.randint(1, 9), rng.randint(1, 6))
            case "abort":
                return (rng.randrange(100), rng.choice([None, 0, 1]))
            case "pause":
                return (rng.choice(["finish_running", "freeze"]),)
            case "reset":
                return (rng.random() < 0.5, rng.random() < 0.7)
            case "read":
                return (rng.randrange(100), rng.choice(["", "a", "b"]))
            case "tick":
                return (rng.choice([0.01, 0.5, 1.9, 5.0]),)
            case "step" | "lose_workers" | "resume" | "release" | "forget_images":
                return ()
            case _:
                return (rng.randrange(100),)

    def _draw_prompt(self) -> tuple[list[int], int]:
        """Return a prompt of a few families, so that many share a prefix and some are equal."""
        rng = self.rng
        length = rng.choice([1, 4, 5, 7, 9, 11, 12, 13, 18, 20, 25, 30, 40])
        family = rng.randrange(3)
        prompt = [family * 100 + position for position in range(length)]
        if rng.random() < 0.5:
            start = rng.randrange(length)
            prompt[start:] = [300 + rng.randrange(600) for _ in prompt[start:]]
        return prompt, rng.randint(1, min(14, LONGEST - length))

    def _draw_adapter(self) -> dict[str, Any]:
        """Return the adapter of a request, if the run has some."""
        if not self.kind.num_adapters:
            return {}
        number = self.rng.randint(0, self.kind.num_adapters)
        changes_images = number % 2 == 1
        return (
            {"lora_request": lora_request(number, changes_images=changes_images)} if number else {}
        )

    def _draw_images(self, prompt: list[int], max_tokens: int) -> tuple[list[int], dict[str, Any]]:
        """Put images into a prompt, if the run has some and they fit.

        They begin at a few positions, so that requests share them, and what is before them.
        """
        rng = self.rng
        if not self.kind.has_images or rng.random() < 0.3:
            return prompt, {}
        parts: list[Any] = []
        room = LONGEST - max_tokens - len(prompt)
        start = 0
        for end in (*sorted(rng.sample([0, 3, 5, 8], rng.randint(1, 3))), len(prompt)):
            number = rng.choice([0, 1, 2, 2, 3, 3])
            if end > len(prompt):
                continue
            parts.append(prompt[start:end])
            start = end
            if end < len(prompt) or rng.random() < 0.2:
                room -= PICTURES[number] + 2
                if room < 0:
                    break
                parts.append((number, PICTURES[number]))
        tokens, features = with_pictures([*parts, prompt[start:]])
        front_end = rng.randrange(2)
        features = [
            replace(each, pixels=SharedPixels(f"{front_end}.{each.mm_hash[-1]}", (3, 2, 2)))
            for each in features
        ]
        return tokens, {"mm_features": features} if features else {}

    # Operations

    def step(self) -> None:
        """Run a step; without work no request could have made progress."""
        waits, engine = bool(self.engine.in_flight), self.engine
        output = engine.step()
        self.num_of["copies"] += len(output.block_copies) // 2
        held = [each.status for each in engine.scheduler.waiting]
        self.num_of["waits for the encoder"] += held.count(RequestStatus.WAITING_FOR_ENCODER)
        if not output.has_result and not waits:
            scheduler = engine.scheduler
            if self.kind.has_images and output.preempted_seq_ids:
                return  # the last one gave way to others, which wait for the encoder's next step
            assert not scheduler.has_work or scheduler.kv_transfer.is_awaited, (
                "a step without tokens although a request could progress"
            )

    def add(
        self, prompt: list[int], max_tokens: int, n: int, stops: bool, more: dict[str, Any]
    ) -> None:
        stop_token_ids = STOPS if stops else ()
        requests = self.engine.add(
            prompt, max_tokens, n=n, eos_token_ids=(), stop_token_ids=stop_token_ids, **more
        )
        self.talks.append(Talk(requests, [(prompt, max_tokens)], frozenset(stop_token_ids)))

    def turn(
        self, prompt: list[int], max_tokens: int, n: int, agent: tuple[str, bool, float | None]
    ) -> None:
        """Return the history of the agent session so far, if it fits, and a few more tokens.

        Sessions 0 and 1 are one tenant's, the others another's; some share a prefix.
        """
        hint = AgentHint(*agent)
        for talk in reversed(self.talks):
            first = talk.requests[0]
            if first.agent.session == hint.session:
                longer = [*first.all_token_ids, *prompt[:3]]
                if len(longer) + max_tokens <= LONGEST:
                    prompt = longer
                break
        tenant = int(agent[0][-1]) // 2 % self.kind.num_tenants
        requests = self.engine.add(
            prompt, max_tokens, n=n, eos_token_ids=(), agent=hint, tenant=tenant
        )
        self.talks.append(Talk(requests, [(prompt, max_tokens)], frozenset()))

    def abort(self, index: int, choice: int | None = None) -> None:
        talks = [each for each in self.talks if self._is_open(each)]
        if talks:
            talk = talks[index % len(talks)]
            self.engine.scheduler.abort_request(talk.request_id, choice)
            talk.cut_short |= {0, 1, 2} if choice is None else {choice}

    def abort_in_flight(self, index: int) -> None:
        self.engine.send()
        self.abort(index)
        self.engine.receive()

    def stop(self, index: int) -> None:
        """Abort a choice because of a stop string."""
        talks = [each for each in self.talks if self._is_open(each)]
        if talks:
            talk = talks[index % len(talks)]
            self.engine.scheduler.abort_request(talk.request_id, 0, stopped=True)
            talk.cut_short.add(0)

    def reset(self, in_flight: bool, preempting: bool) -> None:
        """Reset the prefix cache, which is refused while blocks are in use."""
        if in_flight:
            self.engine.send()
        was_in_use = bool(self.engine.kv_cache.num_sequences)
        forgotten = self.engine.scheduler.reset_prefix_cache(preempting=preempting)
        assert forgotten is (preempting or not was_in_use)
        assert not forgotten or not len(self.engine.kv_cache.pool.index)
        if in_flight:
            self.engine.receive()

    def lose_workers(self) -> None:
        self.engine.lose_workers(self.engine.scheduler.worker_epoch + 1)
        assert self.engine.kv_cache.usage == 0

    def forget_images(self) -> None:
        """Reset the encoder cache, which is refused while an output is needed."""
        self.engine.scheduler.reset_encoder_cache()

    def break_image(self, index: int) -> None:
        """A picture cannot be encoded for a while, or its file of one front end is lost."""
        encoder = self.engine.runner.encoder
        assert encoder is not None
        number, front_end = index % len(PICTURES), index % 3
        was_whole = not encoder.broken and not encoder.lost_files
        is_lost = front_end < 2
        encoder.broken = {number.to_bytes(32, "big")} if was_whole and not is_lost else set()
        encoder.lost_files = {f"{front_end}.{number}"} if was_whole and is_lost else set()

    def pause(self, mode: Any) -> None:
        self.engine.scheduler.pause(mode)

    def resume(self) -> None:
        self.engine.scheduler.resume()

    def hold(self, index: int) -> None:
        if self.talks:
            self.engine.gate.blocked |= {*self.talks[index % len(self.talks)].requests}

    def release(self) -> None:
        self.engine.gate.unblock(*self.engine.gate.blocked)

    def _is_open(self, talk: Talk) -> bool:
        return self.engine.scheduler.has_request(talk.request_id)

    # Sessions

    def open(self, prompt: list[int], max_tokens: int, more: Any) -> None:
        request = self.engine.add_one(
            prompt, max_tokens, resumable=True, eos_token_ids=(), stop_token_ids=STOPS, **more
        )
        self.engine.sessions_opened.add(request.request_id)
        talk = Talk([request], [(prompt, max_tokens)], frozenset(STOPS), is_session=True)
        self.talks.append(talk)

    def give(self, index: int, length: int, max_tokens: int) -> None:
        talk = self._session(index)
        if talk is None:
            return
        tokens = [(300 + 7 * index + position) % 900 for position in range(length)]
        talk.inputs.append((tokens, max_tokens))
        try:
            self.engine.add_session_input(
                talk.requests[0], tokens, max_tokens, stop_token_ids=STOPS
            )
        except InvalidRequestError as error:
            assert talk.expected(0)[1], "the input would have fitted"
            talk.cut_short.add(0)
            self.engine.scheduler.resumable_sessions.fail_session(talk.request_id, error)

    def close(self, index: int) -> None:
        talk = self._session(index)
        if talk is not None:
            self.engine.add_session_input(talk.requests[0], [], last=True)

    def _session(self, index: int) -> Talk | None:
        """Return a session that accepts input."""
        accepts_input = self.engine.scheduler.resumable_sessions.accepts_input
        talks = [each for each in self.talks if accepts_input(0, each.request_id)]
        return talks[index % len(talks)] if talks else None

    def tick(self, seconds: float) -> None:
        self.clock.now += seconds
        overdue = self.engine.scheduler.resumable_sessions.end_idle_sessions()
        ended = {each.request_id for outputs in overdue.values() for each in outputs}
        for talk in self.talks:
            talk.is_ended |= talk.request_id in ended
        self.engine.record_outputs(overdue)

    # AgentSessions

    def read(self, index: int, tool: str) -> None:
        if self.talks:
            request = self.talks[-1 - index % min(6, len(self.talks))].requests[0]
            self.engine.scheduler.report_tool(request.request_id, request.agent.session, tool)

    def _limit_of_pins(self) -> tuple[int, int]:
        usable = self.engine.kv_cache.num_usable_blocks
        limit = int(usable * self.settings.get("max_pinned_share", 0.5))
        own = int(usable * self.settings.get("max_pinned_share_per_tenant", 1.0))
        return limit, min(limit, own)

    def _check_pins(self) -> None:
        scheduler, pool = self.engine.scheduler, self.engine.kv_cache.pool
        pins = list(scheduler._retained_prefixes)
        counts = Counter(block for pin in pins for block in pin.blocks)
        assert counts == pool.retained.counts
        assert all(pin.blocks and len(set(pin.blocks)) == len(pin.blocks) for pin in pins)
        alone = [block for block, count in counts.items() if pool.ref_counts[block] == count]
        assert self.engine.kv_cache.num_available_blocks == pool.num_free + len(alone)
        limit, own_limit = self.limit
        assert len(counts) <= limit
        assert len({pin.agent_session for pin in pins}) == len(pins)
        for tenant in {pin.tenant for pin in pins}:
            own = {block for pin in pins if pin.tenant == tenant for block in pin.blocks}
            assert len(own) <= own_limit
        assert all(self.clock() - pin.ended <= 3600 or pin.is_awaited for pin in pins)

    # External KV

    def _match(self, request: Request, num_local: int) -> Match:
        kind = self.dice.choice(["nothing", "later", "now", "async", "async"])
        if kind == "nothing":
            return NO_MATCH
        if kind == "later" and not self.ends_early:
            self.asked.append(request)
            return NOT_KNOWN_YET
        self.num_of["loads"] += 1
        num_tokens = self.dice.randint(0, 11) * self.settings["block_size"]
        return Match(num_tokens, is_async=kind == "async")

    def _fails(self, load: FakeLoad, blocks: list[int]) -> set[int]:
        if self.dice.random() < 0.7:
            return set()
        bad = {block for block in blocks if self.dice.random() < 0.3}
        self.num_of["lost"] += bool(bad)
        return bad

    def _delays(self, request: Request) -> bool:
        return self.dice.random() < 0.3

    def finish_load(self, index: int) -> None:
        under_way = list(self._connector.under_way)
        if under_way:
            seq_id = under_way[index % len(under_way)]
            self.engine.report(self._connector.finish(seq_id, self.engine.runner))

    def lose_early(self, index: int) -> None:
        """A block of a load turns out invalid before the load has finished."""
        under_way = list(self._connector.under_way.values())
        if under_way:
            load = under_way[index % len(under_way)]
            filled = load.blocks(self.settings["block_size"], self.engine.runner.windows)
            bad = self.dice.choice(filled)[2]
            load.bad.add(bad)
            self.engine.report(KVConnectorOutput(invalid_block_ids=[bad]))

    def wake(self, index: int) -> None:
        if self.asked:
            self.engine.unblock(self.asked[index % len(self.asked)])

    def end_copy(self, index: int) -> None:
        sending = self._connector.sending
        if sending:
            self.engine.report(self._connector.sent(sending[index % len(sending)]))

    def finish_adapter(self, index: int) -> None:
        """The workers have loaded an adapter."""
        workers = self.engine.adapters
        workers.carry_out()
        if loading := list(workers.loading):
            workers.finish(loading[index % len(loading)])
            self.num_of["adapter loads"] += 1

    @property
    def _connector(self) -> FakeConnector:
        assert self.connector is not None
        return self.connector

    # The end

    def run_out(self) -> None:
        """Run to the end without arrivals; remaining tokens bound the number of steps."""
        scheduler = self.engine.scheduler
        self.resume()
        self.release()
        while self._session(0) is not None:
            self.close(0)
        self.ends_early = True
        left = sum(each.num_prompt_tokens + each.max_tokens for each in scheduler.requests)
        most = 50 + 4 * left
        for request in scheduler.requests:  # a part of a row a step, and again if it is lost
            most += 4 * 16 * sum(each.num_embeds for each in request.mm_features)
        while scheduler.num_unfinished or scheduler.has_work or self.engine.in_flight:
            assert most > 0, "the run does not end"
            most -= 1
            for each in self.asked:
                self.engine.unblock(each)
            if self.connector is not None:
                self.finish_load(0)
                self.end_copy(0)
            if self.engine.adapters is not None:
                self.finish_adapter(0)
            self.step()
        while self.connector is not None and (self.connector.under_way or self.connector.sending):
            self.finish_load(0)
            self.end_copy(0)
        stats = scheduler.pop_stats()
        if self.drafting is not None:
            self.num_of["proposed"] += self.drafting.num_proposed
            self.num_of["accepted"] += stats.num_accepted_tokens
            self.num_of["rejected"] += stats.num_draft_tokens - stats.num_accepted_tokens
            assert self.drafting.num_known == {}
            assert self.drafting.num_accepted == stats.num_accepted_tokens
            assert sum(stats.accepted_per_pos) == stats.num_accepted_tokens
        self.num_of["pins"] += stats.num_pins_taken
        self.num_of["pins hit"] += stats.num_pins_hit
        self.num_of["pins given up"] += stats.num_pins_given_up
        if self.settings["scheduling_policy"] == "continuum":
            self.clock.now += 10_000
            self.engine.step()
            self.engine.step()
            assert len(scheduler._retained_prefixes) == 0
        self.engine.assert_idle()
        self._assert_forgotten()
        for talk in self.talks:
            for request in talk.requests:
                self._compare(talk, request.choice)

    def _assert_forgotten(self) -> None:
        """Check that no state of finished requests is left."""
        scheduler = self.engine.scheduler
        assert len(scheduler.queue_limits) == scheduler.queue_limits.num_tokens == 0
        assert scheduler._usage.num_tenants == 0
        assert not scheduler._usage.prefills
        assert scheduler.kv_transfer.rewound_until_step == {}
        if (adapters := scheduler.adapters) is not None:
            left = (adapters.num_unfinished, adapters._waits, adapters._parked, adapters._names)
            assert left == ({}, {}, {}, {})
        for gate in scheduler._lifecycle._features:
            if isinstance(gate, PrefixWait):
                left = (gate._leaders, gate._by_first_block, gate._waiters, gate._num_lost)
                assert left == ({}, {}, {}, {})
            elif isinstance(gate, SiblingForks):
                assert (gate._waits, gate._with_ended_choice) == ({}, set())

    def _error_of(self, key: tuple[int, int]) -> str:
        error = self.engine.outputs[key][-1].error
        return "" if error is None else error.message

    def _compare(self, talk: Talk, choice: int) -> None:
        key = (talk.request_id, choice)
        tokens, reason = self.engine.tokens.get(key, []), self.engine.final.get(key)
        turns, too_long = talk.expected(choice)
        wanted = [token for turn in turns for token in turn]
        failed = reason is FinishReason.ERROR
        is_broken = failed and "be encoded" in self._error_of(key)
        self.num_of["failed images"] += is_broken
        if (
            (choice in talk.cut_short and reason is None)
            or (failed and not talk.is_session)
            or is_broken
        ):
            assert tokens == wanted[: len(tokens)]
            assert not failed or is_broken or self.settings.get("load_failure_policy") == "fail"
            return
        assert tokens == wanted, f"{key}: {tokens} instead of {wanted}"
        last = FinishReason.STOP if turns[-1][-1] in talk.stops else FinishReason.LENGTH
        assert reason is (FinishReason.ERROR if too_long or talk.is_ended else last)
        ends = [each for each in self.engine.outputs[key] if each.finish_reason is not None]
        assert [each.goes_on for each in ends] == [True] * (len(ends) - 1) + [False]
        assert len(turns) <= len(ends) <= len(turns) + 1
        self.num_of["turns"] += len(ends) - 1


def lives(kind: str, seeds: range, num_operations: int) -> Counter[str]:
    """Run all seeds; return the counts of events.

    A failing run is shortened, and its operations are part of the error.
    """
    totals: Counter[str] = Counter()
    for seed in seeds:
        life = Life(kind, seed)
        try:
            totals += life.run(num_operations)
        except Exception as error:
            fewest = shrunk(kind, seed, life.operations)
            shown = "\n".join(f"    {each}" for each in fewest[-40:])
            raise AssertionError(
                f"{kind}, seed {seed}: {life.settings}\n{error!r} after {len(life.operations)} "
                f"operations, of which these {len(fewest)} do (the last 40):\n{shown}"
            ) from error
    return totals


def replay(kind: str, seed: int, operations: list[Operation]) -> None:
    """Run these operations with the same settings, then finish."""
    life = Life(kind, seed)
    for operation in operations:
        life.do(operation)
    life.run_out()


def shrunk(kind: str, seed: int, operations: list[Operation]) -> list[Operation]:
    """Remove ever smaller parts as long as the rest still fails."""
    tries, piece = 120, len(operations) // 2
    while piece and tries:
        start = 0
        while start < len(operations) and tries:
            fewer = operations[:start] + operations[start + piece :]
            tries -= 1
            try:
                replay(kind, seed, fewer)
                start += piece
            except Exception:
                operations = fewer
        piece //= 2
    return operations
