"""One streamed completion as its client sees it, token by token.

Owns what has arrived. A status, an error event, an end without [DONE] or without a finish
reason for each choice is an exception: nothing that looks like a failure is passed over.
"""

import asyncio
import json
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

import httpx

from proto.errors import TokendError

PATH = "/v1/completions"


class BrokenStreamError(TokendError):
    """The stream is not what a stream must be."""


@dataclass(eq=False)
class Stream:
    """body: of the request, without what makes it a stream; it must ask for token ids.

    choices: token ids by number. reasons: why each choice ended. moments: monotonic
    seconds at which tokens came.
    """

    body: dict[str, Any]
    choices: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    prompt_token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    over: bool = False
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.choices.values()))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def mid_generation(self) -> bool:
        """It has tokens and is to get more."""
        return self.num_tokens > 0 and len(self.reasons) < self.num_choices and not self.over

    def heard_after(self, moment: float) -> float | None:
        """When the first token after a moment came; None as long as there is none."""
        place = bisect_right(self.moments, moment)
        return self.moments[place] if place < len(self.moments) else None

    async def run(self, client: httpx.AsyncClient) -> "Stream":
        """Until its end; raises BrokenStreamError or httpx.HTTPError."""
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        done = False
        try:
            async with client.stream("POST", PATH, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise BrokenStreamError(f"status {response.status_code}: {text[:500]}")
                async for line in response.aiter_lines():
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        await self._take(json.loads(line.removeprefix("data: ")))
        finally:
            await self._end()
        if not done or len(self.reasons) != self.num_choices:
            raise BrokenStreamError(f"it ended early: [DONE] {done}, reasons {self.reasons}")
        return self

    async def reach(self, num_tokens: int) -> None:
        """Wait until it has so many tokens, or is over."""
        async with self.moved:
            await self.moved.wait_for(lambda: self.over or self.num_tokens >= num_tokens)

    async def _end(self) -> None:
        async with self.moved:
            self.over = True
            self.moved.notify_all()

    async def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            raise BrokenStreamError(f"an error event: {event['error']}")
        self.usage = event.get("usage") or self.usage
        async with self.moved:
            for choice in event["choices"]:
                self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
                tokens = self.choices.setdefault(choice["index"], [])
                if choice["token_ids"]:
                    tokens += choice["token_ids"]
                    self.moments.append(time.monotonic())
                if choice["finish_reason"]:
                    self.reasons[choice["index"]] = choice["finish_reason"]
            self.moved.notify_all()
