"""A supervisor that records what an API server sends, and sends no commands."""

import asyncio

from api_server.lifecycle.supervisor_link import SupervisorLink
from proto.codec import Message


class FakeSupervisor(SupervisorLink):
    """sent: the messages of the API server, in order."""

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.sent: asyncio.Queue[Message] = asyncio.Queue()

    def send(self, message: Message) -> None:
        self.sent.put_nowait(message)
