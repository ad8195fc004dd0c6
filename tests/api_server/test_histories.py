"""Conversations as clients send them back: nothing in them ends an agent's session for good."""

import json
import threading

import pytest

from api_server.generation.encoders.responses.stored import json_size
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from api_server.routes import responses
from api_server.text.chat_template import ChatTemplate, Conversation
from api_server.text.harmony import HarmonyTemplate
from proto.errors import InvalidRequestError
from tests.api_server.conftest import prepared
from tests.api_server.harmony_model import library_encoding
from tests.api_server.test_agents_with_templates import TEMPLATES

USER = {"role": "user", "content": "weather?"}
LAST = {"role": "user", "content": "and?"}
SHOWING = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %};{% endfor %}{% if tools %}{% endif %}"
)
ITEMS_ONLY = SHOWING.replace("| tojson", "| items | list")
CUT = '{"city": "Pa'


@pytest.fixture
def served(tokenizer, tmp_path):
    def serve(template: str = SHOWING):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(template)
        return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)

    return serve


async def rendered(front_end, path: str, **body) -> tuple[str, list[str]]:
    """Return the prompt and the names of ignored fields."""
    count = {"/v1/messages": "/count_tokens", "/v1/responses": "/input_tokens"}.get(path)
    if count:
        counted = await post(front_end, path + count, {"model": "toy", **body})
        assert counted.status_code == 200, counted.text
    response = await post(front_end, path, {"model": "toy", "max_tokens": 9, **body})
    assert response.status_code == 200, response.text
    request = front_end.engine.requests.get_nowait()
    ids, names = request.prompt_token_ids, response.headers.get("x-tokend-ignored", "")
    if count:
        assert counted.json()["input_tokens"] == len(ids)
        assert counted.headers.get("x-tokend-ignored", "") == names
        assert response.json().get("ignored_fields", []) == [*filter(None, names.split(", "))]
    prompt = front_end.app_state.tokenizer.decode(ids, skip_special_tokens=False)
    return prompt, [*filter(None, names.split(", "))]


async def post(front_end, path: str, body: dict):
    if "responses" in path:
        body.pop("max_tokens", None)
    content, headers = json.dumps(body), {"content-type": "application/json"}
    return await front_end.http.post(path, content=content, headers=headers)


def calling(path: str, arguments: object) -> dict:
    """Return a body in whose second message, item or block the assistant calls a tool."""
    if path == "/v1/responses":
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": arguments}
        return {"input": [USER, call, LAST]}
    if path == "/v1/messages":
        call = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
        return {"messages": [USER, {"role": "assistant", "content": [call]}, LAST]}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": [], "tool_calls": [call]}
    return {"messages": [USER, called, LAST]}


PLACES = {
    "/v1/chat/completions": "messages[1].tool_calls[0].function.arguments is not",
    "/v1/responses": "input[1].arguments is not",
    "/v1/messages": "messages[1].content[0].input is not",
}


@pytest.mark.parametrize("path", PLACES)
async def test_arguments_of_any_form_reach_the_template(start, scripted, served, path):
    deep = "[" * 300 + "]" * 300
    async with start(scripted("!"), served=served(), max_model_len=8192) as front_end:
        for arguments, shown in {
            '{"a": 1, "a": 2}': '{"a": 2}',
            '{"a": null}': '{"a": null}',
            CUT: json.dumps(CUT),
            "[1]": "[1]",
            "5": "5",
            "": "{}",
            " ": "{}",
            "null": "{}",
            " null ": "{}",
            deep: f'"{deep}"',
            "[" * 1000: f'"{"[" * 1000}"',
            '{"a": "\\ud83d"}': '{"a": "\ufffd"}',
            "1e999": "Infinity",
            "9" * 5000: json.dumps("9" * 5000),
        }.items():
            prompt, _ = await rendered(front_end, path, **calling(path, arguments))
            assert f"[f {shown}]" in prompt, arguments
        for arguments, shown in [
            ({"a": [None, "\ud83d"]}, '{"a": [null, "\ufffd"]}'),
            (None, "{}"),
            ([1], "[1]"),
            (5, "5"),
        ]:
            prompt, _ = await rendered(front_end, path, **calling(path, arguments))
            assert f"[f {shown}]" in prompt, arguments


