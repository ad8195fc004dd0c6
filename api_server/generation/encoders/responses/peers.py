"""The front ends of a daemon as each other's peers: a response stays where it was generated.

    GET /v1/responses/resp_2_5f0c… ──▶ front end 0 ──PeerCall──▶ front end 2
                                   ◀──             ◀──PeerReply──

With several front ends, the id of a response names the one that keeps it. A connection may reach
any of them, so the others ask that one. The id of an item names none, so all are asked.
"""

import asyncio
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Final, Literal

from api_server.engine.async_link import AsyncLink
from api_server.generation.encoders.base import json_parts
from api_server.generation.encoders.responses.stored import Json, Owner, StoredResponses
from api_server.turns import INLINE_BYTES, run_in_turn
from proto.errors import OverloadedError
from proto.messages.engine_io import request_ids
from proto.messages.lifecycle import ProcessBoot
from proto.messages.peer_io import PeerCall, PeerMessage, PeerOperation, PeerReply
from proto.runtime.sockets import Link, PeerStalledError, peer_path

logger = logging.getLogger("tokend.api")

ID_PREFIX: Final = "resp_"
PEER_SECONDS: Final = 10.0
"""Longest wait for a peer; one that died is started again, without its responses, before that."""
SLICE_BYTES: Final = 1 << 16
"""Of a result, that are made in a turn of the event loop."""
_PEER_ID: Final = re.compile(rf"{ID_PREFIX}([0-9]{{1,3}})_[!-~]+")


