"""Reasoning over /v1/responses, with a reasoning model."""

import pytest

from tests.api_server.conftest import prepared
from tests.api_server.responses_client import answer, ask, events, prompt_of
from tests.api_server.test_reasoning_chat import SAID, TEMPLATE


@pytest.fixture
def served(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)


async def test_reasoning_is_an_item_and_its_tokens_are_counted(start, scripted, served):
    async with start(scripted(SAID), served=served) as front_end:
        whole = await answer(front_end)
        found = (await events(front_end))[-1]["response"]
        for response in (whole, found):
            thought, message = response["output"]
            assert thought["content"] == [{"type": "reasoning_text", "text": "the fox 😀"}]
            assert message["content"][0]["text"] == "over the sea"
        counts = [each["usage"]["output_tokens_details"] for each in (whole, found)]
        assert counts[0] == counts[1]
        assert 0 < counts[0]["reasoning_tokens"] < whole["usage"]["output_tokens"]


async def test_effort_switches_reasoning_in_templates_with_a_switch(
    start, scripted, served, tokenizer
):
    async with start(scripted("over"), served=served) as front_end:
        for effort, end in (("none", "assistant:<think></think>"), ("high", "assistant:")):
            response = await ask(front_end, reasoning={"effort": effort, "summary": "auto"})
            assert response.status_code == 200, response.text
            assert "x-tokend-ignored" not in response.headers
            assert prompt_of(front_end, tokenizer).endswith(end)
        response = await ask(front_end, reasoning={"effort": "some"})
        assert response.json()["error"]["param"] == "reasoning"


async def test_reasoning_can_be_omitted_and_sent_back(start, scripted, served):
    async with start(scripted(SAID), served=served) as front_end:
        hidden = await answer(front_end, include_reasoning=False)
        assert [item["type"] for item in hidden["output"]] == ["message"]
        first = await answer(front_end)
        items = [
            {"role": "user", "content": "x"},
            *first["output"],
            {"role": "user", "content": "y"},
        ]
        response = await ask(front_end, input=items)
        assert response.status_code == 200, response.text
        assert "x-tokend-ignored" not in response.headers


async def test_logprobs_cover_only_the_text(start, scripted, served, tokenizer):
    """Tokens of reasoning, markers and calls are excluded."""
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    fields = {
        "include": ["message.output_text.logprobs"],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    }
    cases = ((SAID, True), (f"{SAID}<to be>", True), (f"{SAID}\n{call}", False))
    for said, ends_so in cases:
        for shown in ({}, {"include_reasoning": False}):
            async with start(scripted(said), served=served, max_model_len=999) as front_end:
                whole = await answer(front_end, **fields, **shown)
                told = await events(front_end, **fields, **shown)
                (part,) = (
                    item["content"][0] for item in whole["output"] if item["type"] == "message"
                )
                text = "".join(entry["token"] for entry in part["logprobs"])
                expected = tokenizer.decode(tokenizer.encode(part["text"]).ids)
                assert text.strip() == expected.strip() + ("<|im_end|>" if ends_so else "")
                (done,) = (each for each in told if each["type"] == "response.output_text.done")
                assert done["logprobs"] == part["logprobs"]
                deltas = [
                    entry
                    for each in told
                    if each["type"] == "response.output_text.delta"
                    for entry in each["logprobs"]
                ]
                assert deltas == part["logprobs"][: len(deltas)]
                assert len(part["logprobs"]) - len(deltas) <= 1


@pytest.mark.parametrize(
    ("mentioned", "expected"),
    [
        ("", {"minimal": "low", "medium": "medium", "xhigh": "high", "max": "high"}),
        ("max", {"high": "high", "xhigh": "max", "max": "max"}),
        ("xhigh", {"minimal": "low", "xhigh": "xhigh", "max": "xhigh"}),
        ("minimal", {"minimal": "minimal", "max": "high"}),
    ],
)
async def test_effort_is_mapped_to_the_nearest_one_of_the_template(
    start, scripted, tokenizer, tmp_path, mentioned, expected
):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    branch = f"{{% if reasoning_effort == '{mentioned}' %}}{{% endif %}}" if mentioned else ""
    (tmp_path / "chat_template.jinja").write_text(branch + "effort {{ reasoning_effort }}.")
    served = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)
    messages = [{"role": "user", "content": "hi"}]
    message = {"model": "toy", "max_tokens": 9, "messages": messages}
    async with start(scripted("over"), served=served) as front_end:
        for effort, known in expected.items():
            bodies = {
                "/v1/chat/completions": {"messages": messages, "reasoning_effort": effort},
                "/v1/responses": {"input": "hi", "reasoning": {"effort": effort}},
                "/v1/messages": {**message, "output_config": {"effort": effort}},
            }
            if effort == "minimal":
                del bodies["/v1/messages"]  # Anthropic has no such effort
            for path, body in bodies.items():
                response = await front_end.http.post(path, json=body)
                assert response.status_code == 200, response.text
                assert "x-tokend-ignored" not in response.headers
                assert prompt_of(front_end, tokenizer) == f"effort {known}."
