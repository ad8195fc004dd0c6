"""Asks a remote store what it has, on a thread, so that the engine never waits for it.

    engine    ask(keys) ─▶ questions ─▶ thread ── EXISTS, all at once ──▶ server
              take_answers() ◀── answers, and a ring ◀──────────────────────┘

Whatever happens, each question is answered in about the time limit of one answer: with "it is not
there", where nobody can tell, and at once while there is no connection. A thread that hangs in a
name server's answer holds none back.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from engine_core.kv_connector.offload.base import OffloadKey
from proto.circuit_breaker import CircuitBreaker
from proto.errors import TokendError
from proto.kv_media import remote_name
from proto.kv_transfer_config import RemoteAddress
from proto.redis_client import RedisConnection, RemoteStoreError

logger = logging.getLogger("tokend.kv_media")

_KEEPALIVE_SECONDS: Final = 15.0
_FAILURES_ALLOWED: Final = 1
_SCAN_COUNT: Final = b"1000"
_UNLINK_COUNT: Final = 1000
MAX_DISCARDED: Final = 1 << 16
"""Keys that wait to be removed; where there would be more, all blocks of the model are."""
_STOP_SECONDS: Final = 0.5


class Answer(NamedTuple):
    """present: on all ranks."""

    key: OffloadKey
    present: bool


class RemoteLookups:
    """folder: of this model's blocks. seconds: for an answer. retry_seconds: see CircuitBreaker."""

    def __init__(
        self,
        address: RemoteAddress,
        folder: str,
        num_ranks: int,
        seconds: float,
        retry_seconds: float,
        ring: Callable[[], None],
    ) -> None:
        self._address = address
        self._folder = folder
        self._num_ranks = num_ranks
        self._seconds = seconds
        self._ring = ring
        self._breaker = CircuitBreaker(retry_seconds, _FAILURES_ALLOWED)
        self._changed = threading.Condition()
        self._questions: list[OffloadKey] = []
        self._answers: list[Answer] = []
        self._discarded: dict[OffloadKey, None] = {}
        self._clearing = False
        self._stopping = False
        self._connected = False
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="kv remote", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether a question makes sense."""
        return self._connected

    def ask(self, keys: Sequence[OffloadKey]) -> None:
        """Answers follow, and a ring."""
        with self._changed:
            if self._connected:
                self._questions += keys
                self._changed.notify()
                return
            self._answers += [Answer(key, False) for key in keys]
        self._ring()

    def take_answers(self) -> list[Answer]:
        """Since the last call."""
        with self._changed:
            answers, self._answers = self._answers, []
        return answers

    def discard(self, keys: Sequence[OffloadKey]) -> None:
        """Have the server forget these, before it is asked for anything else."""
        with self._changed:
            self._discarded.update(dict.fromkeys(keys))
            if len(self._discarded) > MAX_DISCARDED:
                self._discarded.clear()
                self._clearing = True
            self._changed.notify()

    def is_leaving(self, key: OffloadKey) -> bool:
        """Whether it has been discarded, and may be there still."""
        return key in self._discarded

    def clear(self) -> None:
        """Have the server forget all blocks of this model, once it can be reached."""
        with self._changed:
            self._clearing = True
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopping:
            if self._breaker.is_open:
                self._sleep(self._breaker.seconds_left)
                continue
            try:
                connection = RedisConnection(self._address, self._seconds)
            except Exception as error:  # whatever it is, nobody is to wait for this thread
                self._lost(error)
                continue
            self._connected = True
            self._say("connected")
            try:
                self._serve(connection)
            except Exception as error:
                self._lost(error)
            finally:
                connection.close()

    def _serve(self, connection: RedisConnection) -> None:
        """Answer questions until the end, or until one gets no answer."""
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work, _KEEPALIVE_SECONDS)
                if self._stopping:
                    return
                asked = list(dict.fromkeys(self._questions))
                clearing, self._clearing = self._clearing, False
                discarded = list(self._discarded)
            if clearing:
                self._forget_all(connection)
            if discarded:
                self._remove(connection, discarded)
            if asked:
                self._answer(self._exist(connection, asked))
            elif not clearing and not discarded:
                connection.call(self._seconds, b"PING")
            self._breaker.record_success()

    def _has_work(self) -> bool:
        return bool(self._questions or self._discarded) or self._clearing or self._stopping

    def _exist(self, connection: RedisConnection, keys: Sequence[OffloadKey]) -> list[Answer]:
        connection.set_deadline(self._seconds)
        connection.send([[b"EXISTS", *self._names(key)] for key in keys])
        return [Answer(key, connection.reply() == self._num_ranks) for key in keys]

    def _names(self, key: OffloadKey) -> list[bytes]:
        return [remote_name(self._folder, key, rank) for rank in range(self._num_ranks)]

    def _remove(self, connection: RedisConnection, keys: Sequence[OffloadKey]) -> None:
        names = [name for key in keys for name in self._names(key)]
        for start in range(0, len(names), _UNLINK_COUNT):
            connection.call(self._seconds, b"UNLINK", *names[start : start + _UNLINK_COUNT])
        with self._changed:
            for key in keys:
                self._discarded.pop(key, None)

    def _forget_all(self, connection: RedisConnection) -> None:
        try:
            self._scan_and_remove(connection)
        except RemoteStoreError:
            self._clearing = True  # once it answers again
            raise

    def _scan_and_remove(self, connection: RedisConnection) -> None:
        pattern = remote_name(self._folder, b"", 0).split(b"::")[0] + b":*"
        cursor = b"0"
        while True:
            reply = connection.call(
                self._seconds, b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _SCAN_COUNT
            )
            if not isinstance(reply, list) or len(reply) != 2 or not isinstance(reply[1], list):
                raise TokendError("SCAN was answered with something else")
            names = [each for each in reply[1] if isinstance(each, bytes)]
            if names:
                connection.call(self._seconds, b"UNLINK", *names)
            cursor = reply[0] if isinstance(reply[0], bytes) else b"0"
            if cursor == b"0":
                return

    def _answer(self, answers: Sequence[Answer]) -> None:
        with self._changed:
            answered = {each.key for each in answers}
            self._questions = [each for each in self._questions if each not in answered]
            self._answers += answers
        self._ring()

    def _lost(self, error: Exception) -> None:
        """Nobody waits for what cannot be told now."""
        self._breaker.record_failure()
        if not self._complained:
            self._complained = True
            unexpected = not isinstance(error, TokendError)
            logger.warning("remote: %s; it is left alone for a while", error, exc_info=unexpected)
        with self._changed:
            self._connected = False
            asked = list(dict.fromkeys(self._questions))
        self._answer([Answer(key, False) for key in asked])

    def _say(self, what: str) -> None:
        if self._complained:
            self._complained = False
            logger.info("remote: %s: %s", self._address, what)

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, seconds)
