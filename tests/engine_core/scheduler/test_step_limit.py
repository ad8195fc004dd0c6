"""What made a step shorter than its token budget."""

import msgspec
import pytest

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.gates import FakeGate
from tests.fakes.images import IMAGE_TOKEN, encoder_limits, picture, with_pictures

PROMPT = list(range(40))


def limit_of(engine: EngineHarness) -> str:
    """Return the limit of the next step."""
    engine.step()
    return engine.scheduler.step_limit


def test_a_full_step_has_no_limit():
    engine = EngineHarness(max_num_batched_tokens=32)
    engine.add_one(PROMPT)
    assert limit_of(engine) == ""
    assert limit_of(engine) == "requests"  # the last 8 tokens of the prompt


@pytest.mark.parametrize(
    ("limit", "settings"),
    [
        ("sequences", {"max_num_seqs": 1}),
        ("blocks", {"num_blocks": 4}),
        ("chunks", {"enable_chunked_prefill": False, "max_num_batched_tokens": 60}),
    ],
)
def test_the_next_request_finds_no_room(limit, settings):
    engine = EngineHarness(**settings)
    engine.add_one(PROMPT)
    engine.add_one([500 + token for token in PROMPT])
    assert limit_of(engine) == limit


def test_blocks_are_missing_for_a_prompt_whose_cached_prefix_leaves_it_few_tokens():
    """The rest of the step has no room for its 64 tokens, but 48 of them are not computed."""
    engine = EngineHarness(num_blocks=8, enable_chunked_prefill=False, max_num_batched_tokens=64)
    prefix = list(range(48))
    engine.add_one(prefix, max_tokens=1)
    engine.run()
    engine.add_one(list(range(500, 555)), max_tokens=9)
    engine.step()
    engine.add_one([*prefix, *PROMPT[:16]])
    assert limit_of(engine) == "blocks"


def test_a_prompt_is_cut():
    engine = EngineHarness(long_prefill_token_threshold=16)
    engine.add_one(PROMPT)
    assert [limit_of(engine) for _ in range(3)] == ["chunks", "chunks", "requests"]


def test_a_request_is_preempted():
    engine = EngineHarness(num_blocks=5, enable_prefix_caching=False)
    engine.add_one(PROMPT[:32], max_tokens=4)
    engine.add_one(PROMPT[:30], max_tokens=4)
    assert [limit_of(engine) for _ in range(3)] == ["requests", "preemption", "blocks"]


def test_requests_are_held_back():
    gate = FakeGate()
    engine = EngineHarness(gates=[gate])
    gate.blocked = {engine.add_one(PROMPT)}
    assert limit_of(engine) == "blocked"
    gate.unblock(*gate.blocked)
    assert limit_of(engine) == "requests"
    engine.scheduler.pause("freeze")
    assert limit_of(engine) == "pause"


def test_a_request_waits_for_the_encoder():
    """Running or not; an image that cannot be cut waits for a step with room for all of it."""
    for before in ([], PROMPT):
        engine = EngineHarness(encoder=encoder_limits(max_input_tokens=1))
        prompt, features = with_pictures([before, (1, 2)])
        engine.add_one(prompt, mm_features=features)
        assert [limit_of(engine) for _ in range(2)] == ["encoder", "requests"]
    limits = encoder_limits(max_embeds=20, is_bidirectional=True, max_input_tokens=20)
    engine = EngineHarness(encoder=limits, max_num_batched_tokens=32)
    engine.add_one(PROMPT[:15])
    feature = msgspec.structs.replace(picture(1, 20), length=20)
    engine.add_one([IMAGE_TOKEN] * 20, mm_features=[feature])
    assert limit_of(engine) == "chunks"


def test_the_last_token_of_a_request_is_in_flight():
    engine = EngineHarness(async_scheduling=True)
    engine.add_one(PROMPT, max_tokens=1)
    engine.add_one(PROMPT, max_tokens=9)
    engine.send()
    engine.send()
    assert engine.scheduler.step_limit == "results"


def test_a_request_that_defers_to_another_tenant_finds_no_room():
    engine = EngineHarness(num_blocks=6, max_num_batched_tokens=48)
    engine.add_one(list(range(80)), tenant=1)
    engine.step()
    engine.add_one(list(range(500, 520)), tenant=2)
    assert limit_of(engine) == "blocks"
