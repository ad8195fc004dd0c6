"""A plain beam search, and requests for the same search."""

from tests.fakes.beam_reference import beam_search
from tests.fakes.engine_harness import EOS
from tests.fakes.paged_runner import hashed_logprobs


def add(engine, prompt, width, max_tokens=8, **params):
    return engine.add(prompt, max_tokens, n=width, beam_width=width, **params)


def expected(prompt, width, max_tokens=8, stop_ids=(EOS,), **params):
    return beam_search(
        prompt, hashed_logprobs, width=width, max_tokens=max_tokens, stop_ids=stop_ids, **params
    )


def outputs(engine, rows):
    return [engine.tokens_of(row) for row in rows]
