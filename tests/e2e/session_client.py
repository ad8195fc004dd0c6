"""A client of /v1/sessions of a real daemon."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from tests.e2e.daemon import Daemon

TEXTS = [
    "The old harbour of the town lies behind a wall of black stone, and every evening",
    " But when the fog came in that year, nobody could see the lamp any more, so the people",
    " In the morning",
]
FIELDS = {"max_tokens": 20, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@asynccontextmanager
async def opened(daemon: Daemon) -> AsyncIterator[ClientConnection]:
    async with connect(daemon.url.replace("http", "ws", 1) + "/v1/sessions") as client:
        yield client


async def send(client: ClientConnection, kind: str, **fields: Any) -> None:
    await client.send(json.dumps({"type": kind, **fields}))


async def choice(client: ClientConnection) -> dict[str, Any]:
    """Read the choice of the next chunk."""
    chunk = json.loads(await asyncio.wait_for(client.recv(), 60))
    assert "error" not in chunk, chunk
    found: dict[str, Any] = chunk["choices"][0]
    return found


async def turn(
    client: ClientConnection, first: dict[str, Any] | None = None
) -> tuple[list[int], list[int]]:
    """Prompt and output of the next turn, or of the turn whose first chunk is given."""
    choices = [first or await choice(client)]
    while choices[-1]["finish_reason"] is None:
        choices.append(await choice(client))
    return choices[0]["prompt_token_ids"], [token for c in choices for token in c["token_ids"]]


def merged(chunks: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """The whole prompt of every turn: the last output token of a turn is dropped."""
    prompts: list[list[int]] = []
    so_far: list[int] = []
    for chunk, output in zip(chunks, outputs, strict=True):
        prompts.append([*so_far, *chunk])
        so_far = [*prompts[-1], *output[:-1]]
    return prompts
