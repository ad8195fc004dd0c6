"""What the two halves of a KV connector say to each other.

The deciding half lives in the engine, the copying half in each worker; what only they understand
travels as a payload, and a receiver decodes it into a type that it names. Here is what the
scheduler and the worker's loop understand, too.
"""

from typing import Final, Literal, TypeVar

import msgspec

from proto.codec import encode
from proto.errors import ProtocolError

LoadFailurePolicy = Literal["recompute", "fail"]
T = TypeVar("T")

Payload = bytes
"""What only the two halves of a connector understand: a message of theirs, encoded.

Bytes and not a msgspec.Raw, so that decoding what it travels in never looks into it.
"""

NO_PAYLOAD: Final[Payload] = b""
"""Nothing to say."""


def pack(message: msgspec.Struct) -> Payload:
    """A Struct as a payload."""
    return encode(message)


def unpack(payload: Payload, message_type: type[T]) -> T:
    """The Struct in a payload; raises ProtocolError for anything else."""
    try:
        return msgspec.msgpack.decode(payload, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a payload that is no {message_type.__name__}: {error}") from None


class KVConnectorOutput(msgspec.Struct, array_like=True, frozen=True):
    """What the copying half of one worker has finished since its last report.

    finished_sending: seq_ids whose blocks nobody reads any more, of requests that are over.
    finished_recving: seq_ids whose loads have ended, well or not.
    invalid_block_ids: device blocks that a load was to fill, and that do not hold what they should.
    worker_metadata: for the deciding half, of this one rank.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: list[int] = []
    worker_metadata: Payload = NO_PAYLOAD

    @property
    def is_empty(self) -> bool:
        return not (
            self.finished_sending
            or self.finished_recving
            or self.invalid_block_ids
            or self.worker_metadata
        )


class KVConnectorReport(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """What one worker has finished; comes before the answer to the step that it was seen in.

    Between two steps it comes by itself, so that an engine that waits for a load is woken.
    """

    epoch: int
    rank: int
    output: KVConnectorOutput
