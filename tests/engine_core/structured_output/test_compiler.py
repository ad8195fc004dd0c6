"""The compiler's threads: turns of tenants, slow grammars, and a backend that cannot be created."""

from select import select

import pytest

from engine_core.structured_output.compiler import (
    COMPILE_SECONDS,
    QUICK_SECONDS,
    QUICK_THREADS,
    GrammarCache,
    GrammarCompiler,
    GrammarQueue,
)
from engine_core.structured_output.matchers import (
    CompilerFailedError,
    GrammarError,
    GrammarTimeoutError,
)
from proto.errors import ModelError
from proto.messages.grammar import GrammarSource
from proto.runtime.sockets import EventFd
from tests.fakes.grammar_engine import LIMIT_SECONDS, GatedSandbox, NoSandbox


def regex(source):
    return GrammarSource("regex", source)


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
    one, two = regex("a+"), regex("b+")
    assert [case.compiler.request_grammar(each, 0) for each in (one, two, one, one)] == [None] * 4
    taken = dict(case.take(2))
    assert set(taken) == {one, two}
    assert case.compiler.request_grammar(one, 0) is taken[one]
    assert case.compiler.request_grammar(two, 1) is taken[two]
    assert case.compiler.backend is backend
    case.compiler.close()
    assert case.made == 1


def test_an_unused_backend_is_not_created_after_a_crash(backend):
    case = Case(lambda: backend, eager=False)
    case.compiler.close()
    assert case.made == 0


def test_the_sandbox_starts_once_before_a_request_needs_it(backend):
    sandbox = GatedSandbox()
    case = Case(lambda: backend, sandbox)
    case.compiler.warm_up()
    case.compiler.warm_up()
    sandbox.gate.release()
    case.take(1)
    case.compiler.warm_up()
    case.compiler.close()
    assert len(sandbox.names) == 1


def test_refusals_of_each_stage_name_the_field(backend):
    class Suspicious(NoSandbox):
        def check(self, source, seconds):
            if "bomb" in source.source:
                raise GrammarError("too much")

    case = Case(lambda: backend, Suspicious())
    for source in ("", "bomb", "("):
        case.compiler.request_grammar(GrammarSource("regex", source, field="guided_regex"), 0)
    errors = {source.source: error for source, error in case.take(3)}
    case.compiler.close()
    for source, words in (("", "empty"), ("bomb", "too much"), ("(", "unclosed")):
        assert errors[source].param == "guided_regex"
        assert words in errors[source].message


@pytest.mark.parametrize("error", [ModelError("no such tokenizer"), RuntimeError("surprise")])
def test_without_a_backend_every_grammar_is_refused(error):
    def make():
        raise error

    case = Case(make)
    case.compiler.request_grammar(regex("a"), 0)
    ((_, found),) = case.take(1)
    case.compiler.close()
    assert isinstance(found, GrammarError)
    assert "not available" in found.message
    assert "surprise" not in found.message


def test_slow_grammars_delay_no_quick_one(backend):
    sandbox = GatedSandbox()
    case = Case(lambda: backend, sandbox)
    slow = [regex(f"slow{number}") for number in range(3 * QUICK_THREADS)]
    quick = regex("quick")
    for source in [*slow, quick]:
        case.compiler.request_grammar(source, 0)
    for _ in range(2):  # one that is slow, and the quick one
        assert sandbox.entered.acquire(timeout=LIMIT_SECONDS)
    assert "quick" in sandbox.names
    assert len(sandbox.names) == 2, "slow grammars are compiled one at a time"
    sandbox.gate.release(len(slow) + 1)
    found = dict(case.take(len(slow) + 1))
    case.compiler.close()
    assert set(found) == {*slow, quick}
    assert not any(isinstance(each, Exception) for each in found.values())


def test_the_limit_of_any_grammar_is_that_of_the_second_turn(backend):
    class Endless(NoSandbox):
        def check(self, source, seconds):
            raise GrammarTimeoutError(f"more than {seconds:g} seconds")

    case = Case(lambda: backend, Endless())
    case.compiler.request_grammar(regex("a"), 0)
    ((source, error),) = case.take(1)
    assert "more than 2 seconds" in error.message
    assert case.compiler.request_grammar(source, 0) is error, "it is refused at once from then on"
    case.compiler.close()
    assert QUICK_SECONDS < COMPILE_SECONDS


def test_a_failure_of_the_host_is_not_remembered(backend):
    class Failing(NoSandbox):
        errors = [CompilerFailedError("killed"), RuntimeError("surprise")]

        def check(self, source, seconds):
            if self.errors:
                raise self.errors.pop(0)
            return 0

    case = Case(lambda: backend, Failing())
    for words in ("killed", "RuntimeError"):
        case.compiler.request_grammar(regex("a"), 0)
        ((_, error),) = case.take(1)
        assert isinstance(error, CompilerFailedError)
        assert words in error.message
    case.compiler.request_grammar(regex("a"), 0)
    ((_, compiled),) = case.take(1)
    case.compiler.close()
    assert not isinstance(compiled, Exception)


def test_a_withdrawn_grammar_is_not_compiled_unless_it_is_under_way(backend):
    sandbox = GatedSandbox()
    case = Case(lambda: backend, sandbox)
    running = [regex(f"running{number}") for number in range(QUICK_THREADS)]
    waiting = regex("waiting")
    for source in running:
        case.compiler.request_grammar(source, 0)
        assert sandbox.entered.acquire(timeout=LIMIT_SECONDS)
    case.compiler.request_grammar(waiting, 0)
    case.compiler.withdraw_grammar(waiting)
    case.compiler.withdraw_grammar(running[0])
    sandbox.gate.release(len(running))
    assert {source for source, _ in case.take(len(running))} == set(running)
    assert "waiting" not in sandbox.names
    case.compiler.request_grammar(waiting, 0)
    sandbox.gate.release()
    assert [source for source, _ in case.take(1)] == [waiting]
    case.compiler.close()


def test_tenants_take_turns():
    grammars = GrammarQueue()
    for tenant, source in ((1, "a"), (1, "b"), (1, "c"), (2, "d"), (2, "c"), (3, "e")):
        grammars.put(tenant, regex(source))
    grammars.put(1, regex("b"))  # a second time
    taken = [grammars.get() for _ in range(3)]
    grammars.put(3, regex("f"))
    assert grammars.discard(regex("f"))
    assert not grammars.discard(regex("f"))
    taken += [grammars.get() for _ in range(2)]
    assert taken == [
        (1, regex("a")),
        (2, regex("d")),
        (3, regex("e")),
        (1, regex("b")),
        (2, regex("c")),  # its result is that of tenant 1 too
    ]
    grammars.put(1, regex("g"))
    grammars.close()
    assert grammars.get() is None
