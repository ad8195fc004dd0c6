"""An engine with grammars, without sockets: real input processor, scheduler, compiler and masks.

Its worker draws from what a mask leaves, by a digest of the prefix, so runs can be compared.
"""

import threading
import time
from pathlib import Path
from select import select

import numpy as np

from engine_core.frontend_io import InputProcessor
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.compiler import (
    COMPILE_SECONDS,
    GrammarCache,
    GrammarCompiler,
)
from engine_core.structured_output.manager import StepMasks, StructuredOutputManager
from engine_core.structured_output.matchers import GrammarTimeoutError
from engine_core.validation import RequestLimits
from proto.messages.engine_io import EngineCoreRequest, FinishReason
from proto.messages.grammar import GrammarSource
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.sampling_params import SamplingParams, ThinkingRule
from proto.messages.scheduler_output import GrammarOutput, SchedulerOutput
from proto.runtime.sockets import EventFd
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.input_harness import FakeOutputDispatcher
from tests.fakes.paged_runner import PagedRunner, Row, hashed_token
from tests.fakes.toy_vocabulary import EOS, SIZE

LIMIT_SECONDS = 20.0
RUN_SECONDS = 40.0
"""By time, not by steps: a step without work takes microseconds, a slow mask 50 ms."""


class NoSandbox:
    """Accepts every grammar."""

    def check(self, source: GrammarSource, seconds: float) -> int:
        return 0

    def close(self) -> None: ...


class GatedSandbox(NoSandbox):
    """Holds grammars back; a grammar that begins with "slow" is held back in its second turn.

    entered: released for every grammar that is held back. gate: lets one of these pass. names: the
    sources that were held back.
    """

    def __init__(self) -> None:
        self.entered, self.gate = threading.Semaphore(0), threading.Semaphore(0)
        self.names: list[str] = []

    def check(self, source: GrammarSource, seconds: float) -> int:
        if source.source.startswith("slow") and seconds < COMPILE_SECONDS:
            raise GrammarTimeoutError(f"more than {seconds:g} seconds")
        self.names.append(source.source)
        self.entered.release()
        assert self.gate.acquire(timeout=LIMIT_SECONDS)
        return 0


class GrammarRunner(PagedRunner):
    """Draws among the tokens that a mask allows, or among all without a mask."""

    def __init__(self, block_size: int) -> None:
        super().__init__(block_size)
        self.masks = GrammarOutput(0, 0, [], b"")

    def _sample(self, row: Row, end: int) -> list[int]:
        self.next_token = lambda token_ids, choice: self._draw(row, token_ids, choice)
        return super()._sample(row, end)

    def _guess(self, row: Row, token_ids: list[int]) -> int:
        return hashed_token(token_ids, row.choice, SIZE)  # a draft model knows no grammar

    def _draw(self, row: Row, token_ids: list[int], choice: int) -> int:
        seq_id = next(each for each, other in self.rows.items() if other is row)
        if seq_id not in self.masks.seq_ids:
            return hashed_token(token_ids, choice, SIZE)
        words = np.frombuffer(self.masks.masks, "<u4").reshape(len(self.masks.seq_ids), -1)
        # A sequence with a draft has a mask for each of its positions.
        index = self.masks.seq_ids.index(seq_id) + row.num_sampled
        bits = np.unpackbits(words[index].view(np.uint8), bitorder="little", count=SIZE)
        allowed = np.flatnonzero(bits)
        assert len(allowed), "a mask leaves nothing"
        if len(allowed) == SIZE:  # as good as no mask
            return hashed_token(token_ids, choice, SIZE)
        if EOS in allowed and len(token_ids) % 3 == 0:
            return EOS
        return int(allowed[hashed_token(token_ids, choice, len(allowed))])


