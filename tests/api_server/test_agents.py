"""Agent sessions: hints sent to the engine with requests, and the end of turns."""

import asyncio
import json
import re

import pytest

from api_server.protocol.agents import MAX_TTL_MS, tool_name
from proto.errors import ErrorInfo
from proto.messages.engine_io import MAX_NAME_LENGTH, AgentHint, FinishReason, agent_session_name
from proto.settings.config import FrontEndConfig
from tests.api_server.test_engine_restart import begin, have, restart

PATHS = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 80},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
}
HINT = {"job_id": "fix-1"}


async def asked(front_end, path="/v1/completions", headers=None, **fields):
    """Return the request that the engine gets."""
    response = await front_end.http.post(path, json={**PATHS[path], **fields}, headers=headers)
    assert response.status_code == 200, response.text
    return await front_end.engine.requests.get()


async def refusal(front_end, path="/v1/completions", headers=None, **fields):
    """Return (param, message) of the error."""
    response = await front_end.http.post(path, json={**PATHS[path], **fields}, headers=headers)
    assert response.status_code == 400, response.text
    return response.json()["error"]["param"], response.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_hint_is_sent_with_the_request(start, scripted, path):
    async with start(scripted("!")) as front_end:
        hint = {"job_id": "fix 1, é", "is_last_step": True, "ttl_ms": 250}
        agent = (await asked(front_end, path, agent_hint=hint)).agent
        assert agent == AgentHint(agent_session_name("fix 1, é", 0), True, 250.0)
        assert (await asked(front_end, path, agent_hint=HINT)).agent == AgentHint(
            agent_session_name("fix-1", 0)
        )
        assert (await asked(front_end, path)).agent is None
        nothing = await asked(front_end, path, agent_hint=None, session_id=None)
        assert nothing.agent is None


