"""A fake OpenAI-compatible server in a thread, whose response bodies a test provides in chunks.

A chunk is sent as a separate HTTP chunk. All requests are recorded.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

Respond = Callable[[str, dict[str, Any]], Iterable[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(path: str, text: str, last: bool = False) -> bytes:
    """Return the event of one token."""
    reason = "length" if last else None
    content = {"delta": {"content": text}} if "chat" in path else {"text": text}
    return event(choices=[{"index": 0, "finish_reason": reason, **content}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event(choices=[], usage=counts)


def num_input_tokens(body: dict[str, Any]) -> int:
    """Return the number of token ids or words of the prompt."""
    if "messages" in body:
        return sum(len(each["content"].split()) for each in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


def respond_normally(path: str, body: dict[str, Any]) -> Iterable[bytes]:
    """Yield max_tokens tokens, which depend only on the end of the prompt."""
    number = body["max_tokens"]
    asked = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
    for place in range(number):
        yield token(path, f"<{str(asked)[-3:]}{place}>", place == number - 1)
    yield usage(num_input_tokens(body), number)
    yield b"data: [DONE]\n\n"


@dataclass
class FakeOpenAI:
    """seen, heads: (path, body) and the head of every request. num_connections: accepted ones.

    close_after: number of answers after which a connection is closed; 0 means never.
    """

    respond: Respond = respond_normally
    url: str = ""
    num_connections: int = 0
    close_after: int = 0
    seen: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for number in itertools.count(1):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                await self._answer(head, reader, writer)
                if number == self.close_after:
                    break
        writer.close()

    async def _answer(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            content = json.dumps({"data": [{"id": "fake"}]}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
            return
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        self.seen.append((path, body))
        self.heads.append(head)
        writer.write(HEAD)
        for piece in self.respond(path, body):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async def serve(self, listener: socket.socket, stopped: asyncio.Event) -> None:
        """Serve until `stopped` is set; then cancel open requests."""
        # uvloop does this; asyncio's loop would wait 40 ms for an acknowledgement
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        server = await asyncio.start_server(self._serve, sock=listener)
        await stopped.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


@contextlib.contextmanager
def fake_openai(respond: Respond = respond_normally) -> Iterator[FakeOpenAI]:
    """Run a local server inside the context."""
    fake = FakeOpenAI(respond)
    listener = socket.create_server(("127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    loop, stopped = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(
        target=asyncio.Runner(loop_factory=lambda: loop).run, args=(fake.serve(listener, stopped),)
    )
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join()
        loop.close()
