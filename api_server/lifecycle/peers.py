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
from collections.abc import Collection
from typing import Any, Final

from api_server.lifecycle.async_link import AsyncLink
from api_server.protocol.responses.stored import Json, Owner, StoredResponses
from proto.engine_io import request_ids
from proto.errors import OverloadedError
from proto.lifecycle import ProcessBoot
from proto.peer_io import PeerCall, PeerMessage, PeerOperation, PeerReply, ResponseOperation
from proto.sockets import Link, PeerStalledError, peer_path

logger = logging.getLogger("tokend.api")

ID_PREFIX: Final = "resp_"
PEER_SECONDS: Final = 10.0
"""Longest wait for a peer; one that died is started again, without its responses, before that."""
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
        self._replies: dict[int, asyncio.Future[bytes | None]] = {}

    async def run(self) -> None:
        """Answer the peers until cancelled."""
        await asyncio.gather(*(self._process_messages(link) for link in self._links.values()))

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    async def run_operation(
        self, operation: ResponseOperation, owner: Owner, response_id: str
    ) -> Any | None:
        """Return the result of `StoredResponses.run_operation` where the response is kept.

        Raises OverloadedError if that front end does not answer.
        """
        found = _PEER_ID.fullmatch(response_id)
        link = None if found is None else self._links.get(int(found.group(1)))
        if link is None:
            return self._responses.run_operation(operation, owner, response_id)
        return await self._call(link, operation, owner, (response_id,))

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
            for items in await asyncio.gather(*calls):
                found |= items
        return found

    async def _call(
        self, link: AsyncLink, operation: PeerOperation, owner: Owner, ids: tuple[str, ...]
    ) -> Any:
        """Return the decoded result of an operation in another front end."""
        call_id = next(self._call_ids)
        reply = self._replies[call_id] = asyncio.get_running_loop().create_future()
        try:
            link.send(PeerCall(call_id, operation, *owner, ids))
            async with asyncio.timeout(PEER_SECONDS):
                result = await reply
        except (TimeoutError, PeerStalledError):
            raise OverloadedError("the front end that keeps the response does not answer") from None
        finally:
            del self._replies[call_id]
        return None if result is None else json.loads(result)

    async def _process_messages(self, link: AsyncLink) -> None:
        while True:
            for message in await link.receive():
                if isinstance(message, PeerCall):
                    self._answer(link, message)
                elif (reply := self._replies.get(message.call_id)) and not reply.done():
                    reply.set_result(message.result)

    def _answer(self, link: AsyncLink, call: PeerCall) -> None:
        owner = (call.tenant, call.key_name)
        try:
            found = (
                self._responses.find_items(owner, call.ids)
                if call.operation == "find_items"
                else self._responses.run_operation(call.operation, owner, call.ids[0])
            )
            result = None if found is None else json.dumps(found).encode()
            link.send(PeerReply(call.call_id, result))
        except Exception:  # the peer answers its client when its time limit has passed
            logger.exception("a call of another front end failed: %s", call.operation)


def _open_link(run_dir: str, index: int, peer: int) -> Link:
    path = peer_path(run_dir, index, peer)
    return (Link.bind if index < peer else Link.connect)(path, PeerMessage)
