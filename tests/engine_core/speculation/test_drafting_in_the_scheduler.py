"""The engine's own drafters in the scheduler: the same tokens in fewer steps."""

import pytest

from engine_core.kv_cache import integrity
from engine_core.speculation import drafting as drafting_module
from engine_core.speculation.drafting import make_drafting
from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import ThinkingRule
from proto.settings.speculative_config import parse_speculative_config
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.grammar_engine import GrammarEngine
from tests.fakes.offload_rig import OffloadRig
from tests.fakes.toy_vocabulary import tokens_of, write_toy_tokenizer

COMPACT = GrammarSource(
    "json_schema",
    '{"type": "object", "properties": {"abcabc": {"type": "boolean"}, "true": '
    '{"enum": ["abcabcabc"]}, "end": {"type": "integer", "minimum": 3, "maximum": 12}}, '
    '"required": ["abcabc", "true", "end"], "additionalProperties": false}',
    compact=True,
)


class LateSource:
    """Grammars of a manager that is made after the drafting."""

    def __init__(self) -> None:
        self.manager = None

    def has_grammar(self, request) -> bool:
        return self.manager is not None and self.manager.has_grammar(request)

    def forced_tokens(self, request) -> list[int]:
        return self.manager.forced_tokens(request)


def make(method: str, grammars=None, draft_method=""):
    config = parse_speculative_config(f'{{"method": "{method}"}}', 16)
    return make_drafting(config, grammars, draft_method)


@pytest.mark.interpreted
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("method", ["suffix+ngram", "suffix"])
def test_copies_take_fewer_steps(make_index, monkeypatch, method, is_async):
    monkeypatch.setattr(drafting_module, "load_suffix_index", lambda: make_index)
    found, num_steps = [], []
    for drafting in (None, make(method)):
        engine = EngineHarness(block_size=4, drafting=drafting, async_scheduling=is_async)
        engine.runner.next_token = lambda token_ids, choice: token_ids[-17 - choice]
        requests = [
            *engine.add(list(range(1, 41)), 120, ignore_eos=True, n=2),
            *engine.add(list(range(1, 31)), 90, ignore_eos=True),
        ]
        num_steps.append(engine.run())
        found.append([engine.tokens_of(request) for request in requests])
        assert integrity.check(engine.kv_cache) == []
    assert found[0] == found[1]
    assert num_steps[1] < 0.6 * num_steps[0]


@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "overlapped"])
def test_forced_tokens_take_fewer_steps(tmp_path, is_async):
    write_toy_tokenizer(tmp_path)
    found, num_steps = [], []
    for drafts in (False, True):
        source = LateSource()
        drafting = make("grammar", source) if drafts else None
        engine = GrammarEngine(tmp_path, async_scheduling=is_async, drafting=drafting)
        source.manager = engine.manager
        for request_id in (1, 2, 3):
            engine.send_request(request_id, COMPACT)
        engine.send_request(4, None, max_tokens=20)
        engine.run()
        num_steps.append(engine.harness.scheduler.step)
        found.append([engine.tokens(request_id) for request_id in (1, 2, 3, 4)])
        if drafts:
            stats = engine.harness.scheduler.pop_stats()
            assert stats.num_accepted_tokens == stats.num_draft_tokens > 20
        engine.close()
    assert found[0] == found[1]
    assert num_steps[1] < 0.75 * num_steps[0]


@pytest.mark.interpreted
@pytest.mark.parametrize("is_async", [False, True], ids=["synchronous", "overlapped"])
@pytest.mark.parametrize("budget", [0, 4, 100])
def test_thinking_ends_as_without_drafts(make_index, monkeypatch, tmp_path, budget, is_async):
    """No draft leads past the end of the budget, nor past the grammar of the answer behind it."""
    monkeypatch.setattr(drafting_module, "load_suffix_index", lambda: make_index)
    write_toy_tokenizer(tmp_path)
    rule = ThinkingRule(
        begun=True,
        start="<t>",
        end="</t>",
        end_token_ids=tuple(tokens_of("</t>")),
        budget=budget,
    )
    found = []
    for drafts in (False, True):
        source = LateSource()
        drafting = make("suffix+grammar", source, "draft_model") if drafts else None
        engine = GrammarEngine(tmp_path, async_scheduling=is_async, drafting=drafting)
        engine.harness.runner.draft_acceptance = 0.5
        source.manager = engine.manager
        for request_id, grammar in ((1, COMPACT), (2, None), (3, COMPACT)):
            engine.send_request(request_id, grammar, thinking=rule, max_tokens=60)
        engine.run()
        found.append([engine.tokens(request_id) for request_id in (1, 2, 3)])
        if drafts:
            stats = engine.harness.scheduler.pop_stats()
            assert sum(stats.draft_tokens_by_source.values()) == stats.num_draft_tokens > 0
            assert sum(stats.accepted_by_source.values()) == stats.num_accepted_tokens
        engine.close()
    assert found[0] == found[1]


@pytest.mark.interpreted
@pytest.mark.parametrize("num_dropped", [0, 1])
def test_requests_with_loaded_kv_have_drafts(make_index, monkeypatch, num_dropped):
    """In a small pool, whose prefixes are offloaded and loaded again."""
    monkeypatch.setattr(drafting_module, "load_suffix_index", lambda: make_index)
    found, num_steps = [], []
    for drafting in (None, make("suffix+ngram", None, "eagle" if num_dropped else "")):
        rig = OffloadRig(num_blocks=24, drafting=drafting, num_dropped_blocks=num_dropped)
        rig.runner.next_token = lambda token_ids, choice: token_ids[-17]
        requests = []
        for first in (1, 2, 3, 1, 2, 3):
            requests.append(rig.add_one(list(range(first, first + 40)), 30, ignore_eos=True))
            rig.run_until_finished(requests[-1])
        found.append([rig.tokens_of(request) for request in requests])
        num_steps.append(rig.scheduler.step)
        assert len(rig.loads) >= 3
        assert integrity.check(rig.kv_cache) == []
    assert found[0] == found[1]
    assert num_steps[1] < 0.6 * num_steps[0]
