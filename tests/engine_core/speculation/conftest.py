"""Requests, and the compiled index of token sequences."""

from collections.abc import Callable
from typing import Any

import pytest

from engine_core import build_native
from engine_core.build_native import NativeBuildError
from engine_core.request import Request
from engine_core.speculation.suffix_index import MakeSuffixIndex, load_suffix_index
from proto.messages.sampling_params import SamplingParams


@pytest.fixture(scope="session")
def make_index(tmp_path_factory: pytest.TempPathFactory) -> MakeSuffixIndex:
    """The compiled class; compiling it takes less than a second."""
    folder = tmp_path_factory.mktemp("csrc")
    try:
        build_native.build(folder)
    except NativeBuildError as reason:
        pytest.skip(str(reason))
    make = load_suffix_index(folder)
    assert make is not None
    return make


@pytest.fixture
def make_request() -> Callable[..., Request]:
    """make_request(prompt, outputs=…, max_tokens=…, …): a request that decodes."""
    count = iter(range(1, 1_000_000))

    def factory(
        prompt: list[int], outputs: tuple[int, ...] = (), max_tokens: int = 1000, **changes: Any
    ) -> Request:
        params = {
            name: changes.pop(name)
            for name in list(changes)
            if name in SamplingParams.__struct_fields__
        }
        return Request(
            seq_id=next(count),
            request_id=1,
            prompt_token_ids=prompt,
            output_token_ids=outputs,
            sampling_params=SamplingParams(max_tokens=max_tokens, **params),
            hasher=None,
            **changes,
        )

    return factory
