"""A session with the real model: each turn is what a fresh request with the merged prompt gives."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from api_server.engine.session import TurnInput, TurnOutput, generate
from proto.config import CacheConfig, ModelConfig, ServeConfig
from proto.sampling_params import SamplingParams
from tests.e2e.engine_and_worker import EngineAndWorker
from tests.e2e.reference import Reference

pytestmark = pytest.mark.suite("settings")

TEXTS = [
    "The old harbour of the town lies behind a wall of black stone, and every evening",
    " But when the fog came in that year, nobody could see the lamp any more, so the people",
    " In the morning",
]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)


async def test_three_chunks_give_the_tokens_of_three_fresh_requests(reference: Reference) -> None:
    """The second chunk comes when the first turn is over, the third during the second turn."""
    chunks = [list(reference.tokenizer.encode(text)) for text in TEXTS]
    config = ServeConfig(
        model=ModelConfig(dtype="float32"), cache=CacheConfig(enable_prefix_caching=False)
    )
    async with EngineAndWorker(config) as engine:
        first_turn_over = asyncio.Event()

        async def inputs() -> AsyncIterator[TurnInput]:
            yield TurnInput(chunks[0], PARAMS)
            await first_turn_over.wait()
            yield TurnInput(chunks[1], PARAMS)
            yield TurnInput(chunks[2], PARAMS)

        turns: list[list[TurnOutput]] = [[]]
        async for output in generate(engine.client, inputs()):
            turns[-1].append(output)
            if output.finish_reason is not None:
                first_turn_over.set()
                turns.append([])
        assert turns.pop() == []
        outputs = [[token for each in turn for token in each.token_ids] for turn in turns]
        prompts = merged(chunks, outputs)
        fresh = [await answer(engine, prompt) for prompt in prompts]
        reply = await engine.client.call_admin("get_num_unfinished")
    assert reply.value == 0
    assert [turn[-1].finished for turn in turns] == [False, False, True]
    kept = [turn[0].num_cached_tokens for turn in turns]
    assert kept == [0, *(len(p) - len(c) for p, c in zip(prompts[1:], chunks[1:], strict=True))]
    reference.assert_greedy(list(zip(prompts, outputs, strict=True)))
    reference.assert_greedy(list(zip(prompts, fresh, strict=True)))


def merged(chunks: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """The whole prompt of each turn: the last output of the turn before is dropped."""
    prompts: list[list[int]] = []
    so_far: list[int] = []
    for chunk, output in zip(chunks, outputs, strict=True):
        prompts.append([*so_far, *chunk])
        so_far = [*prompts[-1], *output[:-1]]
    return prompts


async def answer(engine: EngineAndWorker, prompt: list[int]) -> list[int]:
    """The tokens of a request that is alone."""

    async def only() -> AsyncIterator[TurnInput]:
        yield TurnInput(prompt, PARAMS)

    outputs = [each async for each in generate(engine.client, only())]
    return [token for each in outputs for token in each.token_ids]
