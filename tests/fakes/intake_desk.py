"""An intake without sockets."""

from engine_core.frontend_io import InputProcessor
from engine_core.kv_cache.integrity import check
from engine_core.validation import RequestLimits
from tests.fakes.engine_harness import EngineHarness

LIMITS = RequestLimits(vocab_size=1000, max_model_len=64)


class OutputDispatcher:
    """Keeps what would be sent."""

    def __init__(self):
        self.accepted = []
        self.outputs = []
        self.replies = []

    def accept(self, client, request_id):
        self.accepted.append((client, request_id))

    def add(self, client, output):
        self.outputs.append((client, output))

    def add_step(self, outputs):
        for client, each in outputs.items():
            self.outputs += [(client, output) for output in each]

    def reply(self, client, reply):
        self.replies.append((client, reply))


class Desk:
    """An intake with a scheduler behind it."""

    def __init__(self, problems=(), **settings):
        self.engine = EngineHarness(max_model_len=64, **settings)
        self.outbox = OutputDispatcher()
        self.intake = InputProcessor(
            self.engine.scheduler,
            self.engine.kv_cache,
            self.outbox,
            LIMITS,
            lambda: check(self.engine.kv_cache) + list(problems),
        )

    def take(self, message, client=0):
        self.intake.take(client, message)


def refused(desk):
    """Ids and kinds of what was refused or ended, in order."""
    return [(output.request_id, output.error.kind) for _, output in desk.outbox.outputs]
