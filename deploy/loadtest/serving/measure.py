"""One run against one server, from nothing: its connections begin and end with it."""

import asyncio
import itertools
from dataclasses import dataclass

from deploy.loadtest.datasets.material import Material
from deploy.loadtest.datasets.random_prompts import RandomPrompts
from deploy.loadtest.datasets.sessions import Dataset, Draws, Sizes
from deploy.loadtest.openai.client import Client, Target
from deploy.loadtest.serving.play import NobodyWatches, Pace, Played, play
from deploy.loadtest.serving.progress import NoScreen, Screen
from proto.errors import TokendError

_WARM_UP: int = 64
_WARM_UP_OUTPUT: int = 16


@dataclass(frozen=True)
class Run:
    """What to do: these sessions at this pace. name: for people."""

    name: str
    dataset: Dataset
    draws: Draws
    pace: Pace


def measure(target: Target, run: Run, screen: Screen | None = None) -> Played:
    """Do it. Requests that fail are part of what came of it."""
    return asyncio.run(_measure(target, run, screen or NoScreen()))


async def _measure(target: Target, run: Run, screen: Screen) -> Played:
    client = Client(target)
    try:
        async with screen.watching(run.name, run.pace) as watcher:
            return await play(client, run.dataset.sessions(run.draws), run.pace, watcher)
    finally:
        client.close()


def warm_up(target: Target, material: Material, number: int, *, chat: bool = False) -> None:
    """So many short requests at once; raises TokendError when one of them fails."""
    if not number:
        return
    dataset = RandomPrompts(Sizes(_WARM_UP, _WARM_UP_OUTPUT), material, chat)
    pace = Pace(concurrency=number, max_requests=number)
    played = measure(target, Run("warm-up", dataset, Draws(seed=-1), pace))
    for exchange in played.exchanges:
        if exchange.error:
            raise TokendError(f"{target.url} does not answer as it should: {exchange.error}")


def first_token(target: Target, material: Material, seed: int) -> float:
    """Monotonic seconds at which the first token of a short request came; raises TokendError."""
    return asyncio.run(_first_token(target, material, seed))


async def _first_token(target: Target, material: Material, seed: int) -> float:
    client = Client(target)
    try:
        dataset = RandomPrompts(Sizes(_WARM_UP, 1), material)
        sessions = itertools.islice(dataset.sessions(Draws(seed)), 1)
        played = await play(client, sessions, Pace(concurrency=1), NobodyWatches())
    finally:
        client.close()
    (exchange,) = played.exchanges
    if exchange.error:
        raise TokendError(f"{target.url}: {exchange.error}")
    return exchange.first
