"""The events of the live view, as bytes of a stream: hello, view, notice.

Owns their form. What a watcher may know of a request is decided here: with the tenant's own
requests come id and counts, with those of others the state and the number of blocks, which the
map shows anyway.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from proto.codec import to_compact_json
from proto.lifecycle import EngineReady
from proto.view import REQUEST_STATES, BlockMap, EngineView, RequestView, blocks_per_cell

NoticeKind = Literal["preemption", "restart", "watchdog", "reload", "drain"]


LEAST_SECONDS: Final = 0.1
"""Between two views whose counts make a rate: the first one may come at once."""


@dataclass(frozen=True, slots=True)
class SubscriberScope:
    """What a subscriber may see. reader: see `reader_of`. sees_all: it is an operator."""

    reader: int
    sees_all: bool = False


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What is the same in every hello of a daemon. max_num_seqs: that run at once."""

    model: str
    version: str
    max_num_seqs: int


def hello_event(around: ServerInfo, engine: EngineReady) -> bytes:
    """What the views that follow are of."""
    num_blocks = engine.num_blocks + 1  # block 0, which no request can use, is shown as well
    hello = {
        "model": around.model,
        "version": around.version,
        "num_blocks": num_blocks,
        "block_size": engine.block_size,
        "blocks_per_cell": blocks_per_cell(num_blocks),
        "max_num_seqs": around.max_num_seqs,
        "max_model_len": engine.max_model_len,
    }
    return _event(b"hello", to_compact_json(hello))


def notice_event(time_s: float, kind: NoticeKind, text: str) -> bytes:
    """Something that happened. time_s: as in views."""
    return _event(
        b"notice", to_compact_json({"time_s": round(time_s, 3), "kind": kind, "text": text})
    )


class ShownView:
    """One view, put into words once for each kind of watcher. time_s: since the feed began."""

    def __init__(self, view: EngineView, time_s: float) -> None:
        self._view = view
        self._time_s = time_s
        self._cells = to_compact_json(cells_of(view.blocks))
        self._events: dict[SubscriberScope, bytes] = {}

    def event(self, watching: SubscriberScope) -> bytes:
        """As this one may see it."""
        event = self._events.get(watching)
        if event is None:
            event = self._events[watching] = self._make(watching)
        return event

    def _make(self, watching: SubscriberScope) -> bytes:
        view = self._view
        facts: dict[str, Any] = {
            "time_s": round(self._time_s, 3),
            "step": view.step,
            "running": view.num_running,
            "waiting": view.num_waiting,
            "prompt_tokens_per_s": rate(view.prompt_tokens, view.seconds),
            "generation_tokens_per_s": rate(view.generation_tokens, view.seconds),
            "queried_tokens": view.queried_tokens,
            "found_tokens": view.found_tokens,
            "preemptions": view.preemptions,
            "requests": [
                request_of(each, own=watching.sees_all or each.reader == watching.reader)
                for each in view.requests
            ],
            "more_requests": view.more_requests,
        }
        return _event(b"view", to_compact_json(facts)[:-1] + b',"cells":' + self._cells + b"}")


def request_of(request: RequestView, *, own: bool) -> dict[str, Any]:
    """A request as its tenant sees it, or as others do: without id and counts."""
    return {
        "owner": request.owner,
        "id": (request.label or None) if own else None,
        "state": REQUEST_STATES[request.state],
        "prompt_tokens": request.prompt_tokens if own else None,
        "output_tokens": request.output_tokens if own else None,
        "computed_tokens": request.computed_tokens if own else None,
        "cached_tokens": request.cached_tokens if own else None,
        "num_blocks": request.num_blocks,
    }


def cells_of(blocks: BlockMap) -> list[list[int]]:
    """[length, state, owner] for each run."""
    columns = (
        np.frombuffer(blocks.lengths, "<i4"),
        np.frombuffer(blocks.states, np.uint8),
        np.frombuffer(blocks.owners, "<i4"),
    )
    cells: list[list[int]] = np.stack(columns, axis=1).tolist()
    return cells


def rate(number: int, seconds: float) -> float:
    """A second; 0 after so short a time that one step would be a rate of thousands."""
    return round(number / seconds, 1) if seconds >= LEAST_SECONDS else 0.0


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"


COMMENT: Final = b": keep-alive\n\n"
"""For a stream that has nothing to say; clients skip it."""