class FrontEndPeers:
    """Runs operations on responses, here or in the front end that keeps them."""

    def __init__(self, boot: ProcessBoot, responses: StoredResponses) -> None:
        self._responses = responses
        number = boot.config.frontend.api_server_count
        self.id_prefix = ID_PREFIX if number == 1 else f"{ID_PREFIX}{boot.index}_"
        self._links = {
            peer: AsyncLink(_open_link(boot.run_dir, boot.index, peer))
            for peer in range(number)
            if peer != boot.index
        }
        self._call_ids = request_ids(boot.index, boot.incarnation)
        self._replies: dict[int, asyncio.Future[tuple[bytes, ...] | None]] = {}
        self._answers = set[asyncio.Task[None]]()

    async def run(self) -> None:
        """Answer the peers until cancelled."""
        await asyncio.gather(*(self._process_messages(link) for link in self._links.values()))

    def close(self) -> None:
        for answer in self._answers:
            answer.cancel()
        for link in self._links.values():
            link.close()

    async def read_response(
        self, operation: Literal["get", "cancel"], owner: Owner, response_id: str
    ) -> Iterator[str] | None:
        """Return the JSON of a response in parts, wherever it is kept; None if there is none.

        Raises OverloadedError if the front end that keeps it does not answer.
        """
        link = self._link_of(response_id)
        if link is None:
            response = self._responses.run_operation(operation, owner, response_id)
            return None if response is None else json_parts(response)
        pieces = await self._call(link, operation, owner, (response_id,))
        return None if pieces is None else map(bytes.decode, pieces)

    async def read_items(
        self, operation: Literal["input_items", "conversation"], owner: Owner, response_id: str
    ) -> list[Json] | None:
        """Return the items of such an operation; errors and None as of `read_response`."""
        link = self._link_of(response_id)
        if link is None:
            items: list[Json] | None
            items = self._responses.run_operation(operation, owner, response_id)
            return items
        texts = await self._call(link, operation, owner, (response_id,))
        return None if texts is None else await _decoded(texts)

    async def delete_response(self, owner: Owner, response_id: str) -> bool:
        """Delete a response; return False if there is none. Errors as of `read_response`."""
        link = self._link_of(response_id)
        if link is None:
            return bool(self._responses.run_operation("delete", owner, response_id))
        return await self._call(link, "delete", owner, (response_id,)) is not None

    def _link_of(self, response_id: str) -> AsyncLink | None:
        """Return the link to the front end that keeps a response; None if it is this one."""
        found = _PEER_ID.fullmatch(response_id)
        return None if found is None else self._links.get(int(found.group(1)))

    async def find_items(self, owner: Owner, item_ids: Collection[str]) -> dict[str, Json]:
        """Return the items of a client's stored responses that have these ids, by their ids.

        Those that are not here are asked of all other front ends at once. Raises OverloadedError
        if one of them does not answer.
        """
        found = self._responses.find_items(owner, item_ids)
        missing = tuple(item_id for item_id in item_ids if item_id not in found)
        if missing:
            calls = (
                self._call(link, "find_items", owner, missing) for link in self._links.values()
            )
            for texts in await asyncio.gather(*calls):
                found |= {item["id"]: item for item in await _decoded(texts or ())}
        return found

    async def _call(
        self, link: AsyncLink, operation: PeerOperation, owner: Owner, ids: tuple[str, ...]
    ) -> tuple[bytes, ...] | None:
        """Return the result of an operation in another front end."""
        call_id = next(self._call_ids)
        reply: asyncio.Future[tuple[bytes, ...] | None]
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        try:
            link.send(PeerCall(call_id, operation, *owner, ids))
            async with asyncio.timeout(PEER_SECONDS):
                return await reply
        except (TimeoutError, PeerStalledError):
            raise OverloadedError("the front end that keeps the response does not answer") from None
        finally:
            del self._replies[call_id]

    async def _process_messages(self, link: AsyncLink) -> None:
        while True:
            for message in await link.receive():
                if isinstance(message, PeerCall):
                    answer = asyncio.create_task(self._answer(link, message))
                    self._answers.add(answer)
                    answer.add_done_callback(self._answers.discard)
                elif (reply := self._replies.get(message.call_id)) and not reply.done():
                    reply.set_result(message.result)

    async def _answer(self, link: AsyncLink, call: PeerCall) -> None:
        try:
            link.send(PeerReply(call.call_id, await self._result(call)))
        except Exception:  # the peer answers its client when its time limit has passed
            logger.exception("a call of another front end failed: %s", call.operation)

    async def _result(self, call: PeerCall) -> tuple[bytes, ...] | None:
        """Do an operation for a peer, a part of a large result in each turn of the event loop."""
        owner, operation = (call.tenant, call.key_name), call.operation
        if operation == "find_items":
            items = list(self._responses.find_items(owner, call.ids).values())
            return await _encoded(map(json_parts, items))
        found = self._responses.run_operation(operation, owner, call.ids[0])
        if found is None:
            return None
        if operation in ("get", "cancel"):
            return await _encoded([part] for part in json_parts(found))
        return await _encoded(map(json_parts, found if operation != "delete" else ()))


async def _encoded(texts: Iterable[Iterable[str]]) -> tuple[bytes, ...]:
    """Return texts in UTF-8 that are given in parts; others get their turn in between."""
    encoded, size = [], 0
    for parts in texts:
        pieces = []
        for part in parts:
            pieces.append(part.encode())
            size += len(part)
            if size > SLICE_BYTES:
                size = 0
                await asyncio.sleep(0)
        encoded.append(b"".join(pieces))
    return tuple(encoded)


async def _decoded(texts: Sequence[bytes]) -> list[Any]:
    """Return the values of texts in JSON, on a thread if they are many or long.

    Each is at most as long as a body; between two of them other threads can run.
    """

    def decode() -> list[Any]:
        return [json.loads(text) for text in texts]

    is_large = sum(map(len, texts)) > INLINE_BYTES
    return await run_in_turn(decode) if is_large else decode()


def _open_link(run_dir: str, index: int, peer: int) -> Link:
    path = peer_path(run_dir, index, peer)
    return (Link.bind if index < peer else Link.connect)(path, PeerMessage)
