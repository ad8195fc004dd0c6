"""Target: all message decoders, and the engine behind two of them.

    1 byte: which decoder | a frame

A frame is a message of the union or a ProtocolError. A message is unchanged when it is encoded and
decoded again. Messages of front ends go through the engine's input processor and a few steps; the
output of a worker goes to the scheduler. They raise only the errors that callers expect, and the KV
cache is consistent afterwards.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec
from hypothesis import strategies as st

from api_server.engine.engine_client import FromEngine
from engine_core.frontend_io import InputProcessor, OutputDispatcher
from engine_core.kv_cache.integrity import check
from engine_core.scheduler.result import ImpossibleResultError
from engine_core.validation import RequestLimits
from engine_core.worker_group import FromWorker
from proto.codec import MessageDecoder, encode
from proto.errors import ProtocolError
from proto.messages.engine_io import ToEngine
from proto.messages.kv_events import KVEventBatch
from proto.messages.lifecycle import FromSupervisor, InitializeCache, ProcessBoot, ToSupervisor
from proto.messages.model_runner_output import ModelRunnerOutput
from proto.messages.prepared_model import TensorIndex
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.engine_harness import VOCAB_SIZE, EngineHarness
from tests.fuzz.mutation import Edit, mutate_bytes, mutate_tree, mutated, mutated_bytes
from tests.proto.test_messages import MESSAGES

UNIONS: Final[tuple[Any, ...]] = (
    ToEngine,
    FromWorker,
    FromEngine,
    InitializeCache | SchedulerOutput,
    ToSupervisor,
    FromSupervisor,
    ProcessBoot,
    KVEventBatch,
    TensorIndex,
)
TO_ENGINE, FROM_WORKER = 0, 1
MAX_MODEL_LEN: Final = 256
STEPS: Final = 3


class _NoFrontEnds:
    """Discards messages to front ends."""

    alive = (0,)

    def send(self, front_end: int, message: Any) -> None:
        encode(message)


class Decoders:
    name = "decoders"

    def __init__(self) -> None:
        self._decoders = [MessageDecoder[Any](each) for each in UNIONS]

    def seeds(self) -> list[bytes]:
        engine, _ = _engine_with_a_step()
        answer = engine.runner.execute(engine.in_flight[0])
        seeds = [bytes([FROM_WORKER]) + encode(answer)]
        for message in MESSAGES:
            frame = encode(message)
            for number in range(len(UNIONS)):
                if self._decodes(number, frame):
                    seeds.append(bytes([number]) + frame)
        return seeds

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        return (
            mutated(known, _mutate_message)
            | mutated_bytes(known)
            | st.builds(
                lambda number, frame: bytes([number]) + frame,
                st.integers(0, len(UNIONS) - 1),
                st.binary(max_size=200),
            )
        )

    def run(self, data: bytes) -> str:
        if not data:
            return "nothing"
        number = data[0] % len(UNIONS)
        try:
            message = self._decoders[number].decode(data[1:])
        except ProtocolError as error:
            return f"{number} {error}"
        frame = encode(message)
        assert encode(self._decoders[number].decode(frame)) == frame
        if number == TO_ENGINE:
            return f"engine {_into_engine(message)}"
        if number == FROM_WORKER and isinstance(message, ModelRunnerOutput):
            return f"answer {_into_scheduler(message)}"
        return f"{number} {type(message).__name__}"

    def close(self) -> None:
        """No resources to close."""

    def _decodes(self, number: int, frame: bytes) -> bool:
        try:
            self._decoders[number].decode(frame)
        except ProtocolError:
            return False
        return True


def _mutate_message(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Replace values in a message that remains valid msgpack."""
    try:
        tree = msgspec.msgpack.decode(data[1:])
        return data[:1] + msgspec.msgpack.encode(mutate_tree(tree, edits))
    except (msgspec.DecodeError, OverflowError, RecursionError, UnicodeError):
        return mutate_bytes(data, edits, ())


def _engine_with_a_step() -> tuple[EngineHarness, list[Any]]:
    """An engine with a step in flight: a beam search and two more requests."""
    engine = EngineHarness(num_blocks=60, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    requests = [
        engine.add_one([1, 2, 3], max_tokens=4),
        engine.add_one([4], max_tokens=4),
        *engine.add([5, 6], max_tokens=4, n=2, beam_width=2),
    ]
    engine.send()
    return engine, requests


def _into_scheduler(result: ModelRunnerOutput) -> str:
    """Pass a worker's output to the scheduler; afterwards all requests must still finish."""
    engine, _ = _engine_with_a_step()
    outcome = "taken"
    step = engine.in_flight.popleft()
    try:
        engine.record_outputs(engine.scheduler.update_from_output(step, result))
    except ImpossibleResultError as error:
        outcome = f"refused: {error}"
        engine.record_outputs(error.outputs)
    engine.lose_workers()
    engine.run()
    engine.assert_idle()
    return outcome


def _into_engine(message: Any) -> str:
    """Send a message twice, so that it also meets its own effects."""
    engine = EngineHarness(num_blocks=60, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
    scheduler = engine.scheduler
    dispatcher = OutputDispatcher(_NoFrontEnds(), scheduler, engine.kv_cache, 1)  # type: ignore[arg-type]
    limits = RequestLimits(VOCAB_SIZE, MAX_MODEL_LEN)
    processor = InputProcessor(scheduler, engine.kv_cache, dispatcher, limits)
    for _ in range(2):
        processor.process_message(0, message)
        dispatcher.flush()
    num_steps = 0
    while scheduler.has_work and num_steps < STEPS:
        output = scheduler.schedule()
        if not output.total_num_scheduled_tokens:
            break
        dispatcher.add_outputs(scheduler.update_from_output(output, engine.runner.execute(output)))
        dispatcher.flush()
        num_steps += 1
    assert check(engine.kv_cache) == []
    scheduler.abort_front_end_requests(0)
    assert engine.kv_cache.usage == 0
    return f"{type(message).__name__} {num_steps} {len(scheduler.running)}"
