"""Which engine the router chooses, rule by rule; time is a number."""

import random
from collections import Counter

import pytest

from api_server.engine.router import (
    DECODE_TOKENS,
    EXPLORE_ONE_IN,
    MANY_WAITING,
    MISSES_PER_NEW,
    PENALTY_TOKENS,
    WARM_BLOCKS,
    EngineLoad,
    PrefixIndex,
    Router,
    _mixed,
    blocks_of,
)
from proto.messages.engine_io import AgentHint, EngineCoreRequest
from proto.messages.lora import LoRARequest
from proto.messages.multimodal import MultiModalFeature, SharedPixels
from proto.messages.sampling_params import SamplingParams
from proto.messages.stats import KVTier

SIZE = 16


class Rig:
    """A router of engines that are ready, and a clock."""

    def __init__(self, num_engines=4, num_blocks=4096):
        self.now = 100.0
        self.router = Router(num_engines, lambda: self.now)
        self.usable = list(range(num_engines))
        self.rng = random.Random(3)
        self.last_id = 0
        for engine in self.usable:
            self.router.note_up(engine, SIZE, num_blocks)

    def tokens(self, number):
        return [self.rng.randrange(1000) for _ in range(number)]

    def request(self, tokens=None, session=None, **fields):
        """A request whose id is not one that explores, unless it is given."""
        if "request_id" not in fields:
            self.last_id += 1
            while explores(self.last_id):
                self.last_id += 1
            fields["request_id"] = self.last_id
        return self.router.describe(
            EngineCoreRequest(
                epoch=1,
                prompt_token_ids=self.tokens(640) if tokens is None else tokens,
                sampling_params=SamplingParams(max_tokens=8),
                seed=0,
                arrival_time=0.0,
                agent=None if session is None else AgentHint(session),
                **fields,
            )
        )

    def choose(self, request):
        return self.router.choose(request, self.usable)

    def send(self, request, engine=None):
        """Send a request; to the engine of the router's choice, by default."""
        engine = self.choose(request) if engine is None else engine
        self.router.note_sent(request, engine)
        return engine

    def finish(self, request):
        self.router.note_token(request.request_id)
        self.router.note_finished(request.request_id)


def explores(request_id):
    """Whether a request of this id goes without affinity of its prompt."""
    return _mixed(request_id) % EXPLORE_ONE_IN == 0


def test_the_engine_that_has_the_prefix_gets_the_next_prompt():
    rig = Rig()
    prompt = rig.tokens(1600)
    first = rig.request(prompt)
    engine = rig.send(first, 2)
    rig.finish(first)
    assert engine == 2
    assert rig.choose(rig.request([*prompt, *rig.tokens(200)])) == 2
    other_salt = rig.request([*prompt, *rig.tokens(200)], cache_salt="x")
    assert rig.router._credits(other_salt.keys) == {}


def test_load_decides_where_no_engine_has_the_prefix():
    rig = Rig(3)
    rig.send(rig.request(rig.tokens(3000)), 0)
    rig.send(rig.request(rig.tokens(1000)), 1)
    assert rig.choose(rig.request()) == 2
    rig.send(rig.request(rig.tokens(4000)), 2)
    assert rig.choose(rig.request()) == 1


def test_a_choice_that_generates_costs_as_much_as_some_prompt_tokens():
    rig = Rig(2)
    running = rig.request(n=4)
    rig.send(running, 0)
    rig.router.note_token(running.request_id)
    prefilling = rig.request(rig.tokens(3 * DECODE_TOKENS))
    rig.send(prefilling, 1)
    assert rig.choose(rig.request()) == 1
    rig.send(rig.request(rig.tokens(2 * DECODE_TOKENS)), 1)
    assert rig.choose(rig.request()) == 0
    rig.finish(running)
    assert rig.router._costs[0] == 0


