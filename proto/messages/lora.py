"""Adapters (LoRA): which one a request uses, and how the workers get it.

    front end ── AdapterCall ──▶ engine ── LoadAdapter(id, path) ──▶ workers
                                 engine ◀── AdapterLoaded(id, digest, …) ── each rank
    front end ◀── AdapterReply ── engine ── DropAdapter(id) ──▶ workers
    front ends ◀── AdapterList ── engine       all when they connect, then what has changed
    front ends ◀── AdapterUsage ─ engine       after each change
    supervisor ◀── AdapterList ── engine       what has changed; a later engine starts with all

A name refers to one content at a time; a reload under the same name refers to other content. The
engine gives each content an id of its own, which steps name. Two names of equal content (equal
digests) have one id. The engine decides which adapters the workers hold: they keep one from
`LoadAdapter` until `DropAdapter`, and no step names an adapter before all ranks have loaded it.
"""

from typing import Final, Literal

import msgspec

from proto.errors import ErrorInfo

DIGEST_BYTES: Final = 32
"""Length of the digest of an adapter's content."""


class LoRARequest(msgspec.Struct, array_like=True, frozen=True):
    """The adapter of a request, as the front end found it under the name that the client gave.

    lora_int_id: of its content, given by the engine, at least 1.
    path: of the folder or file. digest: SHA-256 of its content, 32 bytes: another engine finds by
    it whether the file is still what the request began with. scale: factor of its effect.
    changes_images: as in AdapterLoaded.
    """

    lora_int_id: int
    lora_name: str
    path: str
    digest: bytes
    scale: float = 1.0
    changes_images: bool = False


class AdapterCard(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that requests can name.

    rank: the largest r of its tensors. num_bytes: in the memory of all workers together. Both are 0
    until an engine has loaded it.
    number: of the name, from 0; another name has another, a reload keeps it. default_scale: with
    which it applies to requests that name no adapter; 0 if it does not. At most one has another.
    """

    lora: LoRARequest
    rank: int
    num_bytes: int
    number: int = 0
    default_scale: float = 0.0


class AdapterCall(msgspec.Struct, array_like=True, tag=72, frozen=True):
    """Front end → engine: load an adapter, or forget a name; one AdapterReply follows.

    load_inplace: the name may be taken; requests in flight finish with the content they have.
    default: the adapter applies to requests that name none, by the factor `scale`; no other does.
    An empty name: none does.
    resent: an engine may have carried it out before it died.
    """

    epoch: int
    call_id: int
    action: Literal["load", "unload", "default"]
    lora_name: str
    path: str = ""
    load_inplace: bool = False
    scale: float = 0.0
    resent: bool = False


class AdapterReply(msgspec.Struct, array_like=True, tag=73, frozen=True):
    """Engine → front end: the result of a call. status: the HTTP status that it answers with."""

    epoch: int
    call_id: int
    status: int
    message: str


class AdapterList(msgspec.Struct, array_like=True, tag=74, frozen=True):
    """Engine → front ends: the adapters that requests can name, in the order of loading.

    is_change: only those that are new or different, and the names in `removed`, which are gone.
    """

    epoch: int
    adapters: list[AdapterCard]
    is_change: bool = False
    removed: list[str] = []

    def apply_to(self, known: dict[str, AdapterCard]) -> None:
        """Bring the adapters that are known by name up to date."""
        if not self.is_change:
            known.clear()
        for name in self.removed:
            known.pop(name, None)
        for card in self.adapters:
            known[card.lora.lora_name] = card


class AdapterUsage(msgspec.Struct, array_like=True, tag=78, frozen=True):
    """Engine → front ends: which adapters are used, after each change.

    running: names of adapters with a running request; waiting: of those with requests of which none
    runs. num_resident: adapters in the workers' memory. num_corrupted: by name, requests that ended
    because their logits were not finite, since the engine started or the name got its content.
    """

    epoch: int
    running: list[str]
    waiting: list[str]
    num_resident: int
    num_corrupted: dict[str, int] = {}


class LoadAdapter(msgspec.Struct, array_like=True, tag=75, frozen=True):
    """Engine → worker: read an adapter while steps go on; one AdapterLoaded per rank follows.

    digest: what the content must be; empty for any.
    """

    epoch: int
    lora_int_id: int
    path: str
    digest: bytes = b""


class AdapterLoaded(msgspec.Struct, array_like=True, tag=76, frozen=True):
    """Worker → engine: an adapter is ready for steps, or `error` says why not.

    digest: SHA-256 of the content, 32 bytes, equal on all ranks. rank: the worker's.
    lora_rank: largest r. num_bytes: of memory in this worker.
    effect: largest absolute change of the hidden states of a probe; 0.0: the adapter does nothing.
    changes_images: whether it changes the part that encodes images.
    """

    epoch: int
    rank: int
    lora_int_id: int
    digest: bytes = b""
    lora_rank: int = 0
    num_bytes: int = 0
    effect: float = 0.0
    error: ErrorInfo | None = None
    changes_images: bool = False


class DropAdapter(msgspec.Struct, array_like=True, tag=77, frozen=True):
    """Engine → worker: free an adapter; no later step names it."""

    epoch: int
    lora_int_id: int