@pytest.mark.parametrize("path", PLACES)
async def test_a_template_that_cannot_render_a_text_is_named(start, served, path):
    async with start(served=served(ITEMS_ONLY)) as front_end:
        for arguments in (CUT, "[1]", "5"):
            response = await post(
                front_end, path, {"model": "toy", "max_tokens": 9, **calling(path, arguments)}
            )
            assert response.status_code == 400
            message = response.json()["error"]["message"]
            assert message.startswith(PLACES[path]), message
            assert "chat template cannot render it" in message
            assert "Can only get item pairs from a mapping" in message


@pytest.mark.parametrize("name", sorted(path.stem for path in TEMPLATES.glob("*.jinja")))
def test_templates_render_a_text_or_blame_it(name):
    template = ChatTemplate((TEMPLATES / f"{name}.jinja").read_text(), {"eos_token": "</s>"})
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{cut"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    conversation = Conversation([USER, said])
    if name in ("glm4.5", "qwen3_coder"):
        with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.tool_calls\[0\].*'items'"):
            template.render(conversation)
    elif template.facts.renders_calls:
        assert "{cut" in template.render(conversation)
    else:
        template.render(conversation)


@pytest.mark.parametrize("call_format", TOOL_CALL_FORMATS.values(), ids=TOOL_CALL_FORMATS)
def test_calls_as_text_keep_a_text(call_format):
    for arguments in ("{cut", "[1]"):
        assert arguments in call_format.render_calls([("f", arguments)])


def test_harmony_keeps_a_text():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{cut"}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = HarmonyTemplate(library_encoding(), None).render(Conversation(messages))
    assert "<|message|>{cut<|call|>" in prompt


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ({"content": None, "reasoning": "hm"}, ""),
        ({"reasoning_content": "hm"}, ""),
        ({"content": None}, ""),
        ({"content": [], "annotations": [{"type": "url_citation"}]}, ""),
        ({"content": None, "refusal": "No."}, "No."),
        ({"content": "Hm.", "refusal": "No."}, "Hm.\nNo."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"content": ["Hm.", {"type": "refusal", "refusal": "No."}]}, "Hm.\nNo."),
    ],
)
async def test_earlier_answers_of_a_chat(start, scripted, served, message, shown):
    async with start(scripted("!"), served=served()) as front_end:
        messages = [USER, {"role": "assistant", **message}, LAST]
        prompt, ignored = await rendered(front_end, "/v1/chat/completions", messages=messages)
        assert prompt == f"user:weather?;assistant:{shown};user:and?;"
        assert ignored == ["messages.annotations"] * ("annotations" in message)
        tool = {"role": "tool", "tool_call_id": "a", "content": []}
        prompt, _ = await rendered(front_end, "/v1/chat/completions", messages=[*messages, tool])
        assert prompt.endswith("tool:;")


def text(said: str, kind: str = "input_text") -> dict:
    return {"type": kind, "text": said}


