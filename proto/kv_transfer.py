"""What the two halves of a KV connector say to each other.

The deciding half lives in the engine, the copying half in each worker; what only they understand
travels as msgspec.Raw, and a receiver decodes it into a type that it names. Here is what the
scheduler and the worker's loop understand, too.
"""

from typing import Literal

import msgspec

LoadFailurePolicy = Literal["recompute", "fail"]

NO_PAYLOAD = msgspec.Raw(b"\xc0")
"""nil: nothing to say."""


class KVConnectorOutput(msgspec.Struct, array_like=True, frozen=True):
    """What the copying half of one worker has finished since its last report.

    finished_sending: handles whose blocks nobody reads any more, of requests that are over.
    finished_recving: handles whose loads have ended, well or not.
    invalid_block_ids: device blocks that a load was to fill, and that do not hold what they should.
    worker_metadata: for the deciding half.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: list[int] = []
    worker_metadata: msgspec.Raw = NO_PAYLOAD

    @property
    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or bytes(self.worker_metadata) != bytes(NO_PAYLOAD)
        )
