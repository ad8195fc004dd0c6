"""Policies by which turns find an engine: the router, and formulas of other projects."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final

from api_server.engine.router import EngineLoad, PrefixIndex, RoutedRequest, Router
from tests.benchmarks.fleet.traffic import BLOCK_SIZE, TurnRequest

ROUTER: Final = "router"


@dataclass(frozen=True)
class Fleet:
    """What a policy knows of its engines. clock: seconds. rate: tokens of prompts in a second."""

    num_engines: int
    num_blocks: int
    rate: float
    clock: Callable[[], float]
    seed: int = 0


class Policy:
    """Chooses the engine of each turn, and hears of what becomes of it; the base keeps nothing.

    names_sessions: whether agents' clients name their sessions.
    """

    names_sessions = True

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._rng = random.Random(fleet.seed)

    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        raise NotImplementedError

    def note_sent(self, turn: TurnRequest, request: RoutedRequest) -> None:
        """The turn was sent to its engine."""
        return None

    def note_token(self, turn: TurnRequest) -> None:
        """The turn has its first token."""
        return None

    def note_finished(self, turn: TurnRequest) -> None:
        return None

    def note_load(self, engine: int, load: EngineLoad) -> None:
        """An engine has reported statistics."""
        return None

    def lowest(self, costs: Sequence[float]) -> int:
        """Return the engine of the lowest cost, by chance one of several."""
        least = min(costs)
        if costs.count(least) == 1:
            return costs.index(least)
        return self._rng.choice([index for index, cost in enumerate(costs) if cost == least])


class ByRouter(Policy):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.router = Router(fleet.num_engines, fleet.clock)
        self._usable = range(fleet.num_engines)
        for engine in self._usable:
            self.router.note_up(engine, BLOCK_SIZE, fleet.num_blocks)

    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        return self.router.choose(request, self._usable)

    def note_sent(self, turn: TurnRequest, request: RoutedRequest) -> None:
        self.router.note_sent(request, turn.engine)

    def note_token(self, turn: TurnRequest) -> None:
        self.router.note_token(turn.request_id)

    def note_finished(self, turn: TurnRequest) -> None:
        self.router.note_finished(turn.request_id)

    def note_load(self, engine: int, load: EngineLoad) -> None:
        self.router.note_load(engine, load)


class ByRouterUnnamed(ByRouter):
    names_sessions = False


class RoundRobin(Policy):
    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        return turn.request_id % self.fleet.num_engines


class LeastLoad(Policy):
    """The balancer of vLLM 0.33, with one client.

    load = max(own requests in flight, waiting + running) + 6 · waiting · max(0, KV usage - 0.5)
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._num_open = [0] * fleet.num_engines
        self._loads = [EngineLoad()] * fleet.num_engines

    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        return self.lowest(list(map(vllm_load, self._num_open, self._loads)))

    def note_sent(self, turn: TurnRequest, request: RoutedRequest) -> None:
        self._num_open[turn.engine] += 1

    def note_finished(self, turn: TurnRequest) -> None:
        self._num_open[turn.engine] -= 1

    def note_load(self, engine: int, load: EngineLoad) -> None:
        self._loads[engine] = load


def vllm_load(num_open: int, load: EngineLoad) -> float:
    pressure = 6 * load.num_waiting * max(0.0, load.kv_usage - 0.5)
    return max(num_open, load.num_waiting + load.num_running) + pressure


class ByPrefixes(Policy):
    """Knows which prefixes it sent where, as the router does, and what is computed of prompts.

    uncached: by engine, tokens of prompts without a first token that were not cached.
    """

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.uncached = [0.0] * fleet.num_engines
        self._index = PrefixIndex(fleet.num_engines)
        self._sent: dict[int, float] = {}

    def cached(self, request: RoutedRequest) -> dict[int, float]:
        """Return the leading tokens of a prompt that each engine has, if it has some."""
        return self._index.tokens(request.keys, BLOCK_SIZE)

    def note_sent(self, turn: TurnRequest, request: RoutedRequest) -> None:
        known = self._index.tokens_of(turn.engine, request.keys, BLOCK_SIZE)
        self._sent[turn.request_id] = turn.num_tokens - known
        self.uncached[turn.engine] += turn.num_tokens - known
        fleet = self.fleet
        self._index.add(turn.engine, request.keys, fleet.num_blocks, fleet.clock())

    def note_token(self, turn: TurnRequest) -> None:
        self.uncached[turn.engine] -= self._sent.pop(turn.request_id)


