"""Reasoning in chats over HTTP, against a scripted engine."""

import pytest
from tokenizers import AddedToken

from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import ThinkingRule
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import byte_level_tokenizer, prepared

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
SAID = "<think>\nthe fox 😀\n</think>\n\nover the sea"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


@pytest.fixture
def served(tokenizer, tmp_path):
    """A reasoning model."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)


def joined(events, name):
    return "".join(event["choices"][0]["delta"].get(name) or "" for event in events)


async def test_non_streaming_response(start, scripted, served, tokenizer):
    async with start(scripted(SAID), served=served) as front_end:
        body = (await front_end.chat()).json()
        assert body["choices"][0]["message"] == {
            "role": "assistant",
            "content": "over the sea",
            "refusal": None,
            "reasoning": "the fox 😀",
        }
        counts = [len(tokenizer.encode(text).ids) for text in ("<think>", "</think>")]
        assert counts[0] > 1  # tests a marker of several tokens
        number = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert number == len(tokenizer.encode("\nthe fox 😀\n").ids)
        assert front_end.engine.requests.get_nowait().thinking is None


@pytest.mark.parametrize("interval", [1, 3])
async def test_streaming_response(start, scripted, served, interval):
    async with start(scripted(SAID), served=served) as front_end:
        events = await front_end.events(
            PATH,
            messages=MESSAGES,
            stream_interval=interval,
            stream_options={"include_usage": True},
        )
        assert joined(events[:-2], "reasoning") == "the fox 😀"
        assert joined(events[:-2], "content") == "over the sea"
        names = [name for event in events[:-2] for name in event["choices"][0]["delta"]]
        assert names.index("reasoning") < len(names) - 1 - names[::-1].index("content")
        assert not any("<" in str(event) for event in events)
        assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        whole = (await front_end.chat()).json()
        assert whole["usage"] == events[-2]["usage"]


@pytest.mark.parametrize("inside", [False, True])
async def test_reasoning_tokens_are_counted_without_text(
    start, scripted, served, tokenizer, tmp_path, inside
):
    said = SAID
    if inside:  # the prompt ends with the start marker
        said = SAID.removeprefix("<think>")
        template = TEMPLATE.replace("assistant:{%", "assistant:<think>{%", 1)
        assert template != TEMPLATE
        (tmp_path / "chat_template.jinja").write_text(template)
    async with start(scripted(said), served=served) as front_end:
        body = (await front_end.chat(detokenize=False)).json()
        assert not body["choices"][0]["message"]["content"]
        assert not body["choices"][0]["message"].get("reasoning")
        number = body["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert number == len(tokenizer.encode("\nthe fox 😀\n").ids)


async def test_reasoning_can_be_omitted(start, scripted, served):
    async with start(scripted(SAID), served=served) as front_end:
        body = (await front_end.chat(include_reasoning=False)).json()
        assert "reasoning" not in body["choices"][0]["message"]
        assert body["choices"][0]["message"]["content"] == "over the sea"
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        events = await front_end.events(PATH, messages=MESSAGES, include_reasoning=False)
        assert joined(events[:-1], "reasoning") == ""
        assert joined(events[:-1], "content") == "over the sea"


async def test_content_is_null_without_content_tokens(start, scripted, served):
    async with start(scripted("<think>\nthe fox"), served=served) as front_end:
        message = (await front_end.chat()).json()["choices"][0]["message"]
        assert message["content"] is None
        assert message["reasoning"] == "the fox"
    async with start(scripted("<think>\n</think>"), served=served) as front_end:
        message = (await front_end.chat()).json()["choices"][0]["message"]
        assert message["content"] == ""


@pytest.mark.parametrize("n", [1, 3])
async def test_every_choice_has_its_reasoning(start, scripted, served, n):
    async with start(scripted(SAID), served=served) as front_end:
        body = (await front_end.chat(n=n, temperature=1.0, logprobs=True)).json()
        for choice in body["choices"]:
            assert choice["message"]["reasoning"] == "the fox 😀"
            assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"] // n


@pytest.mark.parametrize(
    "fields",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
async def test_thinking_can_be_switched_off(start, scripted, served, tokenizer, fields):
    async with start(scripted("over <think> it"), served=served) as front_end:
        body = (await front_end.chat(**fields)).json()
        assert body["choices"][0]["message"]["content"] == "over <think> it"
        assert "reasoning" not in body["choices"][0]["message"]
        prompt = "user:hello;assistant:<think></think>"
        request = front_end.engine.requests.get_nowait()
        assert request.prompt_token_ids == tokenizer.encode(prompt).ids


async def test_a_template_variable_of_the_client_takes_precedence(
    start, scripted, served, tokenizer
):
    async with start(scripted("x"), served=served) as front_end:
        await front_end.chat(
            reasoning_effort="high", chat_template_kwargs={"enable_thinking": False}
        )
        request = front_end.engine.requests.get_nowait()
        assert tokenizer.decode(request.prompt_token_ids).endswith("<think></think>")


async def test_parser_none_leaves_the_text_unchanged(start, scripted, served):
    config = FrontEndConfig(reasoning_parser="none")
    async with start(scripted(SAID), served=served, config=config) as front_end:
        body = (await front_end.chat()).json()
        assert body["choices"][0]["message"]["content"] == SAID
        assert "completion_tokens_details" not in body["usage"]
        response = await front_end.chat(thinking_token_budget=3)
        assert response.json()["error"]["param"] == "thinking_token_budget"


async def test_the_thinking_budget_reaches_the_engine(start, scripted, served, tokenizer):
    async with start(scripted(SAID), served=served) as front_end:
        await front_end.chat(thinking_token_budget=5)
        assert front_end.engine.requests.get_nowait().thinking == ThinkingRule(
            begun=False,
            start="<think>",
            end="</think>",
            end_token_ids=tuple(tokenizer.encode("</think>").ids),
            budget=5,
        )
        await front_end.chat(
            thinking_token_budget=5, chat_template_kwargs={"enable_thinking": False}
        )
        assert front_end.engine.requests.get_nowait().thinking is None


async def test_a_grammar_applies_after_the_reasoning(start, scripted, served):
    async with start(scripted(SAID), served=served) as front_end:
        await front_end.chat(response_format={"type": "json_object"})
        request = front_end.engine.requests.get_nowait()
        assert isinstance(request.grammar, GrammarSource)
        assert request.thinking is not None
        assert request.thinking.budget is None


@pytest.mark.parametrize("skips", [True, False])
async def test_markers_that_are_special_tokens(start, tmp_path, skips):
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(each, special=True) for each in ("<think>", "</think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    model = prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)
    ids = [*tokenizer.encode(SAID).ids, 2]
    async with start(lambda request, choice: ids, served=model) as front_end:
        body = (await front_end.chat(skip_special_tokens=skips, thinking_token_budget=99)).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("the fox 😀", "over the sea")
        rule = front_end.engine.requests.get_nowait().thinking
        assert rule.start_token_id == tokenizer.token_to_id("<think>")
        assert rule.end_token_ids == (tokenizer.token_to_id("</think>"),)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"thinking_token_budget": 5}, "thinking_token_budget"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"include_reasoning": "yes"}, "include_reasoning"),
    ],
)
async def test_reasoning_fields_need_a_reasoning_model(start, scripted, fields, param):
    async with start(scripted("Hi")) as front_end:
        response = await front_end.chat(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert (await front_end.chat(reasoning_effort="none")).status_code == 200
        effort = await front_end.chat(reasoning_effort="high")
        assert effort.status_code == 200
        assert effort.headers["x-tokend-ignored"] == "reasoning_effort"
        older = (await front_end.chat(functions=[{"name": "f"}])).json()["error"]
        assert older["message"] == "functions is not available here: use tools"
        assert (await front_end.chat(include_reasoning=False)).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"allowed_token_ids": [5]}, {"bad_words": ["x"]}, {"use_beam_search": True, "n": 2}]
)
async def test_the_end_marker_of_reasoning_must_be_allowed(start, scripted, served, fields):
    async with start(scripted("Hi"), served=served) as front_end:
        response = await front_end.chat(thinking_token_budget=5, **fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(fields))


ASKED = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"model": "toy", "max_tokens": 99, "messages": MESSAGES},
}


@pytest.mark.parametrize("path", ASKED)
async def test_stop_strings_are_looked_for_in_the_content(start, scripted, served, path):
    """In neither the reasoning nor the line breaks after it."""
    stop = "stop_sequences" if path == "/v1/messages" else "stop"
    body = {**ASKED[path], stop: ["fox", "\n\n", "</think>", " sea"]}
    async with start(scripted(SAID), served=served) as front_end:
        answer = (await front_end.http.post(path, json=body)).json()
    if path == "/v1/chat/completions":
        (choice,) = answer["choices"]
        assert choice["message"]["content"] == "over the"
        assert choice["message"]["reasoning"] == "the fox 😀"
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", " sea")
    elif path == "/v1/responses":
        reasoning, content = answer["output"]
        assert reasoning["content"][0]["text"] == "the fox 😀"
        assert content["content"][0]["text"] == "over the"
    else:
        thinking, content = answer["content"]
        assert (thinking["thinking"], content["text"]) == ("the fox 😀", "over the")
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " sea")


@pytest.mark.parametrize(("shows", "content"), [(False, "over the"), (True, "over the sea")])
async def test_a_stop_string_in_streamed_content(start, scripted, served, shows, content):
    async with start(scripted(SAID + "over"), served=served) as front_end:
        events = await front_end.events(
            PATH, messages=MESSAGES, stop=["fox", " sea"], include_stop_str_in_output=shows
        )
    assert joined(events[:-1], "reasoning") == "the fox 😀"
    assert joined(events[:-1], "content") == content
    assert events[-2]["choices"][0]["stop_reason"] == " sea"