SHELL_RESULT = [
    {"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "no b", "outcome": {"type": "exit", "exit_code": 2}},
    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
]
PATCH = {"type": "update_file", "path": "a", "diff": "+b"}
SECRET = {"type": "encrypted_content", "encrypted_content": "gAAA"}


@pytest.mark.parametrize(
    ("items", "shown", "ignored"),
    [
        (
            [
                {
                    "type": "agent_message",
                    "author": "/root/a",
                    "recipient": "/root",
                    "content": [text("do"), text("ne"), SECRET, {"type": "input_image"}],
                    "id": None,
                }
            ],
            "user:Message from /root/a to /root:\ndo\nne\n"
            "[image: not shown, only text can be read here];",
            ["input.content.encrypted_content", "input.content.input_image"],
        ),
        (
            [{"type": "agent_message", "author": "a", "recipient": "b", "content": [SECRET]}],
            "",
            ["input.content.encrypted_content", "input.agent_message"],
        ),
        (
            [
                {
                    "type": "multi_agent_call",
                    "action": "wait_agent",
                    "arguments": '{"id": 1}',
                    "call_id": "c",
                },
                {
                    "type": "multi_agent_call_output",
                    "action": "wait_agent",
                    "call_id": "c",
                    "output": [text("done", "output_text")],
                },
            ],
            'assistant:[wait_agent {"id": 1}];tool:done;',
            [],
        ),
        (
            [
                {
                    "type": "local_shell_call",
                    "id": "c",
                    "action": {"type": "exec", "command": ["ls"], "user": None},
                    "status": "completed",
                },
                {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
            ],
            'assistant:[local_shell {"type": "exec", "command": ["ls"]}];tool:a.txt;',
            [],
        ),
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls", "ls b"]}},
                {"type": "shell_call_output", "call_id": "c", "output": SHELL_RESULT},
            ],
            'assistant:[shell {"commands": ["ls", "ls b"]}];'
            "tool:a.txt\nno b\nexit code 2\ntimeout;",
            [],
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c", "operation": PATCH},
                {"type": "apply_patch_call_output", "call_id": "c", "status": "failed"},
            ],
            f"assistant:[apply_patch {json.dumps(PATCH)}];tool:failed;",
            [],
        ),
        (
            [
                {
                    "type": "mcp_call",
                    "id": "m",
                    "name": "find",
                    "server_label": "s",
                    "arguments": "{}",
                    "output": "x",
                },
                {
                    "type": "code_interpreter_call",
                    "id": "i",
                    "code": "1+1",
                    "container_id": "k",
                    "outputs": [{"type": "logs", "logs": "2"}, {"type": "image", "url": "u"}],
                },
            ],
            'assistant:[find {}];tool:x;assistant:[code_interpreter {"code": "1+1"}];tool:2;',
            ["input.outputs.image"],
        ),
        (
            [
                {"type": "program", "id": "p", "call_id": "c", "code": "f()", "fingerprint": "x"},
                {"type": "program_output", "id": "q", "call_id": "c", "result": "1"},
            ],
            'assistant:[program {"code": "f()"}];tool:1;',
            [],
        ),
        (
            [
                {"type": "item_reference", "id": "fc_1"},
                {"type": "function_call_output", "call_id": "lost", "output": "21"},
                {"id": "msg_2"},
            ],
            "user:21;",
            ["input.item_reference"],
        ),
        (
            [
                {"type": kind, "id": f"{kind}_1", "encrypted_content": "gAAA", "more": 1}
                for kind in ("compaction", "compaction_trigger", "context_compaction", "other")
            ],
            "",
            [
                "input.compaction",
                "input.compaction_trigger",
                "input.context_compaction",
                "input.other",
            ],
        ),
        (
            [{"type": "context_compaction", "encrypted_content": "tokend-summary:so far"}],
            "user:Summary of the conversation up to here:\nso far;",
            [],
        ),
        (
            [
                {"type": "computer_call", "call_id": "c", "action": {"type": "click"}},
                {"type": "computer_call_output", "call_id": "c", "output": {"type": "x"}},
                {"type": "tool_search_output", "call_id": "c", "tools": []},
                {"type": "mcp_call", "name": "f", "arguments": "{}", "output": None},
                {"type": "configuration_update", "reasoning": {"effort": "high"}},
            ],
            "",
            [
                "input.computer_call",
                "input.computer_call_output",
                "input.tool_search_output",
                "input.mcp_call",
                "input.configuration_update",
            ],
        ),
    ],
)
async def test_items_of_agents(start, scripted, served, items, shown, ignored):
    async with start(scripted("!"), served=served(), max_model_len=4096) as front_end:
        prompt, named = await rendered(front_end, "/v1/responses", input=[USER, *items, LAST])
        assert prompt == f"user:weather?;{shown}user:and?;"
        assert named == ignored