class LlmD(ByPrefixes):
    """llm-d's prefix-cache-affinity-filter, then its token-load-scorer; the highest score wins.

    Engines that have AFFINE_SHARE of the prompt are the only candidates, but for one decision of a
    hundred, and unless the least loaded of them would need LONGEST_PENALTY seconds more for its
    uncached tokens than the least loaded of the others.
    """

    AFFINE_SHARE: Final = 0.8
    EXPLORATION: Final = 0.01
    LONGEST_PENALTY: Final = 5.0

    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        cached, uncached, number = self.cached(request), self.uncached, turn.num_tokens
        affine = {index for index, tokens in cached.items() if tokens >= self.AFFINE_SHARE * number}
        if affine and self._rng.random() >= self.EXPLORATION:
            others = [tokens for index, tokens in enumerate(uncached) if index not in affine]
            least = min(uncached[index] for index in affine)
            if not others or (least - min(others)) / self.fleet.rate <= self.LONGEST_PENALTY:
                costs = {
                    index: -llm_d_score(uncached[index] + number - cached[index])
                    for index in affine
                }
                return list(costs)[self.lowest(list(costs.values()))]
        costs_of_all = [-llm_d_score(tokens + number) for tokens in uncached]
        for index, tokens in cached.items():
            costs_of_all[index] = -llm_d_score(uncached[index] + number - tokens)
        return self.lowest(costs_of_all)


def llm_d_score(num_uncached: float) -> float:
    """Return the score of llm-d's token-load-scorer, 0 to 1."""
    return 1.0 - min(1.0, num_uncached / 4_194_304)


class Dynamo(ByPrefixes):
    """The KV router of Dynamo 1.6, with its defaults; the lowest cost wins."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._active = [0] * fleet.num_engines  # blocks of open requests
        self._users: dict[int, dict[int, list[int]]] = {}  # chain → engine → requests, blocks

    def choose(self, turn: TurnRequest, request: RoutedRequest) -> int:
        number, num_blocks = turn.num_tokens, ceil(turn.num_tokens / BLOCK_SIZE)
        costs = [
            dynamo_cost(tokens, number, 0, blocks + num_blocks)
            for tokens, blocks in zip(self.uncached, self._active, strict=True)
        ]
        for index, tokens in self.cached(request).items():
            blocks = self._active[index] + num_blocks
            costs[index] = dynamo_cost(self.uncached[index], number, tokens, blocks)
        for chain, blocks in turn.session.shared:
            for index in self._users.get(chain, ()):
                costs[index] -= blocks
        return self.lowest(costs)

    def note_sent(self, turn: TurnRequest, request: RoutedRequest) -> None:
        super().note_sent(turn, request)
        session = turn.session
        own = ceil(turn.num_tokens / BLOCK_SIZE) - session.num_shared
        for chain, blocks in (*session.shared, (session.chain, own)):
            users = self._users.setdefault(chain, {}).setdefault(turn.engine, [0, blocks])
            if not users[0]:
                self._active[turn.engine] += blocks
            users[0] += 1

    def note_finished(self, turn: TurnRequest) -> None:
        session = turn.session
        for chain in (*(chain for chain, _ in session.shared), session.chain):
            users = self._users[chain][turn.engine]
            users[0] -= 1
            if not users[0]:
                self._active[turn.engine] -= users[1]
                del self._users[chain][turn.engine]
                if not self._users[chain]:
                    del self._users[chain]


def dynamo_cost(
    num_uncached: float, num_prompt: int, num_cached: float, num_active_blocks: int
) -> float:
    """Return the cost of an engine in blocks.

    num_uncached: prompt tokens that it computes for others. num_active_blocks: of its open
    requests, the new one included.
    """
    return max(0.0, num_uncached + num_prompt - num_cached) / BLOCK_SIZE + num_active_blocks


POLICIES: Final[dict[str, type[Policy]]] = {
    ROUTER: ByRouter,
    "router, unnamed": ByRouterUnnamed,
    "round robin": RoundRobin,
    "least load": LeastLoad,
    "llm-d": LlmD,
    "Dynamo": Dynamo,
}
