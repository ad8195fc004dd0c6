"""An input processor without sockets."""

from engine_core.frontend_io import InputProcessor
from engine_core.validation import RequestLimits
from tests.fakes.engine_harness import EngineHarness

LIMITS = RequestLimits(vocab_size=1000, max_model_len=64)


class FakeOutputDispatcher:
    """Keeps what would be sent to front ends."""

    def __init__(self):
        self.accepted = []
        self.outputs = []
        self.replies = []

    def add_accepted(self, front_end, request_id):
        self.accepted.append((front_end, request_id))

    def add_output(self, front_end, output):
        self.outputs.append((front_end, output))

    def add_outputs(self, outputs):
        for front_end, each in outputs.items():
            self.outputs += [(front_end, output) for output in each]

    def add_reply(self, front_end, reply):
        self.replies.append((front_end, reply))


class InputProcessorHarness:
    """An input processor with a scheduler behind it."""

    def __init__(self, limits: RequestLimits = LIMITS, **settings):
        self.engine = EngineHarness(max_model_len=64, **settings)
        self.outputs = FakeOutputDispatcher()
        self.input_processor = InputProcessor(
            self.engine.scheduler, self.engine.kv_cache, self.outputs, limits
        )

    def receive(self, message, front_end=0):
        self.input_processor.process_message(front_end, message)


def refused(harness):
    """Return (request id, kind of error) of all error outputs, in order."""
    return [(output.request_id, output.error.kind) for _, output in harness.outputs.outputs]
