"""The engine's own drafters in the scheduler: the same tokens in fewer steps."""

import pytest

from engine_core.kv_cache import integrity
from engine_core.speculation import drafting as drafting_module
from engine_core.speculation.drafting import make_drafting
from proto.grammar import GrammarSource
from proto.speculative_config import parse_speculative_config
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.grammar_engine import GrammarEngine
from tests.fakes.toy_vocabulary import write_toy_tokenizer

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


def make(method: str, grammars=None):
    return make_drafting(parse_speculative_config(f'{{"method": "{method}"}}', 16), grammars)


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