@pytest.mark.parametrize("path", PATHS)
async def test_a_session_id_names_an_agent_session(start, scripted, path):
    async with start(scripted("!")) as front_end:
        header = {"X-Session-ID": "from a header"}

        async def session_of(headers=None, **fields):
            agent = (await asked(front_end, path, headers, **fields)).agent
            return agent.session

        assert await session_of(session_id="s") == agent_session_name("s", 0)
        assert await session_of(header) == agent_session_name("from a header", 0)
        assert await session_of(header, session_id="s") == agent_session_name("s", 0)
        assert await session_of(header, agent_hint=HINT) == agent_session_name("fix-1", 0)
        for charset in ("utf-8", "latin-1"):
            assert await session_of(
                {"X-Session-ID": "séance".encode(charset)}
            ) == agent_session_name("séance", 0)
        hint = {"is_last_step": True}
        agent = (await asked(front_end, path, header, agent_hint=hint)).agent
        assert agent == AgentHint(agent_session_name("from a header", 0), is_last_step=True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (5, "must be an object"),
        ([], "must be an object"),
        ({}, "job_id is missing"),
        ({"is_last_step": True}, "job_id is missing"),
        ({"job_id": 5}, "job_id must be a string"),
        ({"job_id": ""}, "job_id must not be empty"),
        ({"job_id": "x" * 257}, "job_id is longer than 256 characters"),
        ({"job_id": "a\nb"}, "control characters"),
        ({"job_id": "a\ud800"}, "valid text"),
        ({**HINT, "is_last_step": 1}, "is_last_step must be true or false"),
        ({**HINT, "ttl_ms": 0}, "ttl_ms must be more than 0"),
        ({**HINT, "ttl_ms": -5}, "ttl_ms must be more than 0"),
        ({**HINT, "ttl_ms": MAX_TTL_MS + 1}, "ttl_ms must be at most 3600000"),
        ({**HINT, "ttl_ms": float("inf")}, "ttl_ms"),
        ({**HINT, "ttl_ms": float("nan")}, "ttl_ms"),
        ({**HINT, "ttl_ms": "5"}, "ttl_ms must be a number"),
        ({**HINT, "ttl_ms": True}, "ttl_ms must be a number"),
        ({**HINT, "ttl_ms": 10**400}, "ttl_ms"),
        ({**HINT, "tool": 5}, "tool must be a string"),
        ({**HINT, "tool": ""}, "tool must match"),
        ({**HINT, "tool": "rm -rf"}, "tool must match"),
        ({**HINT, "tool": "x" * 65}, "tool must match"),
        ({**HINT, "tool": "x\n"}, "tool must match"),
    ],
)
async def test_an_invalid_hint_is_a_400_that_names_it(start, path, hint, words):
    async with start() as front_end:
        content = {**PATHS[path], "agent_hint": hint}
        response = await front_end.http.post(
            path, content=json.dumps(content), headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == "agent_hint"
        assert words in error["message"]
        assert front_end.engine.requests.empty()


@pytest.mark.parametrize("session", [5, "", "x" * 257, "a\tb", ["s"]])
async def test_an_invalid_session_is_a_400_that_names_it(start, session):
    async with start() as front_end:
        assert (await refusal(front_end, session_id=session))[0] == "session_id"
        if isinstance(session, str):
            found = await refusal(front_end, headers={"X-Session-ID": session})
            assert found[0] == "session_id"
            if len(session) > 256:
                assert found[1] == "X-Session-ID is longer than 256 characters"


async def test_a_turn_is_one_prompt(start, scripted):
    async with start(scripted("!")) as front_end:
        prompts = {"prompt": ["a", "b"]}
        assert (await refusal(front_end, **prompts, agent_hint=HINT))[0] == "agent_hint"
        assert (await refusal(front_end, **prompts, session_id="s"))[0] == "session_id"
        assert (await asked(front_end, prompt=["a"], session_id="s")).agent is not None


async def test_unknown_hint_fields_are_reported_and_ignored(start, scripted):
    async with start(scripted("!")) as front_end:
        response = await front_end.complete(agent_hint={**HINT, "mood": "good"})
        assert response.status_code == 200
        assert response.headers["x-tokend-ignored"] == "agent_hint.mood"


async def test_equal_ids_of_two_tenants_are_two_sessions(start, scripted):
    async with start(
        scripted("```bash\nls\n```"), config=FrontEndConfig(tenant_by="header")
    ) as front_end:
        sessions, tools = set(), set()
        for tenant in ("alice", "bob", "alice"):
            request = await asked(
                front_end, headers={"X-Tenant-ID": tenant}, agent_hint=HINT, max_tokens=60
            )
            turn = await front_end.engine.turns.get()
            assert turn.agent_session == request.agent.session
            sessions.add(turn.agent_session)
            tools.add(turn.tool)
        assert len(sessions) == len(tools) == 2
        assert all(re.fullmatch(r"[0-9a-f]{16}/ls", tool) for tool in tools)


def test_session_names_are_short_and_hide_the_id():
    longest = agent_session_name("secret" * 40, (1 << 64) - 1)
    assert re.fullmatch(r"j[0-9a-f]{32}", longest)
    assert agent_session_name("a", 1) != agent_session_name("a", 2) != agent_session_name("b", 2)
    assert tool_name("", 7) == ""
    assert tool_name("pytest", 0) == "pytest"
    assert tool_name("two words\n", 0) == "two_words_"
    assert len(tool_name("x" * 1000, (1 << 64) - 1)) <= MAX_NAME_LENGTH


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_tool_is_sent_to_the_engine_at_the_end_of_a_turn(start, scripted, path, stream):
    async with start(scripted("I look.\n```bash\npytest -x\n```")) as front_end:
        request = await asked(front_end, path, agent_hint=HINT, stream=stream)
        turn = await front_end.engine.turns.get()
        assert (turn.epoch, turn.request_id) == (1, request.request_id)
        assert (turn.agent_session, turn.tool) == (agent_session_name("fix-1", 0), "pytest")
        assert front_end.engine.turns.empty()


async def test_a_tool_named_by_the_client_takes_precedence(start, scripted):
    async with start(scripted("```bash\npytest\n```")) as front_end:
        await asked(front_end, agent_hint={**HINT, "tool": "mcp:build/all"}, max_tokens=60)
        assert (await front_end.engine.turns.get()).tool == "mcp:build/all"


async def test_a_turn_without_a_call_or_without_text_ends_too(start, scripted):
    async with start(scripted("```bash\nls\n```")) as front_end:
        await asked(front_end, session_id="s", max_tokens=1)
        assert (await front_end.engine.turns.get()).tool == ""
        await asked(front_end, session_id="s", max_tokens=60, detokenize=False)
        assert (await front_end.engine.turns.get()).tool == ""
        await asked(front_end, session_id="s", max_tokens=60, n=2)
        assert (await front_end.engine.turns.get()).tool == "ls"
        assert front_end.engine.turns.empty()


async def test_a_stop_string_ends_a_turn(start, scripted):
    """The engine receives an abort first."""
    async with start(scripted("```bash\nls\n```\nand so on and on")) as front_end:
        await asked(front_end, session_id="s", max_tokens=60, stop=["```\n", "on"])
        assert (await front_end.engine.turns.get()).tool == "ls"
        assert (await front_end.engine.aborts.get()).reason == "stop_string"


async def test_requests_without_an_agent_session_end_no_turn(start, scripted):
    async with start(scripted("```bash\nls\n```")) as front_end:
        await asked(front_end, max_tokens=60)
        await asked(front_end, session_id="s", max_tokens=60)
        assert (await front_end.engine.turns.get()).agent_session == agent_session_name("s", 0)
        assert front_end.engine.turns.empty()


async def test_a_disconnect_after_the_last_token_ends_the_turn(start, tokenizer):
    async with start(accepts=True) as front_end:
        body = {"prompt": "x", "stream": True, "session_id": "s", "max_tokens": 60}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            request = await front_end.engine.requests.get()
            front_end.engine.emit(request, tokenizer.encode("```bash\nls\n").ids)
            lines = response.aiter_lines()  # httpx disconnects when this iterator is collected
            await anext(lines)
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
            while front_end.app_state.client.num_open:
                await asyncio.sleep(0)
        assert (await front_end.engine.turns.get()).request_id == request.request_id
        assert front_end.engine.aborts.empty()


async def test_errors_aborts_and_disconnects_end_no_turn(start, tokenizer):
    async with start(accepts=True) as front_end:
        engine = front_end.engine
        waiting, request = await begin(front_end, session_id="s", max_tokens=9)
        engine.emit(request, [40])
        engine.refuse(request, ErrorInfo("internal", "broken"))
        assert (await waiting).status_code == 500
        waiting, request = await begin(front_end, session_id="s", max_tokens=9)
        engine.emit(request, [40], finish=FinishReason.ABORT)
        assert (await waiting).json()["choices"][0]["finish_reason"] == "abort"
        waiting, request = await begin(front_end, session_id="s", max_tokens=9)
        engine.emit(request, [40])
        await have(front_end, request, 1)
        waiting.cancel()
        assert (await engine.aborts.get()).reason == "disconnect"
        waiting, request = await begin(front_end, session_id="last", max_tokens=9)
        engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await waiting).status_code == 200
        assert (await engine.turns.get()).agent_session == agent_session_name("last", 0)
        assert engine.turns.empty()