class GrammarEngine:
    """An engine with structured output, driven step by step. sandbox: accepts all by default."""

    def __init__(self, folder: Path, sandbox: object = None, **settings: object) -> None:
        path, event_fd = folder / "tokenizer.json", EventFd()
        self.voided: list[int] = []
        self.event_fd = event_fd
        compiler = GrammarCompiler(
            lambda: LLGuidanceBackend(path, SIZE, (EOS,)),
            sandbox or NoSandbox(),  # type: ignore[arg-type]
            GrammarCache(16, 1 << 16),
            event_fd,
        )
        self.manager = StructuredOutputManager(compiler, event_fd)
        self.harness = EngineHarness(
            grammars=self.manager,
            **{"max_model_len": 512, **settings},  # type: ignore[arg-type]
        )
        self.harness.runner = self.runner = GrammarRunner(self.harness.runner.block_size)
        self.outputs = FakeOutputDispatcher()
        self.input_processor = InputProcessor(
            self.harness.scheduler,
            self.harness.kv_cache,
            self.outputs,  # type: ignore[arg-type]
            RequestLimits(SIZE, 512),
            self.manager,
        )

    @property
    def num_constrained(self) -> int:
        """Number of choices with a grammar, waiting for it or not."""
        return len(self.manager._blocked) + len(self.manager._rows)

    def close(self) -> None:
        self.manager.close()

    def send_request(
        self,
        request_id: int,
        grammar: GrammarSource | None,
        prompt: list[int] | None = None,
        outputs: tuple[tuple[int, ...], ...] = (),
        *,
        n: int = 1,
        max_tokens: int = 200,
        wait: bool = True,
        thinking: ThinkingRule | None = None,
    ) -> None:
        """Send a request. wait: until its grammar is compiled."""
        self.input_processor.process_message(
            0,
            EngineCoreRequest(
                epoch=1,
                request_id=request_id,
                prompt_token_ids=prompt or [5, 6, request_id],
                sampling_params=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,)),
                seed=0,
                arrival_time=0.0,
                n=n,
                grammar=grammar,
                thinking=thinking,
                output_token_ids=outputs,
            ),
        )
        if wait:
            self.wait_for_reply(request_id)

    def wait_for_reply(self, request_id: int) -> None:
        """Wait until a request was accepted or refused."""
        while not any(each == request_id for _, each in self.outputs.accepted) and not any(
            output.request_id == request_id for _, output in self.outputs.outputs
        ):
            assert select([self.event_fd.descriptor], [], [], LIMIT_SECONDS)[0], "no answer"
            self.manager.clear_descriptor()
            self.input_processor.accept_compiled_requests()

    def send(self) -> SchedulerOutput:
        """Schedule a step and put it in flight, even if it has no tokens."""
        self._unblock()
        return self.harness.send()

    def compute(self) -> ModelRunnerOutput:
        """Return the worker's result of the oldest step, with masks."""
        output = self.harness.in_flight[0]
        rewound_until_step = self.harness.scheduler.kv_transfer.rewound_until_step
        self.manager.request_masks(output, rewound_until_step)
        self.runner.masks = GrammarOutput(0, 0, [], b"")
        if output.constrained_seq_ids:
            masks = self._masks(output.step)
            self.runner.masks = masks.message()
            self.harness.scheduler.rewind_rows(output, masks.late)
            self.voided += masks.late
        return self.runner.execute(output)

    def receive(self, result: ModelRunnerOutput) -> None:
        """Process a result, as the busy loop does."""
        output = self.harness.in_flight.popleft()
        scheduler, record = self.harness.scheduler, self.harness.record_outputs
        violations = self.manager.find_violations(output, result)
        record(scheduler.fail_requests(violations.before))
        record(scheduler.update_from_output(output, result))
        record(scheduler.fail_requests(violations.after))
        self.manager.end_step(output.constrained_seq_ids)

    def step(self) -> None:
        """Fill the steps in flight, then process one result."""
        scheduler = self.harness.scheduler
        self.manager.pop_masks()  # late ones
        self.harness.record_outputs(scheduler.fail_requests(self.manager.pop_overdue()))
        self._unblock()
        while scheduler.has_work and len(self.harness.in_flight) < self.harness.max_in_flight:
            if not self.send().total_num_scheduled_tokens:
                if self.manager.awaiting_mask and len(self.harness.in_flight) == 1:
                    self._wait_for_masks()
                break
        if self.harness.in_flight:
            self.receive(self.compute())
        elif self.manager.awaiting_mask:
            self._wait_for_masks()

    def run(self) -> None:
        """Step until no request is left, or for RUN_SECONDS."""
        deadline = time.monotonic() + RUN_SECONDS
        while self.harness.scheduler.num_unfinished and time.monotonic() < deadline:
            self.step()
        while self.harness.in_flight or self.harness.scheduler.has_work:
            self.step()
        assert not self.harness.scheduler.num_unfinished

    def lose_workers(self) -> None:
        """Replace the workers; steps in flight are lost."""
        self.harness.in_flight.clear()
        self.manager.begin_worker_epoch()
        self.harness.runner = self.runner = GrammarRunner(self.runner.block_size)
        self.harness.record_outputs(self.harness.scheduler.begin_worker_epoch(2))

    def tokens(self, request_id: int, choice: int = 0) -> list[int]:
        return self.harness.tokens[request_id, choice]

    def reason(self, request_id: int, choice: int = 0) -> FinishReason:
        return self.harness.final[request_id, choice]

    def _unblock(self) -> None:
        for request in self.manager.pop_unblocked():
            self.harness.scheduler.unblock(request)

    def _masks(self, step: int) -> StepMasks:
        while True:
            masks = self.manager.pop_masks()
            if masks is not None and masks.step == step:
                return masks
            self._wait_for_masks()

    def _wait_for_masks(self) -> None:
        seconds = self.manager.seconds_to_next_end
        select([self.event_fd.descriptor], [], [], min(LIMIT_SECONDS, seconds or 0.0))
        self.manager.clear_descriptor()
