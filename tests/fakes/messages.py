"""Messages of a front end, and requests, with defaults for all fields."""

from typing import Any

from engine_core.request import Request
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.sampling_params import SamplingParams
from tests.fakes.engine_harness import EOS
from tests.fakes.kv_requests import make_manager


def request(
    request_id: int = 1, prompt: Any = (1, 2, 3), max_tokens: int = 4, **changes: Any
) -> EngineCoreRequest:
    """Return a request. changes: fields of it or of its sampling parameters."""
    params = {
        name: changes.pop(name)
        for name in list(changes)
        if name in SamplingParams.__struct_fields__
    }
    return EngineCoreRequest(
        epoch=1,
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,), **params),
        seed=changes.pop("seed", 0),
        arrival_time=changes.pop("arrival_time", 0.0),
        **changes,
    )


def make_request(
    seq_id: int, prompt: list[int], request_id: int = 1, choice: int = 0, tenant: int = 0
) -> Request:
    """Return a choice that is not part of a scheduler."""
    return Request(
        seq_id=seq_id,
        request_id=request_id,
        choice=choice,
        tenant=tenant,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=4),
        hasher=make_manager(2).hasher,
    )
