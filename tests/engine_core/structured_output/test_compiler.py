"""The compiler thread: the order of grammars, and a backend that cannot be created."""

from select import select

import pytest

from engine_core.structured_output.compiler import GrammarCache, GrammarCompiler
from engine_core.structured_output.matchers import GrammarError
from proto.errors import ModelError
from proto.grammar import GrammarSource
from proto.sockets import EventFd
from tests.fakes.grammar_engine import LIMIT_SECONDS, NoSandbox


class Case:
    """A compiler and its event_fd. made: number of backends created."""

    def __init__(self, make, sandbox=None, *, eager=True):
        self.event_fd, self.made = EventFd(), 0

        def counted():
            self.made += 1
            return make()

        self.compiler = GrammarCompiler(
            counted, sandbox or NoSandbox(), GrammarCache(4, 1000), self.event_fd, eager=eager
        )

    def take(self, number):
        taken = []
        while len(taken) < number:
            assert select([self.event_fd.descriptor], [], [], LIMIT_SECONDS)[0]
            self.event_fd.clear()
            taken += self.compiler.pop_compiled()
        return taken


@pytest.mark.parametrize("eager", [True, False])
def test_every_source_is_compiled_once_and_cached(backend, eager):
    case = Case(lambda: backend, eager=eager)
    one, two = GrammarSource("regex", "a+"), GrammarSource("regex", "b+")
    assert [case.compiler.request_grammar(each) for each in (one, two, one, one)] == [None] * 4
    taken = case.take(2)
    assert [source for source, _ in taken] == [one, two]
    assert [case.compiler.request_grammar(each) for each in (one, two)] == [
        found for _, found in taken
    ]
    assert case.compiler.backend is backend
    case.compiler.close()
    assert case.made == 1


def test_an_unused_backend_is_not_created_after_a_crash(backend):
    case = Case(lambda: backend, eager=False)
    case.compiler.close()
    assert case.made == 0


def test_refusals_of_each_stage_name_the_field(backend):
    class Suspicious:
        def check(self, source):
            if "bomb" in source.source:
                raise GrammarError("too much")

        def close(self):
            pass

    case = Case(lambda: backend, Suspicious())
    for source in ("", "bomb", "("):
        case.compiler.request_grammar(GrammarSource("regex", source, field="guided_regex"))
    errors = [error for _, error in case.take(3)]
    case.compiler.close()
    assert [error.param for error in errors] == ["guided_regex"] * 3
    for error, words in zip(errors, ("empty", "too much", "unclosed"), strict=True):
        assert words in error.message


@pytest.mark.parametrize("error", [ModelError("no such tokenizer"), RuntimeError("surprise")])
def test_without_a_backend_every_grammar_is_refused(error):
    def make():
        raise error

    case = Case(make)
    case.compiler.request_grammar(GrammarSource("regex", "a"))
    ((_, found),) = case.take(1)
    case.compiler.close()
    assert isinstance(found, GrammarError)
    assert "not available" in found.message
    assert "surprise" not in found.message