async def test_a_request_that_is_resumed_carries_its_hint(start):
    async with start(accepts=True) as front_end:
        hint = {**HINT, "is_last_step": True, "ttl_ms": 9.5}
        answer, request = await begin(front_end, agent_hint=hint, max_tokens=6)
        front_end.engine.emit(request, [40])
        await have(front_end, request, 1)
        engine, again = await restart(front_end)
        assert again.output_token_ids == ((40,),)
        assert again.agent == request.agent == AgentHint(agent_session_name("fix-1", 0), True, 9.5)
        engine.emit(again, [41], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        turn = await engine.turns.get()
        assert (turn.epoch, turn.request_id) == (2, again.request_id)


async def test_the_end_of_a_turn_of_a_dead_engine_is_not_sent(start, monkeypatch):
    """The last outputs are read after the death is known, so the turn ends between two engines."""
    async with start(accepts=True) as front_end:
        client, old = front_end.app_state.client, front_end.engine
        answer, request = await begin(front_end, session_id="s", max_tokens=6)
        entry = client._open[request.request_id]
        while not entry.accepted:
            await asyncio.sleep(0)
        last_words = old.output(request, [40], finish=FinishReason.LENGTH)
        reconnect = client.reconnect

        def hear_and_reconnect(*new):
            client._process_output(entry, last_words, 0.0)
            reconnect(*new)

        monkeypatch.setattr(client, "reconnect", hear_and_reconnect)
        engine = await front_end.lose_engine()
        engine.announce()
        assert (await answer).status_code == 200
        answer, request = await begin(front_end, session_id="t", max_tokens=6)
        engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        assert (await engine.turns.get()).agent_session == agent_session_name("t", 0)
        assert engine.turns.empty()
        assert old.turns.empty()


async def test_a_failure_to_find_the_tool_does_not_fail_the_answer(start, scripted, monkeypatch):
    def fail(text):
        raise RuntimeError("broken")

    monkeypatch.setattr("api_server.parsers.called_tool.guess_called_tool", fail)
    async with start(scripted("```bash\nls\n```")) as front_end:
        await asked(front_end, session_id="s", max_tokens=60)
        assert (await front_end.engine.turns.get()).tool == ""
