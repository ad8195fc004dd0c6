"""Sessions in tests: open one, run it until it is idle, compute its expected tokens."""

from engine_core.request import Request, RequestStatus
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.paged_runner import undisturbed


def open_session(
    engine: EngineHarness, prompt: list[int], max_tokens: int = 2, **params: object
) -> Request:
    return engine.add_one(prompt, max_tokens, resumable=True, **params)


def idle_session(
    engine: EngineHarness, prompt: list[int], max_tokens: int = 2, **params: object
) -> Request:
    """Open a session and run its first turn; return its request, which waits for more input."""
    session = open_session(engine, prompt, max_tokens, **params)
    while engine.scheduler.has_work:
        engine.step()
    assert current(engine, session).status is RequestStatus.WAITING_FOR_STREAMING_REQ
    return session


def current(engine: EngineHarness, session: Request) -> Request:
    """Return the request of the current or next turn."""
    unfinished = [*engine.scheduler.running, *engine.scheduler.waiting]
    (found,) = [each for each in unfinished if each.request_id == session.request_id]
    return found


def expected_turns(*inputs: tuple[list[int], int]) -> list[list[int]]:
    """Return the tokens of a session, turn by turn, as separate requests generate them."""
    prompt: list[int] = []
    found: list[list[int]] = []
    for tokens, max_tokens in inputs:
        prompt = prompt + tokens
        found.append(undisturbed(prompt, max_tokens))
        prompt = prompt + found[-1][:-1]
    return found


def flat(lists: list[list[int]]) -> list[int]:
    return [token for each in lists for token in each]
