"""Clients that connect, ask, and leave before they have an answer."""

import asyncio
import contextlib
import itertools
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from deploy.loadtest.overload.offers import Recipe

RESET_WHEN_CLOSED: Final = struct.pack("ii", 1, 0)


async def churn(
    url: str,
    recipe: Recipe,
    per_second: float,
    longest_stay: float,
    over: Callable[[], bool],
    seed: int = 0,
) -> int:
    """At this rate until `over`; returns how many came.

    longest_stay: seconds; each stays for a time of its own up to that, once it has asked.
    """
    rng = random.Random(seed)
    started = time.monotonic()
    tasks: set[asyncio.Task[None]] = set()
    for number in itertools.count():
        await asyncio.sleep(started + number / per_second - time.monotonic())
        if over():
            await asyncio.gather(*tasks)
            return number
        stay = rng.uniform(0.0, longest_stay)
        task = asyncio.create_task(_come_and_go(url, recipe, rng, stay))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    raise AssertionError("unreachable")


async def _come_and_go(url: str, recipe: Recipe, rng: random.Random, seconds: float) -> None:
    address = urlsplit(url)
    content = json.dumps(recipe.body(rng)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as client, contextlib.suppress(ConnectionError):
        client.setblocking(False)
        await loop.sock_connect(client, (address.hostname, address.port))
        await loop.sock_sendall(client, head.encode() + content)
        await asyncio.sleep(seconds)
        if rng.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_WHEN_CLOSED)
