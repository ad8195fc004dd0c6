"""Fields of a chat request that control rendering."""

import pytest

from tests.api_server.conftest import prepared

PATH = "/v1/chat/completions"
HELLO = {"role": "user", "content": "hello"}
OPENED = {"role": "assistant", "content": "Well,"}
TEMPLATE = (
    "{% for document in documents or [] %}({{ document.text }}){% endfor %}"
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}"
    "{% if message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %};"
    "{% endfor %}{% if tone is string %}{{ tone }}{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def served(tokenizer, tmp_path):
    """A model whose template reads all variables."""
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=False)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "user:hello;assistant:"),
        ({"add_generation_prompt": False}, "user:hello;"),
        (
            {"messages": [HELLO, OPENED], "continue_final_message": True},
            "user:hello;assistant:Well,",
        ),
        (
            {
                "messages": [HELLO, OPENED],
                "continue_final_message": True,
                "add_generation_prompt": False,
            },
            "user:hello;assistant:Well,",
        ),
        ({"documents": [{"text": "a"}, {"text": "b"}]}, "(a)(b)user:hello;assistant:"),
        ({"documents": []}, "user:hello;assistant:"),
        ({"chat_template_kwargs": {"tone": "kind"}}, "user:hello;kindassistant:"),
        (
            {"messages": [{"role": "user", "content": ["hel", {"type": "text", "text": "lo"}]}]},
            "user:<hel><lo>;assistant:",
        ),
        (
            {"messages": [HELLO, {**OPENED, "reasoning": "hm"}, HELLO]},
            "user:hello;assistant:Well,[hm];user:hello;assistant:",
        ),
        (
            {"messages": [HELLO, {**OPENED, "reasoning_content": "hm"}, HELLO]},
            "user:hello;assistant:Well,[hm];user:hello;assistant:",
        ),
    ],
)
async def test_rendered_prompts(start, scripted, served, tokenizer, fields, prompt):
    async with start(scripted("Hi"), served=served) as front_end:
        response = await front_end.chat(**fields)
        assert response.status_code == 200, response.text
        sent = front_end.engine.requests.get_nowait().prompt_token_ids
        assert sent == tokenizer.encode(prompt, add_special_tokens=False).ids
        fields.setdefault("messages", [HELLO])
        tokens = (await front_end.http.post("/tokenize", json=fields)).json()["tokens"]
        assert tokens == sent


async def test_unused_template_variables_are_reported(start, scripted):
    async with start(scripted("Hi")) as front_end:
        response = await front_end.chat(chat_template_kwargs={"enable_thinking": False})
        assert response.status_code == 200
        assert response.headers["x-tokend-ignored"] == "chat_template_kwargs.enable_thinking"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (
            {"chat_template_kwargs": dict.fromkeys(map(str, range(65)))},
            "chat_template_kwargs",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"documents": ["a"]}, "documents"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"continue_final_message": 1}, "continue_final_message"),
        ({"documents": [{"text": "a" * 500_000}]}, "documents"),
    ],
)
async def test_refused_template_variables(start, scripted, fields, param):
    async with start(scripted("Hi")) as front_end:
        response = await front_end.chat(**fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert front_end.engine.requests.empty()


async def test_oversized_documents_are_not_rendered(start, scripted, served):
    async with start(scripted("Hi"), served=served) as front_end:
        response = await front_end.chat(documents=[{"text": "a" * 500_000}])
        assert response.status_code == 400
        assert "maximum context length is" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
async def test_variables_count_against_the_context(start, served, path):
    """A template need not render what it reads, but its process gets it."""
    body = {"messages": [HELLO], "chat_template_kwargs": {"tone": {"voices": ["a" * 100_000]}}}
    async with start(served=served) as front_end:
        answer = await front_end.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages")
        assert "characters do not fit" in error["message"]
