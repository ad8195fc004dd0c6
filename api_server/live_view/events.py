"""The events of the live view as server-sent events: hello, view, notice.

What a subscriber may see of a request is decided here: id and counts of its own tenant's requests;
of other requests only the state and the number of blocks, which the block map shows anyway.
"""

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from proto.codec import to_compact_json
from proto.messages.lifecycle import EngineReady
from proto.messages.view import (
    ADAPTER_STATES,
    REQUEST_STATES,
    BlockMap,
    EngineView,
    RequestView,
    blocks_per_cell,
)
from proto.settings.lora_modules import LoRAAccess

NoticeKind = Literal["preemption", "restart", "watchdog", "reload", "drain"]


MIN_RATE_SECONDS: Final = 0.1
"""Shortest interval between two views that gives a rate; in a shorter one, a single step would
appear as thousands of tokens per second."""


@dataclass(frozen=True, slots=True)
class SubscriberScope:
    """What a subscriber may see.

    reader: its id from `reader_of`. sees_all: it is an operator. key_name: of its API key.
    engine: index of the engine that it sees.
    """

    reader: int
    sees_all: bool = False
    key_name: str = ""
    engine: int = 0


def hello_event(
    model: str,
    version: str,
    max_num_seqs: int,
    engine: EngineReady,
    index: int = 0,
    num_engines: int = 1,
) -> bytes:
    """Return the event with the properties of daemon and engine, which precedes their views.

    max_num_seqs: most running requests. index: of the engine, one of num_engines.
    """
    hello = {
        "model": model,
        "version": version,
        "num_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "blocks_per_cell": blocks_per_cell(engine.num_blocks + 1),  # block 0, reserved, is shown
        "max_num_seqs": max_num_seqs,
        "max_model_len": engine.max_model_len,
        "engine": index,
        "num_engines": num_engines,
    }
    return _event(b"hello", to_compact_json(hello))


def notice_event(time_s: float, kind: NoticeKind, text: str) -> bytes:
    """Return the event of something that happened. time_s: as in views."""
    return _event(
        b"notice", to_compact_json({"time_s": round(time_s, 3), "kind": kind, "text": text})
    )


class EncodedView:
    """One view, to be encoded for each scope.

    time_s: seconds since the server started. access: to adapters.
    """

    def __init__(self, view: EngineView, time_s: float, access: LoRAAccess) -> None:
        self._access = access
        self._view = view
        self._time_s = time_s
        self._cells = b',"cells":' + to_compact_json(cells_of(view.blocks))
        if view.num_state_slots:
            self._cells += b',"state_cells":' + to_compact_json(cells_of(view.states))

    def event_for(self, scope: SubscriberScope) -> bytes:
        """Return the event with what subscribers of this scope may see."""
        view = self._view
        fields: dict[str, Any] = {
            "time_s": round(self._time_s, 3),
            "step": view.step,
            "running": view.num_running,
            "waiting": view.num_waiting,
            "prompt_tokens_per_s": rate(view.prompt_tokens, view.seconds),
            "generation_tokens_per_s": rate(view.generation_tokens, view.seconds),
            "prefix_cache_queries": view.queried_tokens,
            "prefix_cache_hits": view.found_tokens,
            "preemptions": view.preemptions,
            "drafts": view.num_drafts,
            "draft_tokens": view.draft_tokens,
            "accepted_tokens": view.accepted_tokens,
            "state_slots": view.num_state_slots,
            "held_states": view.num_held_states,
            "step_limit": view.step_limit,
            "tiers": [
                {"medium": tier.medium, "blocks": tier.num_blocks, "used": tier.num_used}
                for tier in view.tiers
            ],
            "requests": [
                request_fields(request, is_visible=scope.sees_all or request.reader == scope.reader)
                for request in view.requests
            ],
            "num_omitted_requests": view.more_requests,
            "adapters": [
                {
                    "name": adapter.name,
                    "state": ADAPTER_STATES[adapter.state],
                    "running": adapter.num_running,
                    "requests": adapter.num_unfinished,
                    "bytes": adapter.num_bytes,
                }
                for adapter in view.adapters
                if scope.sees_all or self._access.allows(adapter.name, scope.key_name)
            ],
        }
        return _event(b"view", to_compact_json(fields)[:-1] + self._cells + b"}")


def request_fields(request: RequestView, *, is_visible: bool) -> dict[str, Any]:
    """Return the JSON fields of a request. is_visible: the subscriber may see id and counts."""
    return {
        "owner": request.owner,
        "id": (request.label or None) if is_visible else None,
        "state": REQUEST_STATES[request.state],
        "prompt_tokens": request.prompt_tokens if is_visible else None,
        "output_tokens": request.output_tokens if is_visible else None,
        "computed_tokens": request.computed_tokens if is_visible else None,
        "cached_tokens": request.cached_tokens if is_visible else None,
        "num_blocks": request.num_blocks,
        "adapter": (request.adapter or None) if is_visible else None,
        "images": request.num_images if is_visible else None,
    }


def cells_of(blocks: BlockMap) -> list[list[int]]:
    """Return [length, state, owner] for each run of equal cells."""
    columns = (
        np.frombuffer(blocks.lengths, "<i4"),
        np.frombuffer(blocks.states, np.uint8),
        np.frombuffer(blocks.owners, "<i4"),
    )
    cells: list[list[int]] = np.stack(columns, axis=1).tolist()
    return cells


def rate(number: int, seconds: float) -> float:
    """Return `number` per second; 0 for intervals shorter than MIN_RATE_SECONDS."""
    return round(number / seconds, 1) if seconds >= MIN_RATE_SECONDS else 0.0


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + data + b"\n\n"
