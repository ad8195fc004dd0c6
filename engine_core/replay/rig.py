"""A scheduler over a KV cache as a trace had them, and a worker that answers as its worker did."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import msgspec

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.kv_cache.observers import PoolObserver
from engine_core.replay.chains import STOP, VOCAB_SIZE, Tokens
from engine_core.replay.recording import Sequence
from engine_core.replay.tier import NO_TIER, Tier
from engine_core.request import Request
from engine_core.scheduler.chunking import ChunkRule
from engine_core.scheduler.observer import SchedulerObserver
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.step_results import ends_of_rows
from proto.agents import NO_AGENT, AgentHint
from proto.model_runner_output import ModelRunnerOutput
from proto.replay import ReplayOrder
from proto.sampling_params import SamplingParams
from proto.sched_trace import Arrival, TraceHeader
from proto.scheduler_output import SchedulerOutput

EPOCH = 1
CUT_SHORT = ("abort", "error")
_FINGERPRINT = bytes(32)


def settings(header: TraceHeader, order: ReplayOrder) -> TraceHeader:
    """The header as it would be with what the order replaces; raises msgspec.ValidationError."""
    given = {
        "scheduling_policy": order.policy,
        "pin_policy": order.pin_policy,
        "max_num_seqs": order.max_num_seqs,
        "max_num_batched_tokens": order.max_num_batched_tokens,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    scheduler = msgspec.convert(
        msgspec.to_builtins(header.scheduler) | changes, type(header.scheduler)
    )
    num_blocks = order.num_blocks or header.num_blocks
    return msgspec.structs.replace(header, scheduler=scheduler, num_blocks=num_blocks)


class Rig:
    """The parts, and the requests that were given to them.

    one_tenant: every request is the same tenant's. aborts: whoever was cut short in the trace is
    aborted by the caller; otherwise it stops with the last token that it had.
    tier: behind the pool.
    """

    def __init__(
        self,
        header: TraceHeader,
        observer: SchedulerObserver,
        clock: Callable[[], float],
        *,
        one_tenant: bool = False,
        aborts: bool = False,
        pool_observers: SequenceOf[PoolObserver] = (),
        tier: Tier = NO_TIER,
    ) -> None:
        config = header.scheduler
        self.kv_cache = KVCacheManager(
            header.num_blocks,
            header.block_size,
            header.enable_prefix_caching,
            _FINGERPRINT,
            groups=header.groups,
            longest_chunk=ChunkRule.from_config(config).longest_chunk,
            observers=pool_observers,
        )
        self.scheduler = Scheduler(
            config,
            self.kv_cache,
            epoch=EPOCH,
            max_model_len=header.max_model_len,
            vocab_size=VOCAB_SIZE,
            clock=clock,
            connect=tier.connect(self.kv_cache),
            observer=observer,
        )
        self.worker = ReplayWorker()
        self._one_tenant = one_tenant
        self._aborts = aborts

    def add(self, sequence: Sequence, tokens: Tokens, arrival_time: float) -> None:
        """A request with this content is in the queue."""
        arrival = sequence.arrival
        num_prompt = arrival.num_prompt_tokens
        known = tokens.first(num_prompt + arrival.num_output_tokens)
        self.worker.expect(arrival.handle, tokens, _end(sequence, self._aborts))
        self._add(
            Request(
                handle=arrival.handle,
                request_id=arrival.request_id,
                choice=arrival.choice,
                prompt_token_ids=known[:num_prompt],
                output_token_ids=known[num_prompt:],
                sampling_params=SamplingParams(
                    max_tokens=arrival.max_tokens,
                    stop_token_ids=(STOP,),
                    prompt_logprobs=None if arrival.reads_cache else 0,
                ),
                hasher=self.kv_cache.hasher,
                priority=arrival.priority,
                arrival_time=arrival_time,
                tenant=0 if self._one_tenant else arrival.tenant,
                agent=_agent_of(arrival),
            )
        )

    def _add(self, request: Request) -> None:
        """As the engine's intake does."""
        self.scheduler.add_request(request)
        self.scheduler.backlog.enter(request)


def _end(sequence: Sequence, aborts: bool) -> int:
    """How many tokens it has when its last one is to be a stop token; 0 where none is."""
    finish = sequence.finish
    if finish is None or finish.reason == "length" or not finish.num_output_tokens:
        return 0
    if aborts and finish.reason in CUT_SHORT:
        return 0
    return sequence.arrival.num_prompt_tokens + finish.num_output_tokens


def _agent_of(arrival: Arrival) -> AgentHint:
    if not arrival.job:
        return NO_AGENT
    return AgentHint(arrival.job, arrival.is_last_step, arrival.ttl_ms)


class ReplayWorker:
    """Knows of each sequence what it will say."""

    def __init__(self) -> None:
        self._tokens: dict[int, Tokens] = {}
        self._ends: dict[int, int] = {}
        self._num_tokens: dict[int, int] = {}

    def expect(self, handle: int, tokens: Tokens, end: int) -> None:
        """end: it stops with so many tokens in all; 0 for never."""
        self._tokens[handle] = tokens
        self._ends[handle] = end

    def answer(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """A token for each sequence whose tokens are all computed after this step.

        To be asked about every step, in their order, also those that compute nothing.
        """
        num_tokens = self._num_tokens
        for handle in output.finished_handles:
            num_tokens.pop(handle, None)
        for new in output.new_requests:
            num_tokens[new.handle] = len(new.prompt_token_ids) + len(new.output_token_ids)
        handles = [each.handle for each in output.new_requests] + output.cached_requests.handles
        sampled: list[list[int]] = []
        for handle, end in zip(handles, ends_of_rows(output), strict=True):
            number = num_tokens[handle]
            if end < number:
                sampled.append([])
                continue
            is_last = number + 1 == self._ends[handle]
            sampled.append([STOP if is_last else self._tokens[handle].at(number)])
            num_tokens[handle] = number + 1
        return ModelRunnerOutput(output.epoch, output.step, handles, sampled)
