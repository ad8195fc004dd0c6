"""Grammars that would be the end of the engine are the end of another process."""

import psutil
import pytest

from engine_core.structured_output.base import GrammarError
from engine_core.structured_output.trial import ProcessTrial
from engine_core.structured_output.trial_process import TrialSetup
from proto.errors import ModelError
from proto.grammar import GrammarSource
from tests.fakes.toy_vocabulary import EOS, SIZE

RULES = 4000
DEEP = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(RULES)) + f'\nr{RULES}: "a"'
ENDLESS = (
    '{"allOf": [{"type": "integer", "multipleOf": 999983}, '
    '{"type": "integer", "multipleOf": 999979}, {"multipleOf": 777777}]}'
)


def test_neither_a_full_stack_nor_an_endless_compilation_harms_the_engine(tokenizer_folder):
    setup = TrialSetup(str(tokenizer_folder / "tokenizer.json"), SIZE, (EOS,), 1)
    trial = ProcessTrial(setup)
    before = set(psutil.Process().children())
    try:
        trial.check(GrammarSource("regex", "a+"))
        for source in (GrammarSource("grammar", DEEP), GrammarSource("json_schema", ENDLESS)):
            with pytest.raises(GrammarError, match="too much time or memory"):
                trial.check(source)
            trial.check(GrammarSource("regex", "a+"))
        with pytest.raises(GrammarError, match="unclosed group"):
            trial.check(GrammarSource("regex", "("))
    finally:
        trial.close()
    assert set(psutil.Process().children()) == before


def test_a_trial_that_cannot_begin_says_so(tmp_path):
    trial = ProcessTrial(TrialSetup(str(tmp_path / "tokenizer.json"), SIZE, (EOS,), 1))
    with pytest.raises(ModelError, match="does not start"):
        trial.check(GrammarSource("regex", "a"))