async def test_results_without_text(start, scripted, served):
    """A result that is missing or a number is the server's or the client's own business."""
    patch = {"type": "apply_patch_call", "call_id": "c", "operation": PATCH}
    for items, shown in [
        ([patch, {"type": "apply_patch_call_output", "call_id": "c"}], "tool:;"),
        (
            [{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": 5}],
            "assistant:[f {}];tool:5;",
        ),
        (
            [{"type": "mcp_call", "id": "m", "name": "f", "arguments": "{}", "output": False}],
            "tool:false;",
        ),
        ([{"type": "agent_message", "author": "a", "recipient": "b", "content": None}], ""),
        ([{"type": "reasoning", "summary": {"text": "hm"}, "content": None}], "assistant:;"),
        ([{"type": "reasoning", "summary": [{"type": "new"}]}], ""),
    ]:
        async with start(scripted("!"), served=served(), max_model_len=4096) as front_end:
            prompt, _ = await rendered(front_end, "/v1/responses", input=[USER, *items, LAST])
            assert prompt.endswith(f"{shown}user:and?;"), prompt


async def test_a_result_without_the_id_of_its_call(start, served):
    async with start(served=served()) as front_end:
        for field in ({}, {"id": "fco_1"}):
            items = [USER, {"type": "function_call_output", "output": "21", **field}]
            response = await post(front_end, "/v1/responses", {"model": "toy", "input": items})
            assert response.json()["error"]["message"] == "input[1].call_id is missing"
        odd = {"type": "reasoning", "summary": 5}
        response = await post(front_end, "/v1/responses", {"model": "toy", "input": [USER, odd]})
        assert response.json()["error"]["message"].startswith("input[1].summary must be")


async def test_many_calls_that_a_template_cannot_render_are_one_more_rendering():
    rendered = []
    template = ChatTemplate(ITEMS_ONLY, {})
    inner = template.compile()

    class Counting:
        def render(self, values):
            rendered.append(values)
            return inner.render(values)

    template._template = Counting()
    calls = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]
    calls += [{"id": "a", "type": "function", "function": {"name": "f", "arguments": CUT}}] * 500
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.tool_calls\[1\]"):
        template.render(Conversation([USER, said, said]))
    assert len(rendered) == 2


@pytest.mark.parametrize("content", [5, {"type": "text"}, True, [5]])
async def test_a_refusal_hides_no_invalid_content(start, served, content):
    async with start(served=served()) as front_end:
        said = {"role": "assistant", "content": content, "refusal": "No."}
        body = {"model": "toy", "messages": [USER, said, LAST]}
        assert (await post(front_end, "/v1/chat/completions", body)).status_code == 400


async def test_references_to_stored_items_are_resolved(start, scripted, served):
    async with start(scripted("see"), served=served(), max_model_len=4096) as front_end:
        first = (await post(front_end, "/v1/responses", {"input": "one"})).json()
        front_end.engine.requests.get_nowait()
        said = {"type": "item_reference", "id": first["output"][0]["id"]}
        prompt, named = await rendered(front_end, "/v1/responses", input=[USER, said, LAST])
        assert prompt == "user:weather?;assistant:see;user:and?;"
        fields = {"previous_response_id": first["id"], "input": [said, LAST]}
        prompt, more = await rendered(front_end, "/v1/responses", **fields)
        assert prompt == "user:one;assistant:see;user:and?;"
        assert named + more == []


async def test_references_do_not_multiply_items(start, scripted, served, monkeypatch):
    """A short body cannot make a long conversation, and a long one is measured on a thread."""
    threads = []

    def measured(value):
        threads.append(threading.current_thread() is threading.main_thread())
        return json_size(value)

    async with start(scripted("see"), served=served(), max_model_len=4096) as front_end:
        large = {"type": "unknown", "id": "msg_1", "data": "x" * 50_000}
        first = await post(front_end, "/v1/responses", {"input": [large, USER]})
        assert first.status_code == 200
        front_end.engine.requests.get_nowait()
        monkeypatch.setattr(responses, "json_size", measured)
        said = {"type": "item_reference", "id": "msg_1"}
        refused = await post(front_end, "/v1/responses", {"input": [USER, *[said] * 1100]})
        problem = refused.json()["error"]
        assert (refused.status_code, problem["param"]) == (400, "input")
        assert "1100 references to the item msg_1" in problem["message"]
        assert threads == []
        for fields in ({"input": [USER, said]}, {"previous_response_id": first.json()["id"]}):
            body = {"input": [USER], **fields}
            assert (await post(front_end, "/v1/responses", body)).status_code == 200
            assert threads.pop() is False
            monkeypatch.setattr(responses, "MAX_BODY_BYTES", 50_000)
            refused = await post(front_end, "/v1/responses", body)
            problem = refused.json()["error"]
            assert (refused.status_code, problem["param"]) == (400, "input")
            assert "more than 50000" in problem["message"]
            monkeypatch.undo()
            monkeypatch.setattr(responses, "json_size", measured)


BLOCKS = [
    *({"type": kind, "tool": {"name": "x"}} for kind in ("tool_addition", "tool_removal")),
    {"type": "mcp_tool_listing", "mcp_server_name": "m", "tools": []},
    {"type": "something_new", "text": 5},
]
NAMES = ["tool_addition", "tool_removal", "mcp_tool_listing", "something_new"]
DOCUMENT = {"type": "document", "title": "Notes", "source": {"type": "text", "data": "warm"}}
FOUND = {
    "type": "search_result",
    "title": "T",
    "source": "http://s",
    "content": [text("d", "text")],
}


async def test_blocks_of_agents(start, scripted, served):
    call = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    parts = {"type": "content", "content": [text("p", "text"), {"type": "image"}]}
    pdf = {"type": "document", "source": {"type": "base64", "data": "eA=="}}
    result = [FOUND, DOCUMENT, {"type": "document", "source": parts}, pdf, *BLOCKS]
    messages = [
        {"role": "user", "content": [DOCUMENT, *BLOCKS, FOUND]},
        {"role": "assistant", "content": [{"type": "compaction", "content": "so far"}, call]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}],
        },
        {"role": "system", "content": BLOCKS},
    ]
    media = "[{}: not shown, only text can be read here]".format
    async with start(scripted("!"), served=served(), max_model_len=4096) as front_end:
        prompt, named = await rendered(front_end, "/v1/messages", messages=messages)
        assert prompt == (
            "user:Notes\nwarm\nT\nhttp://s\nd;"
            "assistant:Summary of the conversation up to here:\nso far\n[find {}];"
            f"tool:T\nhttp://s\nd\nNotes\nwarm\np\n{media('image')}\n{media('document')};"
        )
        assert named == [
            *(f"messages.content.{name}" for name in NAMES),
            "messages.content.tool_result.document",
            *(f"messages.content.tool_result.{name}" for name in NAMES),
        ]
        messages = [USER, {"role": "assistant", "content": "so"}, messages[-1]]
        prompt, _ = await rendered(front_end, "/v1/messages", messages=messages)
        assert prompt == "user:weather?;assistant:so;", "the answer does not continue the last one"


@pytest.mark.parametrize(
    ("role", "block", "words"),
    [
        ("user", {"type": "audio"}, "reads no part of the type audio"),
        ("user", {"type": "document", "source": {"type": "url", "url": "x"}}, "type document"),
        ("user", {"type": "tool_use", "id": "x", "name": "y", "input": {}}, "type tool_use"),
        ("user", {"type": "something_new"}, "only blocks of the type something_new"),
    ],
)
async def test_blocks_that_are_refused(start, role, block, words):
    async with start() as front_end:
        body = {"model": "toy", "max_tokens": 9, "messages": [{"role": role, "content": [block]}]}
        response = await post(front_end, "/v1/messages", body)
        assert response.status_code == 400
        assert words in response.json()["error"]["message"]