def test_a_session_stays_with_the_engine_of_its_last_turn_until_that_costs_too_much():
    rig = Rig()
    prompt = rig.tokens(640)
    first = rig.request(prompt, session="s")
    rig.send(first, 3)
    rig.finish(first)
    other = rig.request(rig.tokens(PENALTY_TOKENS // 2))
    rig.send(other, 3)
    turn = [*prompt, *rig.tokens(600)]  # of which the engine has too little for its prefix alone
    assert rig.choose(rig.request(turn, session="s")) == 3
    rig.send(rig.request(rig.tokens(2 * PENALTY_TOKENS)), 3)
    assert rig.choose(rig.request(turn, session="s")) != 3


def test_a_session_whose_kv_was_evicted_goes_where_it_costs_least():
    rig = Rig(2, num_blocks=128)
    prompt = rig.tokens(640)
    first = rig.request(prompt, session="s")
    rig.send(first, 1)
    rig.finish(first)
    evicting = rig.request(rig.tokens(2048))
    rig.send(evicting, 1)
    rig.finish(evicting)
    rig.now += 1
    assert rig.choose(rig.request(prompt, session="s")) == 0


def test_full_engines_evict_what_was_not_used_for_longest():
    rig = Rig(2, num_blocks=128)
    for engine in (0, 1):
        filling = rig.request(rig.tokens(2048))
        rig.send(filling, engine)
        rig.finish(filling)
        rig.now += 30
    assert {rig.choose(rig.request()) for _ in range(8)} == {0}
    used_again = rig.request(rig.tokens(2048))
    rig.send(used_again, 0)
    rig.finish(used_again)
    rig.now += 1
    assert {rig.choose(rig.request()) for _ in range(8)} == {1}


def test_affinity_ends_where_the_engine_is_overloaded_and_others_are_not():
    rig = Rig()
    prompt = rig.tokens(1600)
    first = rig.request(prompt, session="s")
    rig.send(first, 1)
    rig.finish(first)
    for load in (EngineLoad(num_waiting=MANY_WAITING), EngineLoad(kv_usage=0.96)):
        rig.router.note_load(1, load)
        assert rig.choose(rig.request([*prompt, 1], session="s")) != 1
        for engine in rig.usable:
            rig.router.note_load(engine, load)
        assert rig.choose(rig.request([*prompt, 1], session="s")) == 1
        for engine in rig.usable:
            rig.router.note_load(engine, EngineLoad())
    assert rig.choose(rig.request([*prompt, 1], session="s")) == 1


def test_a_popular_prefix_does_not_make_a_hot_spot():
    rig = Rig()
    prefix = rig.tokens(1024)
    sent = Counter(rig.send(rig.request([*prefix, *rig.tokens(400)])) for _ in range(200))
    assert len(sent) == 4
    assert max(sent.values()) < 80


def test_an_idle_daemon_keeps_a_prefix_together():
    rig = Rig()
    prefix, used = rig.tokens(1024), set()
    for _ in range(50):
        request = rig.request([*prefix, *rig.tokens(100)])
        used.add(rig.send(request))
        rig.finish(request)
    assert len(used) == 1


def test_some_requests_explore_and_sessions_never_do():
    rig = Rig(2)
    prefix = rig.tokens(800)
    rig.send(rig.request(rig.tokens(900)), 1)
    warm = rig.request(prefix, session="s")
    rig.send(warm, 1)
    rig.router.note_finished(warm.request_id)
    exploring = [number for number in range(3000) if explores(number)]
    assert 15 <= len(exploring) <= 50
    assert rig.choose(rig.request(prefix)) == 1
    assert rig.choose(rig.request(prefix, request_id=exploring[0])) == 0
    assert rig.choose(rig.request(prefix, session="s", request_id=exploring[0])) == 1


def test_a_stalled_engine_gets_nothing_while_another_is_there():
    rig = Rig(2)
    waiting = rig.request(session="s")
    rig.send(waiting, 0)
    rig.send(rig.request(rig.tokens(5000)), 1)
    rig.router.note_load(1, EngineLoad(timestamp=rig.now))
    rig.now += 1.9
    assert rig.choose(rig.request(session="s")) == 0
    rig.now += 0.2
    rig.router.note_load(1, EngineLoad(timestamp=rig.now))
    assert rig.choose(rig.request(session="s")) == 1
    assert rig.router.choose(rig.request(session="s"), [0]) == 0
    rig.router.note_load(0, EngineLoad(timestamp=rig.now))
    assert rig.choose(rig.request(session="s")) == 0


def test_an_idle_engine_is_not_stalled():
    rig = Rig(2)
    rig.now += 60
    rig.send(rig.request(rig.tokens(3000)), 1)
    assert rig.choose(rig.request()) == 0


def test_one_of_four_misses_warms_up_a_new_engine():
    rig = Rig(2)
    warm = rig.request(rig.tokens(SIZE * WARM_BLOCKS))
    rig.send(warm, 0)
    rig.finish(warm)
    rig.router.note_down(1)
    rig.router.note_up(1, SIZE, 4096)
    rig.send(rig.request(rig.tokens(1000)), 1)  # which costs more than engine 0
    chosen = [rig.choose(rig.request()) for _ in range(4 * MISSES_PER_NEW)]
    assert chosen.count(1) == 4
    rig.send(rig.request(rig.tokens(SIZE * WARM_BLOCKS)), 1)
    assert {rig.choose(rig.request()) for _ in range(8)} == {0}


def test_engines_that_all_start_together_are_not_new():
    rig = Rig(3)
    assert not rig.router._new
    busy = rig.request(rig.tokens(500))
    rig.send(busy, 0)
    assert {rig.choose(rig.request()) for _ in range(8)} <= {1, 2}


def test_what_an_engine_had_is_forgotten_with_it():
    rig = Rig()
    prompt = rig.tokens(1600)
    request = rig.request(prompt, session="s", tenant=5)
    rig.send(request, 2)
    rig.router.note_down(2)
    assert rig.router._credits(request.keys) == {}
    assert list(rig.router._costs) == [0, 0, 0, 0]
    assert rig.router._tenants == {}
    assert rig.router._indexes[0]._masks == {}


def test_a_tenant_competes_with_itself_first():
    rig = Rig(2)
    rig.send(rig.request(rig.tokens(300), tenant=7), 0)
    rig.send(rig.request(rig.tokens(400), tenant=8), 1)
    assert rig.choose(rig.request(tenant=9)) == 0
    assert rig.choose(rig.request(tenant=7)) == 1
    assert rig.choose(rig.request(tenant=8)) == 0


def test_reported_load_counts_where_this_front_end_knows_less():
    rig = Rig(2)
    rig.router.note_load(0, EngineLoad(num_running=4, num_queued_tokens=100))
    rig.send(rig.request(rig.tokens(300)), 1)
    assert rig.choose(rig.request()) == 1
    rig.router.note_load(0, EngineLoad())
    assert rig.choose(rig.request()) == 0


def test_equal_costs_are_decided_alike_by_all_front_ends():
    first, second = Rig(8), Rig(8)
    second.last_id = 5000
    second.router._clock = lambda: 7.0
    prompts = [first.tokens(64) for _ in range(64)]
    chosen = [first.choose(first.request(prompt)) for prompt in prompts]
    assert chosen == [second.choose(second.request(prompt)) for prompt in prompts]
    assert len(set(chosen)) == 8
    begin = prompts[0][:SIZE]
    assert {first.choose(first.request([*begin, *first.tokens(90)])) for _ in range(9)} == {
        chosen[0]
    }
    sessions = [f"s{number}" for number in range(64)]
    by_session = [first.choose(first.request(session=name)) for name in sessions]
    assert by_session == [second.choose(second.request(session=name)) for name in sessions]


def test_blocks_on_slower_media_are_worth_less():
    rig = Rig(2, num_blocks=64)
    tiers = [KVTier("GPU", 64, 0), KVTier("CPU", 64, 0), KVTier("disk", 1000, 0)]
    rig.router.note_tiers(0, tiers)
    old, middle = rig.tokens(64 * SIZE), rig.tokens(64 * SIZE)
    for prompt in (old, middle, rig.tokens(64 * SIZE)):
        rig.send(rig.request(prompt), 0)
    assert rig.router._credits(rig.request(middle).keys)[0] == 0.75 * len(middle)
    assert rig.router._credits(rig.request(old).keys)[0] == 0.25 * len(old)


def test_credits_count_leading_blocks_that_still_fit():
    rig = Rig(2, num_blocks=100)
    prompt = rig.tokens(64 * SIZE)
    rig.send(rig.request(prompt), 0)
    rig.send(rig.request(rig.tokens(60 * SIZE)), 0)
    credit = rig.router._credits(rig.request(prompt).keys)[0]
    assert 0 < credit <= 40 * SIZE
    rig.router.forget_prefixes(0)
    assert rig.router._credits(rig.request(prompt).keys) == {}


def test_the_index_agrees_with_sets_of_blocks():
    rng, index = random.Random(5), PrefixIndex(3)
    held = [{} for _ in range(3)]  # key → last use
    prompts, now = [], 0
    for _ in range(300):
        base = rng.choice(prompts)[: rng.randrange(30)] if prompts and rng.random() < 0.7 else []
        keys = base + [rng.getrandbits(60) for _ in range(rng.randrange(1, 12))]
        prompts.append(keys)
        engine = rng.randrange(3)
        index.add(engine, keys, 120, float(now))
        for place in range(len(keys) - 1, -1, -1):
            now += 1
            size = blocks_of(place + 1) - blocks_of(place)
            held[engine][keys[place]] = (now, held[engine].get(keys[place], (0, size))[1])
        while sum(size for _, size in held[engine].values()) > 120:
            del held[engine][min(held[engine], key=lambda key: held[engine][key])]
        for probe in rng.sample(prompts, min(4, len(prompts))):
            expected = {}
            for number in range(3):
                depth = 0
                while depth < len(probe) and probe[depth] in held[number]:
                    depth += 1
                if depth:
                    expected[number] = blocks_of(depth) * SIZE
            assert index.tokens(probe, SIZE) == expected
            for number in range(3):
                assert index.tokens_of(number, probe, SIZE) == expected.get(number, 0)
    for number in range(3):
        index.forget(number)
    assert index._masks == {}


def test_an_index_knows_a_thousand_engines():
    rng, index = random.Random(6), PrefixIndex(1000)
    engines = rng.sample(range(1000), 400)
    for engine in engines:
        index.add(engine, list(range(1, rng.choice((3, 10)))), 4096, 0.0)
    found = index.tokens(list(range(1, 10)), SIZE)
    assert sorted(found) == sorted(engines)
    assert found == {engine: index.tokens_of(engine, range(1, 10), SIZE) for engine in engines}
    assert set(found.values()) == {2 * SIZE, 16 * SIZE}


def test_only_usable_engines_are_chosen():
    rig = Rig(8)
    prompt = rig.tokens(1600)
    rig.send(rig.request(prompt), 3)
    usable = [engine for engine in rig.usable if engine != 3]
    assert rig.router.choose(rig.request(prompt), usable) in usable
    assert rig.router.choose(rig.request(prompt), range(8)) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"cache_salt": "a"},
        {"lora_request": LoRARequest(1, "x", "/x", bytes(32))},
        {"lora_request": LoRARequest(1, "x", "/x", bytes(32), 0.5)},
        {"prompt_embeds": b"1234"},
    ],
    ids=["salt", "adapter", "scale", "embeds"],
)
def test_keys_depend_on_what_the_kv_depends_on(changes):
    rig = Rig()
    prompt = rig.tokens(SIZE * 20)
    plain, other = rig.request(prompt), rig.request(prompt, **changes)
    assert plain.keys == rig.request(prompt).keys
    assert not set(plain.keys) & set(other.keys)


def test_keys_depend_on_images_from_where_they_begin():
    rig = Rig()
    prompt = rig.tokens(SIZE * 20)

    def with_image(digest):
        feature = MultiModalFeature(SIZE * 3 + 2, 20, 20, digest, SharedPixels("0", (1,)))
        return rig.request(prompt, mm_features=[feature]).keys

    one, two = with_image(b"a" * 32), with_image(b"b" * 32)
    assert one[:3] == two[:3]
    assert not set(one[3:]) & set(two[3:])


def test_runs_of_blocks_cover_full_blocks_only():
    rig = Rig()
    for number, runs in (
        (0, 0),
        (15, 0),
        (16, 1),
        (128, 8),
        (255, 8),
        (256, 9),
        (1024, 15),
        (1535, 15),
        (8192, 29),
    ):
        request = rig.request(rig.tokens(number))
        assert len(request.keys) == runs
        assert blocks_of(runs) * SIZE <= number
