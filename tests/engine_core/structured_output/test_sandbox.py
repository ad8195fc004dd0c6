"""Grammars that would crash or block the engine end a sandbox process instead."""

import psutil
import pytest

from engine_core.structured_output.matchers import GrammarError
from engine_core.structured_output.sandbox import GrammarSandbox, SandboxSetup
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
    setup = SandboxSetup(str(tokenizer_folder / "tokenizer.json"), SIZE, (EOS,), 1)
    sandbox = GrammarSandbox(setup)
    before = set(psutil.Process().children())
    try:
        sandbox.check(GrammarSource("regex", "a+"))
        for source in (GrammarSource("grammar", DEEP), GrammarSource("json_schema", ENDLESS)):
            with pytest.raises(GrammarError, match="too much time or memory"):
                sandbox.check(source)
            sandbox.check(GrammarSource("regex", "a+"))
        with pytest.raises(GrammarError, match="unclosed group"):
            sandbox.check(GrammarSource("regex", "("))
    finally:
        sandbox.close()
    assert set(psutil.Process().children()) == before


def test_a_sandbox_that_cannot_start_raises(tmp_path):
    sandbox = GrammarSandbox(SandboxSetup(str(tmp_path / "tokenizer.json"), SIZE, (EOS,), 1))
    with pytest.raises(ModelError, match="does not start"):
        sandbox.check(GrammarSource("regex", "a"))
