"""From the recipe of a workload to token ids and requests."""

import itertools
import random
from collections.abc import Iterator

from proto.benchmark import RequestRecipe, SchedulerWorkload
from proto.engine_io import EngineCoreRequest
from proto.sampling_params import SamplingParams

EPOCH = 1
LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID = 1000, 30_000


def prompt_of(recipe: RequestRecipe) -> list[int]:
    """The token ids of a prompt."""
    tokens: list[int] = []
    for seed, number in recipe.segments:
        plain = range(LOWEST_TOKEN_ID, HIGHEST_TOKEN_ID)
        tokens += random.Random(seed).choices(plain, k=number)
    return tokens


def requests_of(workload: SchedulerWorkload) -> Iterator[EngineCoreRequest]:
    """The requests of a workload, without end."""
    recipes = [(recipe, prompt_of(recipe)) for recipe in workload.requests]
    for request_id, (recipe, prompt) in enumerate(itertools.cycle(recipes)):
        yield EngineCoreRequest(
            epoch=EPOCH,
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=recipe.max_tokens),
            seed=request_id,
            arrival_time=float(request_id),
            priority=recipe.priority,
            tenant=recipe.tenant,
        )
