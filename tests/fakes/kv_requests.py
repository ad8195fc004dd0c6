"""Requests and small managers for KV cache tests; tokens may be written as letters."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from engine_core.block_hashing import NO_EXTRA_KEYS, ExtraKeys
from engine_core.kv_cache.manager import NO_PREFIX, CachedPrefix, KVCacheManager
from engine_core.request import Request
from proto.messages.lifecycle import KVGroup
from proto.messages.sampling_params import SamplingParams

FINGERPRINT = bytes(range(32))
COMMON = [token for block in range(3) for token in [block] * 16]
"""Three full blocks of 16 tokens that requests share."""


def make_manager(
    num_blocks: int,
    block_size: int = 16,
    enable_caching: bool = True,
    windows: Sequence[int | None] = (None,),
    **options: Any,
) -> KVCacheManager:
    """num_blocks counts the null block. windows: one per KV group, None for full attention."""
    groups = [KVGroup(window) for window in windows]
    return KVCacheManager(
        num_blocks, block_size, enable_caching, FINGERPRINT, groups=groups, **options
    )


def token_ids(text: str) -> list[int]:
    """Return one token for each character; `|` and blanks only make blocks visible."""
    return [ord(character) for character in text if character not in "| "]


class Requests:
    """Creates requests for one manager and schedules them as a scheduler would."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self._seq_ids = count()

    def make(
        self,
        tokens: Sequence[int] | str,
        *,
        cache_salt: str | None = None,
        extra_keys: ExtraKeys = NO_EXTRA_KEYS,
        prompt_logprobs: int | None = None,
        **fields: Any,
    ) -> Request:
        """Create a waiting request with a prompt of these tokens."""
        seq_id = next(self._seq_ids)
        if cache_salt is not None:
            extra_keys = ExtraKeys(cache_salt)
        return Request(
            seq_id=seq_id,
            request_id=seq_id,
            prompt_token_ids=token_ids(tokens) if isinstance(tokens, str) else list(tokens),
            sampling_params=SamplingParams(max_tokens=1000, prompt_logprobs=prompt_logprobs),
            hasher=self._manager.hasher,
            extra_keys=extra_keys,
            **fields,
        )

    def schedule(self, request: Request, num_new_tokens: int | None = None) -> list[int] | None:
        """Allocate blocks for the next tokens of a request, by default all of them.

        Return the ids of its new blocks in the first group, or None if they do not fit.
        """
        new_blocks = self.schedule_groups(request, num_new_tokens)
        if new_blocks is None:
            return None
        return new_blocks[0] if new_blocks else []

    def schedule_groups(
        self, request: Request, num_new_tokens: int | None = None
    ) -> list[list[int]] | None:
        """Like `schedule`, but return the new blocks of all groups; empty if there are none."""
        computed = self.computed(request)
        num_left = request.num_tokens - request.num_computed_tokens - computed.num_tokens
        num_new = num_left if num_new_tokens is None else num_new_tokens
        new_blocks = self._manager.allocate_slots(request, num_new, computed)
        if new_blocks is None:
            return None
        request.num_computed_tokens += computed.num_tokens + num_new
        return new_blocks

    def computed(self, request: Request) -> CachedPrefix:
        """Return the computed prefix of a request; empty for a running request."""
        if request.num_computed_tokens:
            return NO_PREFIX
        return self._manager.get_computed_blocks(request)

    def decode(self, request: Request, token: int | str) -> list[int] | None:
        """Append an output token and schedule it."""
        request.all_token_ids.append(ord(token) if isinstance(token, str) else token)
        return self.schedule(request)

    def table(self, request: Request) -> list[int]:
        """Return the request's block table in the first group."""
        return self._manager.block_ids(request.seq_id)[0]


class Setup:
    """A manager with its pool, and its requests."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.pool = manager.pool
        self.requests = Requests(manager)

    def free_order(self) -> list[int]:
        return list(self.pool.free_queue)
