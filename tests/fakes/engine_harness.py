"""A scheduler with a fake worker behind it, without sockets."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from engine_core.busy_loop import OVERLAPPED, SYNCHRONOUS
from engine_core.kv_cache.events import PoolObserver
from engine_core.kv_cache.integrity import check
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.pool import TransferRefs
from engine_core.kv_connector.base import NO_CONNECTOR, SchedulerConnector
from engine_core.request import Request, choices_of, with_adapter
from engine_core.scheduler.compute_meter import ComputeMeter
from engine_core.scheduler.features.base import (
    NO_OBSERVER,
    SchedulerObserver,
    Unblock,
)
from engine_core.scheduler.features.grammars import Grammars
from engine_core.scheduler.features.speculative_decoding import DraftProvider
from engine_core.scheduler.kv_transfer import IsStorable
from engine_core.scheduler.limits import ChunkRule
from engine_core.scheduler.request_lifecycle import OutputsByFrontEnd
from engine_core.scheduler.scheduler import Scheduler
from proto.messages.engine_io import EngineCoreOutput, EngineCoreRequest, FinishReason, SessionInput
from proto.messages.kv_connector import KVConnectorOutput, LoadFailurePolicy
from proto.messages.lifecycle import KVGroup
from proto.messages.multimodal import EncoderLimits
from proto.messages.sampling_params import SamplingParams
from proto.messages.scheduler_output import SchedulerOutput
from proto.settings.config import LoRAConfig, SchedulerConfig
from tests.fakes.gates import NoFeature
from tests.fakes.images import FakeEncoder
from tests.fakes.kv_connector import FakeConnector
from tests.fakes.lora import AdapterWorkers
from tests.fakes.paged_runner import NextToken, PagedRunner, hashed_token

VOCAB_SIZE = 1000
EOS = 999
NO_REPORT = KVConnectorOutput()


class EngineHarness:
    """Adds requests, runs steps, records the outputs for front ends.

    in_flight: scheduled steps whose results were not processed yet; with async_scheduling one
    remains while the next step is scheduled.
    adapters: the workers' side of adapters; None without `lora`.
    step_seconds: the compute time that workers report for a step; 0 means none.
    windows: attention window of each KV group. groups: groups of other kinds than attention.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 1000,
        block_size: int = 16,
        max_model_len: int = 8192,
        enable_prefix_caching: bool = True,
        next_token: NextToken = hashed_token,
        num_state_slots: int = 0,
        windows: Sequence[int | None] = (None,),
        groups: Sequence[KVGroup] | None = None,
        gates: Sequence[NoFeature] = (),
        observers: Sequence[PoolObserver] = (),
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        observer: SchedulerObserver = NO_OBSERVER,
        vocab_size: int = VOCAB_SIZE,
        connector: FakeConnector | None = None,
        load_failure_policy: LoadFailurePolicy = "recompute",
        compute_meter: ComputeMeter | None = None,
        drafting: DraftProvider | None = None,
        num_dropped_blocks: int = 0,
        num_draft_positions: int = 0,
        lora: LoRAConfig | None = None,
        encoder: EncoderLimits | None = None,
        **scheduler: int | bool | float | str | None,
    ) -> None:
        self.connector = connector
        config = SchedulerConfig(**{"max_num_batched_tokens": 8192, **scheduler})  # type: ignore[arg-type]
        self.kv_cache = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_caching,
            b"f" * 32,
            groups=groups or [KVGroup(window) for window in windows],
            longest_chunk=ChunkRule.from_config(config).longest_chunk,
            num_state_slots=num_state_slots,
            observers=observers,
            num_dropped_blocks=num_dropped_blocks,
        )
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            epoch=1,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            more_features=gates,
            clock=clock,
            grammars=grammars,
            observer=observer,
            connect=self._connect,
            load_failure_policy=load_failure_policy,
            compute_meter=compute_meter,
            drafting=drafting,
            num_draft_positions=num_draft_positions,
            report_begun=lambda request, alone: self.report_begun(request, alone),
            lora=lora,
            encoder=encoder,
        )
        self.report_begun: Callable[[Request, bool], None] = lambda request, alone: None
        self.adapters: AdapterWorkers | None = None
        if self.scheduler.adapters is not None:
            self.adapters = AdapterWorkers(self.scheduler.adapters)
        for gate in gates:
            gate.unblock_request = self.scheduler.unblock
        self.max_in_flight = OVERLAPPED if config.async_scheduling else SYNCHRONOUS
        self.in_flight: deque[SchedulerOutput] = deque()
        self.runner = PagedRunner(
            block_size,
            next_token,
            windows=windows,
            has_states=self.kv_cache.has_states,
            encoder=None if encoder is None else FakeEncoder(encoder),
        )
        self.step_seconds: Callable[[SchedulerOutput], float] = lambda output: 0.0
        self.ids = itertools.count(100)
        self.tokens: dict[tuple[int, int], list[int]] = {}
        self.turn_starts: dict[tuple[int, int], int] = {}
        self.outputs: dict[tuple[int, int], list[EngineCoreOutput]] = {}
        self.final: dict[tuple[int, int], FinishReason] = {}

    def _connect(
        self, holds: TransferRefs, unblock: Unblock, is_storable: IsStorable
    ) -> SchedulerConnector:
        self.transfer_refs, self.unblock, self.is_storable = holds, unblock, is_storable
        return NO_CONNECTOR if self.connector is None else self.connector

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 16,
        *,
        front_end: int = 0,
        n: int = 1,
        **params: object,
    ) -> list[Request]:
        """Add a request and return its choices."""
        fields = EngineCoreRequest.__struct_fields__
        given = {name: params.pop(name) for name in fields if name in params}
        message = EngineCoreRequest(
            epoch=1,
            request_id=next(self.ids),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                **{"max_tokens": max_tokens, "eos_token_ids": (EOS,), **params}  # type: ignore[arg-type]
            ),
            n=n,
            **{"seed": 0, "arrival_time": 0.0, **given},  # type: ignore[arg-type]
        )
        if message.lora_request is not None:
            message = with_adapter(message, message.lora_request)
        requests = choices_of(message, self.scheduler.next_seq_id, front_end, self.kv_cache.hasher)
        for request in requests:
            if message.resumable:
                self.scheduler.resumable_sessions.open_session(request)
            self.scheduler.add_request(request)
        return requests

    def add_one(self, prompt: list[int], max_tokens: int = 16, **params: object) -> Request:
        (request,) = self.add(prompt, max_tokens, **params)  # type: ignore[arg-type]
        return request

    def add_session_input(
        self,
        request: Request,
        tokens: list[int],
        max_tokens: int = 16,
        *,
        last: bool = False,
        stop_token_ids: tuple[int, ...] = (),
    ) -> list[EngineCoreOutput]:
        """Send more input to the session of a request; return its immediate outputs."""
        params = SamplingParams(
            max_tokens=max_tokens, eos_token_ids=(EOS,), stop_token_ids=stop_token_ids
        )
        outputs = self.scheduler.resumable_sessions.add_input(
            SessionInput(1, request.request_id, tokens, params if tokens else None, last)
        )
        self.record_outputs({request.front_end_index: outputs})
        return outputs

    def step(self) -> SchedulerOutput:
        """Schedule, compute, update; with async_scheduling the update is of the previous step."""
        output = self.send()
        self.receive()
        return output

    def lose_workers(self, epoch: int = 2, runner: PagedRunner | None = None) -> OutputsByFrontEnd:
        """Replace the workers as the busy loop does after a death; discard steps in flight.

        runner: of the new worker; one like the old one if not given.
        """
        self.in_flight.clear()
        old = self.runner
        self.runner = runner or PagedRunner(
            old.block_size,
            old.next_token,
            windows=old.windows,
            has_states=old.has_states,
            encoder=None if old.encoder is None else old.encoder.replacement(),
        )
        outputs = self.scheduler.begin_worker_epoch(epoch)
        if self.adapters is not None:
            self.adapters.lose()
        self.record_outputs(outputs)
        return outputs

    def send(self) -> SchedulerOutput:
        """Schedule a step."""
        self.scheduler.crash_isolation.isolate_suspect()
        output = self.scheduler.schedule()
        if self.adapters is not None:
            self.adapters.begin_step(output)
        self.in_flight.append(output)
        return output

    def receive(self) -> None:
        """Process results until another step may be sent; all of them if the last step is empty."""
        num_left = self.max_in_flight - 1
        if self.in_flight and not self.in_flight[-1].has_result:
            num_left = 0
        while len(self.in_flight) > num_left:
            self.collect(self.in_flight.popleft())

    def collect(self, output: SchedulerOutput) -> dict[int, list[EngineCoreOutput]]:
        """Compute a scheduled step, update the scheduler, and check the outputs."""
        loads = self.connector.execute(output.step, self.runner) if self.connector else NO_REPORT
        result = self.runner.execute(output)
        if not loads.is_empty:
            self.report(loads)
        result = msgspec.structs.replace(result, compute_seconds=self.step_seconds(output))
        by_front_end = self.scheduler.update_from_output(output, result)
        self.record_outputs(by_front_end)
        return by_front_end

    def report(self, output: KVConnectorOutput) -> None:
        """Report to the scheduler what the workers finished for the connector."""
        self.record_outputs(self.scheduler.update_from_connector(output))

    def finish_load(self, request: Request) -> None:
        """Finish the load of a request's KV."""
        assert self.connector is not None
        self.report(self.connector.finish(request.seq_id, self.runner))

    def record_outputs(self, by_front_end: OutputsByFrontEnd) -> None:
        """Record outputs for front ends. The tokens of a session are those of all its turns."""
        for each in itertools.chain.from_iterable(by_front_end.values()):
            key = (each.request_id, each.choice)
            assert key not in self.final, "an output after the final one"
            tokens = self.tokens.setdefault(key, [])
            if each.new_token_ids:
                start = self.turn_starts.get(key, 0)
                assert each.token_index >= len(tokens) - start, "a token was sent twice"
            tokens += each.new_token_ids
            self.outputs.setdefault(key, []).append(each)
            if each.goes_on:
                self.turn_starts[key] = len(tokens)
            elif each.finish_reason is not None:
                self.final[key] = each.finish_reason

    def run(self, max_steps: int = 10_000) -> int:
        """Step until no request is left; return the number of steps. Each must make progress."""
        steps = 0
        while self.scheduler.num_unfinished:
            steps += 1
            assert steps <= max_steps
            self.step_with_progress()
        if self.scheduler.has_work or self.in_flight:
            self.step()
        return steps

    def step_with_progress(self) -> SchedulerOutput:
        """Run a step, which must compute something unless requests wait for steps in flight."""
        waits = bool(self.in_flight)
        output = self.step()
        assert output.has_result or waits, "a step without progress"
        return output

    def run_until_finished(self, request: Request, max_steps: int = 10_000) -> None:
        """Step until a request got its final output."""
        while self.finish_reason_of(request) is None:
            max_steps -= 1
            assert max_steps > 0
            self.step()

    def tokens_of(self, request: Request) -> list[int]:
        return self.tokens.get((request.request_id, request.choice), [])

    def finish_reason_of(self, request: Request) -> FinishReason | None:
        return self.final.get((request.request_id, request.choice))

    def assert_idle(self) -> None:
        """Assert that no request, block or worker row is left."""
        assert self.scheduler.num_unfinished == 0
        assert not self.scheduler.has_work
        assert not self.in_flight
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert self.kv_cache.usage == 0
        assert len(self.scheduler.resumable_sessions.waiting_block_holders) == 0
        assert check(self.kv_cache) == []
        assert self.runner.rows == {}
        if (encoder_inputs := self.scheduler._encoder_inputs) is not None:
            assert encoder_inputs.cache.check() == []
            assert not encoder_inputs.cache.claiming
            assert not encoder_inputs.has_work
            assert self.runner.encoder is not None
            assert self.runner.encoder.rows.keys() == {
                output.feature.mm_hash for output in encoder_inputs.cache
            }


def scheduled(output: SchedulerOutput) -> dict[int, int]:
    """Return the number of scheduled tokens by seq_id."""
    cached = output.cached_requests
    counts = {new.seq_id: new.num_scheduled_tokens for new in output.new_requests}
    return counts | dict(zip(cached.seq_ids, cached.num_scheduled_tokens, strict=True))
