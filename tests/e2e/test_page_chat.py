"""Chats of the page in a real browser: what is sent, what is kept, branches, and the gauge.

`script_answers` lets a test decide when an answer goes on; the other answers are the model's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.visitor import AUTHORIZED, CHROMIUM, PHONE, Visitor, script_answers

pytestmark = [
    pytest.mark.suite("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
Visit = Callable[..., Visitor]


def send(page: Any, message: str) -> None:
    page.fill("#message", message)
    page.press("#message", "Enter")
    page.wait_for_function(
        "(text) => chats.at(-1)?.body.messages.at(-1).content === text", arg=message
    )


def answer(page: Any, text: str, reason: str = "stop") -> None:
    page.evaluate(
        "([text, reason]) => { chats.at(-1).add(text); chats.at(-1).end(reason); }", [text, reason]
    )
    page.wait_for_selector("#busy", state="hidden")


def sent(page: Any, index: int = -1) -> list[tuple[str, str]]:
    """Return role and content of the messages of a request."""
    messages = page.evaluate("(index) => chats.at(index).body.messages", index)
    return [(each["role"], each["content"]) for each in messages]


def shown(page: Any) -> list[tuple[str, str]]:
    """Return role and text of the turns that the page shows."""
    return [
        tuple(each)
        for each in page.evaluate(
            """() => [...document.querySelectorAll("#turns .turn")].map((turn) => [
                turn.classList.contains("user") ? "user" : "assistant",
                turn.querySelector(".said, .markdown").innerText.trim(),
            ])"""
        )
    ]


def act(page: Any, turn: int, words: str) -> None:
    """Click a button below a turn."""
    page.click(f".turn >> nth={turn} >> .turn-actions >> button:text-is('{words}')")


def scripted(visit: Visit, **options: Any) -> Any:
    page = visit("chat", **options).page
    script_answers(page)
    return page


# No turn is sent that the page does not show.


def test_a_new_chat_sends_nothing_of_an_answer_that_still_streams(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    page.evaluate("chats[0].add('one')")
    page.wait_for_selector(".markdown >> text=one")
    page.click("#chat-new")
    assert shown(page) == []
    send(page, "second")
    assert sent(page) == [("user", "second")]
    page.evaluate("chats[0].add(' more'); chats[0].end()")
    answer(page, "two")
    assert shown(page) == [("user", "second"), ("assistant", "two")]
    send(page, "third")
    assert sent(page) == [("user", "second"), ("assistant", "two"), ("user", "third")]
    answer(page, "three")
    page.click("#conversations >> text=first")
    page.wait_for_selector(".markdown >> text=one more")
    assert shown(page) == [("user", "first"), ("assistant", "one more")]
    send(page, "fourth")
    assert sent(page) == [*shown(page)[:2], ("user", "fourth")]


def test_two_conversations_generate_at_once_and_keep_apart(visit: Visit) -> None:
    page = scripted(visit)
    for name in ("red", "blue"):
        page.click("#chat-new")
        send(page, name)
    for text in ("one ", "two "):
        page.evaluate(
            "(text) => chats.forEach((chat) => chat.add(chat.body.messages[0].content + text))",
            text,
        )
    page.wait_for_selector(".markdown >> text=blueone bluetwo")
    assert page.locator("#conversations .running").count() == 2
    page.click("#conversations >> text=red")
    page.wait_for_selector(".markdown >> text=redone redtwo")
    assert page.locator(".turn").count() == 2
    page.keyboard.press("Escape")
    page.wait_for_selector(".ending >> text=stopped by you")
    assert page.evaluate("chats.map((chat) => chat.isStopped)") == [True, False]
    page.click("#busy")
    page.wait_for_selector("#busy", state="hidden")
    assert page.evaluate("chats.map((chat) => chat.isStopped)") == [True, True]


@pytest.mark.parametrize("end", ["refused", "stopped", "lost"])
def test_an_exchange_without_an_answer_is_not_sent_again(end: str, visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    answer(page, "one")
    if end == "refused":
        error = {"message": "temperature must be at most 2", "param": "temperature"}
        page.evaluate("(error) => { window.refusal = { status: 400, error }; }", error)
    send(page, "unanswered")
    if end == "stopped":
        page.keyboard.press("Escape")
    if end == "lost":
        page.evaluate("chats.at(-1).lose()")
    page.wait_for_selector(".turn.assistant.lost")
    page.wait_for_selector("#busy", state="hidden")
    buttons = page.locator(".turn:last-child .turn-actions button").all_inner_texts()
    assert buttons == ["Try again", "Delete"]
    words = {"refused": "400: temperature must", "stopped": "stopped by you", "lost": "connection"}
    assert words[end] in page.inner_text(".turn:last-child .summary")
    if end == "refused":
        assert "at most 2" in page.inner_text("#p-temperature-error")
    assert shown(page)[2] == ("user", "unanswered")
    send(page, "next")
    assert sent(page) == [("user", "first"), ("assistant", "one"), ("user", "next")]
    answer(page, "two")
    assert shown(page) == [*sent(page), ("assistant", "two")]
    page.click(".turn.user >> nth=1 >> button[aria-label='Previous question']")
    assert shown(page)[2] == ("user", "unanswered")
    act(page, 3, "Try again")
    assert sent(page) == [("user", "first"), ("assistant", "one"), ("user", "unanswered")]
    answer(page, "three")
    assert shown(page) == [*sent(page), ("assistant", "three")]


@pytest.mark.parametrize("end", ["stopped", "lost"])
def test_a_partial_answer_is_sent_as_it_is_shown(end: str, visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    page.evaluate("chats[0].add('half an')")
    page.wait_for_selector(".markdown >> text=half an")
    if end == "stopped":
        page.keyboard.press("Escape")
    else:
        page.evaluate("chats[0].lose()")
    page.wait_for_selector("#busy", state="hidden")
    send(page, "next")
    assert sent(page) == [("user", "first"), ("assistant", "half an"), ("user", "next")]


def test_the_system_message_is_shown_where_it_is_sent(visit: Visit) -> None:
    page = scripted(visit, **PHONE)
    page.click("#parameters summary >> nth=0")
    page.fill("#p-system", "Be brief.")
    page.click("#parameters summary >> nth=0")
    assert page.is_hidden("#p-system")
    assert page.inner_text("#system-line") == "System message Be brief."
    send(page, "first")
    assert sent(page) == [("system", "Be brief."), ("user", "first")]


# Edit, regenerate, branches, delete, continue.


def test_questions_are_edited_and_answers_regenerated_in_branches(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    answer(page, "one")
    send(page, "second")
    answer(page, "two")
    act(page, 1, "Regenerate")
    assert sent(page) == [("user", "first")]
    answer(page, "one again")
    assert shown(page) == [("user", "first"), ("assistant", "one again")]
    assert "2 of 2" in page.inner_text(".turn.assistant .branches")
    page.click(".turn.assistant >> button[aria-label='Previous answer']")
    whole = [("user", "first"), ("assistant", "one"), ("user", "second"), ("assistant", "two")]
    assert shown(page) == whole
    act(page, 2, "Edit")
    page.fill(".edited", "second, changed")
    page.press(".edited", "Enter")
    assert sent(page) == [*whole[:2], ("user", "second, changed")]
    answer(page, "three")
    assert shown(page) == [*sent(page), ("assistant", "three")]
    act(page, 0, "Edit")
    page.keyboard.press("Escape")
    assert page.locator(".edited").count() == 0
    page.reload()
    page.wait_for_selector(".markdown >> text=three")
    assert shown(page)[2:] == [("user", "second, changed"), ("assistant", "three")]
    page.click(".turn.user >> nth=1 >> button[aria-label='Previous question']")
    assert shown(page) == whole


def test_a_deleted_turn_takes_what_follows_with_it_and_comes_back(visit: Visit) -> None:
    page = scripted(visit)
    for question, text in (("first", "one"), ("second", "two")):
        send(page, question)
        answer(page, text)
    whole = shown(page)
    act(page, 2, "Delete")
    assert shown(page) == whole[:2]
    page.click("#notice-undo")
    assert shown(page) == whole
    act(page, 2, "Delete")
    send(page, "third")
    assert sent(page) == [*whole[:2], ("user", "third")]


def test_a_cut_answer_is_continued_where_it_ended(visit: Visit, guarded: Daemon) -> None:
    """By the model: the two parts are the answer that one request gives."""
    visitor = visit("chat")
    page = visitor.page
    bodies: list[Any] = []
    page.on(
        "request",
        lambda each: (
            bodies.append(each.post_data_json) if "chat" in each.url and each.post_data else None
        ),
    )
    question = "Count from one to twenty in words."
    for name, value in (
        ("temperature", "0"),
        ("max_tokens", "3"),
        ("system", "Answer in one sentence."),
    ):
        page.fill(f"#p-{name}", value)
    page.fill("#message", question)
    page.press("#message", "Enter")
    page.wait_for_selector(".ending >> text=cut at Max tokens")
    first = page.evaluate("document.querySelector('.turn .tokens').textContent")
    act(page, 1, "Continue")
    page.wait_for_selector(".turn .summary >> text=continuation 3 tokens")
    visitor.wait_done()
    assert bodies[1]["continue_final_message"] is True
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": first}
    both = page.evaluate("document.querySelector('.turn .tokens').textContent")
    assert len(both) > len(first)
    assert both.startswith(first)
    whole = bodies[0] | {"stream": False, "max_tokens": 6, "stream_options": None}
    reply = httpx.post(f"{guarded.url}/v1/chat/completions", json=whole, headers=AUTHORIZED).json()
    assert reply["choices"][0]["message"]["content"] == both
    assert page.locator(".turn").count() == 2


def test_the_gauge_counts_with_the_servers_tokenizer(visit: Visit, guarded: Daemon) -> None:
    visitor = visit("chat")
    page = visitor.page
    page.fill("#p-system", "Be brief.")
    page.fill("#p-max_tokens", "20")
    page.fill("#message", "What is the capital of France?")

    def counted(*messages: tuple[str, str]) -> dict[str, int]:
        listed = [{"role": role, "content": content} for role, content in messages]
        prompts = listed[-1]["role"] != "assistant"
        body = {"messages": listed, "add_generation_prompt": prompts}
        return httpx.post(f"{guarded.url}/tokenize", json=body, headers=AUTHORIZED).json()

    def gauge(reply: dict[str, int]) -> None:
        words = f"{reply['count']} of {reply['max_model_len']:,} tokens"
        page.wait_for_selector(f"#gauge >> text={words}")

    before = ("system", "Be brief."), ("user", "What is the capital of France?")
    gauge(counted(*before))
    page.press("#message", "Enter")
    page.wait_for_selector(".ending")
    page.fill("#message", "And of Italy?")
    text = page.evaluate("document.querySelector('.turn .tokens').textContent")
    gauge(counted(*before, ("assistant", text), ("user", "And of Italy?")))
    page.fill("#message", "word " * 5000)
    page.wait_for_selector("#gauge.full")


def test_presets_keep_system_message_and_parameters(visit: Visit) -> None:
    visitor = visit("chat")
    page = visitor.page
    page.fill("#p-system", "<b>You are a pirate.</b>")
    page.fill("#p-temperature", "1.5")
    page.click("#preset-save")
    page.fill("#text-input", "Pirate <i>")
    page.keyboard.press("Enter")
    page.wait_for_selector("#presets >> text=Pirate <i>", state="attached")
    page.fill("#p-system", "")
    page.fill("#p-temperature", "0.1")
    page.wait_for_timeout(500)  # the form is saved 0.3 s after a change
    page.reload()
    page.wait_for_function("() => document.getElementById('p-temperature').value === '0.1'")
    page.select_option("#presets", "Pirate <i>")
    assert page.input_value("#p-system") == "<b>You are a pirate.</b>"
    assert page.input_value("#p-temperature") == "1.5"
    page.click("#preset-delete")
    page.wait_for_selector("#presets >> text=None yet", state="attached")


# What the browser keeps.


def test_a_reload_keeps_conversation_system_message_and_parameters(visit: Visit) -> None:
    visitor = visit("chat")
    page = visitor.page
    for name, value in (
        ("temperature", "0"),
        ("max_tokens", "20"),
        ("system", "Answer in one sentence."),
    ):
        page.fill(f"#p-{name}", value)
    page.fill("#message", "What is the capital of France?")
    page.press("#message", "Enter")
    page.wait_for_selector(".ending")
    visitor.wait_done()
    before = shown(page), page.inner_text(".summary")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")
    page.reload()
    page.wait_for_selector(".ending")
    assert (shown(page), page.inner_text(".summary")) == before
    values = [page.input_value(f"#p-{name}") for name in ("temperature", "max_tokens", "system")]
    assert values == ["0", "20", "Answer in one sentence."]
    page.click("#chat-new")
    assert shown(page) == []
    page.fill("#p-temperature", "1")
    page.click("#conversations a")
    page.wait_for_selector(".ending")
    assert page.input_value("#p-temperature") == "0"


def test_conversations_are_searched_renamed_and_deleted(visit: Visit) -> None:
    page = scripted(visit)
    for question, text in (
        ("about ships", "they sail"),
        ("about cats", "they purr"),
        ("about dogs", "they bark"),
    ):
        page.click("#chat-new")
        send(page, question)
        answer(page, text)
    titles = "#conversations .title"
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 3")
    assert page.locator(titles).all_inner_texts() == ["about dogs", "about cats", "about ships"]
    page.fill("#history-search", "PURR they")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 1")
    assert page.inner_text(titles) == "about cats"
    page.hover("#conversations li")
    page.click("#conversations >> text=Rename")
    page.fill("#text-input", "Felines")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{titles} >> text=Felines")
    page.fill("#history-search", "nothing of this")
    page.wait_for_selector("text=No conversation has these words.")
    page.fill("#history-search", "")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 3")
    page.hover("#conversations li >> nth=0")
    page.click("#conversations li >> nth=0 >> text=Delete")
    page.click("#sure-dialog >> text=Cancel")
    assert page.locator("#conversations li").count() == 3
    page.click("#conversations li >> nth=0 >> text=Delete")
    page.click("#sure-dialog [value=yes]")
    page.wait_for_function("() => document.querySelectorAll('#conversations li').length === 2")
    page.click("#history-clear")
    page.wait_for_selector("#sure-dialog >> text=all 2 conversations")
    page.click("#sure-dialog [value=yes]")
    page.wait_for_selector("text=No conversations yet.")
    assert shown(page) == []
    page.reload()
    page.wait_for_selector("text=No conversations yet.")


def test_export_and_import_restore_conversations(visit: Visit, tmp_path: Path) -> None:
    page = scripted(visit)
    send(page, "first")
    answer(page, "one")
    act(page, 1, "Regenerate")
    answer(page, "two")
    with page.expect_download() as download:
        page.click("#history-export")
    path = tmp_path / "export.json"
    download.value.save_as(path)
    file = json.loads(path.read_text())
    assert [len(each["turns"]) for each in file["conversations"]] == [3]
    other = scripted(visit)
    other.set_input_files("#history-file", path)
    other.wait_for_selector("text=1 conversation imported.")
    other.click("#conversations a")
    other.wait_for_selector(".markdown >> text=two")
    assert shown(other) == [("user", "first"), ("assistant", "two")]
    other.click("button[aria-label='Previous answer']")
    assert shown(other)[1] == ("assistant", "one")
    other.set_input_files("#history-file", path)
    other.wait_for_selector("#conversations li >> nth=0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"conversations": []}', '"format" must be'),
        ('{"format": "tokend conversations", "version": 2, "conversations": []}', "newer version"),
        ('[{"id": "x>"}]', "conversations[0].id must be 1 to 64 letters"),
        ('[{"turns": 1}]', "conversations[0].turns must be a list"),
        ('[{"turns": [{"id": "a", "parent": "b"}]}]', "turns[0].parent must be an earlier turn"),
        ('[{"turns": [{"id": "a", "parent": null, "role": "x"}]}]', "turns[0].role must be one of"),
        (
            '[{"turns": [{"id": "a", "parent": null, "role": "user", "content": 1}]}]',
            "content must be a text",
        ),
    ],
)
def test_files_that_are_no_export_are_refused_by_name(
    text: str, words: str, visit: Visit, tmp_path: Path
) -> None:
    page = visit("chat").page
    path = tmp_path / "import.json"
    if text.startswith("["):
        conversations = [{"id": "c", "title": "", **each} for each in json.loads(text)]
        text = json.dumps(
            {"format": "tokend conversations", "version": 1, "conversations": conversations}
        )
    path.write_text(text)
    page.set_input_files("#history-file", path)
    page.wait_for_selector("#notice-words >> text=Nothing was imported.")
    assert words in page.inner_text("#notice-words")
    assert page.locator("#conversations li").count() == 0


def test_stored_and_imported_text_is_not_markup(visit: Visit, tmp_path: Path) -> None:
    attack = "<img src=x onerror=window.ran=1><script>window.ran=2</script>"
    turns = [
        {"id": "__proto__", "parent": None, "role": "user", "content": attack},
        {
            "id": "b",
            "parent": "__proto__",
            "role": "assistant",
            "content": attack,
            "reasoning": attack,
            "error": attack,
            "ending": attack,
        }
        | {"toolCalls": [{"id": attack, "name": attack, "arguments": attack}]},
        {"id": "c", "parent": "b", "role": "tool", "content": attack, "toolCallId": attack},
    ]
    conversation = {"id": "a-b_1", "title": attack, "turns": turns, "settings": {"system": attack}}
    file = {"format": "tokend conversations", "version": 1, "conversations": [conversation]}
    path = tmp_path / "import.json"
    path.write_text(json.dumps(file))
    page = visit("chat").page
    page.set_input_files("#history-file", path)
    page.click("#conversations a")
    page.wait_for_selector(".turn.tool")
    page.click(".thoughts summary")
    for place in (
        "#conversations .title",
        ".said >> nth=0",
        ".markdown",
        ".thought",
        ".call",
        "#system-line",
        ".turn.tool .said",
    ):
        assert "<img src=x onerror" in page.inner_text(place), place
    assert page.locator("main img").count() == 0
    page.reload()
    page.wait_for_selector(".turn.tool")
    assert page.locator("main img").count() == 0
    assert page.evaluate("window.ran") is None


def test_two_tabs_change_the_same_conversation(visit: Visit) -> None:
    first = scripted(visit)
    send(first, "first")
    answer(first, "one")
    context = first.context
    second = context.new_page()
    second.goto(first.url)
    script_answers(second)
    second.wait_for_selector(".markdown >> text=one")
    send(second, "of the second tab")
    answer(second, "two")
    first.wait_for_selector(".markdown >> text=two")
    assert shown(first) == shown(second)
    second.hover("#conversations li")
    row = second.query_selector("#conversations li")
    send(first, "of the first tab")
    assert sent(first) == [*shown(second)[:4], ("user", "of the first tab")]
    answer(first, "three")
    second.wait_for_selector(".markdown >> text=three")
    second.wait_for_timeout(500)  # longer than the list waits before it shows a change
    assert row is not None
    assert row.evaluate("row => row.isConnected"), "a click would be lost"
    second.click("#conversations >> text=Delete")
    second.click("#sure-dialog [value=yes]")
    first.wait_for_selector("text=This conversation was deleted in another tab.")
    assert shown(first) == []
    first.wait_for_selector("text=No conversations yet.")


BLOCKED = """Object.defineProperty(window, "indexedDB", {
    get() { throw new DOMException("denied", "SecurityError"); } });"""
SILENT = "IDBFactory.prototype.open = () => ({});"


@pytest.mark.parametrize("script", [BLOCKED, SILENT], ids=["blocked", "silent"])
def test_without_storage_chats_last_as_long_as_the_page(script: str, visit: Visit) -> None:
    page = scripted(visit, script=script)
    page.wait_for_selector("#notice-words >> text=This browser keeps no data", timeout=10_000)
    send(page, "first")
    answer(page, "one")
    page.click("#chat-new")
    page.click("#conversations >> text=first")
    page.wait_for_selector(".markdown >> text=one")
    assert shown(page) == [("user", "first"), ("assistant", "one")]


def test_a_full_quota_is_said_and_the_chat_goes_on(visit: Visit, guarded: Daemon) -> None:
    page = scripted(visit)
    tools = page.context.new_cdp_session(page)
    tools.send("Storage.overrideQuotaForOrigin", {"origin": guarded.url, "quotaSize": 1})
    page.evaluate("document.getElementById('p-structure').value = 'x'.repeat(3e6)")  # is not sent
    send(page, "first")
    answer(page, "one")
    page.wait_for_selector("#notice-words >> text=storage for this page is full")
    page.evaluate("document.getElementById('p-structure').value = ''")
    send(page, "second")
    assert sent(page) == [("user", "first"), ("assistant", "one"), ("user", "second")]
    tools.send("Storage.overrideQuotaForOrigin", {"origin": guarded.url})
    answer(page, "two")
    page.wait_for_selector("#notice", state="hidden")
    page.reload()
    page.wait_for_selector(".markdown >> text=two")
    assert shown(page)[:2] == [("user", "first"), ("assistant", "one")]


def test_nothing_of_a_conversation_is_kept_elsewhere(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "secret")
    answer(page, "text")
    kept = page.evaluate(
        "[JSON.stringify(localStorage), document.cookie, JSON.stringify(sessionStorage)]"
    )
    assert kept[:2] == ["{}", ""]
    assert "secret" not in kept[2]
    assert "secret" not in page.url


# The tree of turns: pure functions.


def call(page: Any, script: str) -> Any:
    return page.evaluate(
        f"async () => {{ const c = await import('/page/conversation.js'); {script} }}"
    )


def test_the_tree_of_turns(visit: Visit) -> None:
    page = visit("chat").page
    build = """
        const turn = (id, parent, role, fields) => ({ id, parent, role, content: id, ...fields });
        let tree = c.newConversation();
        const turns = [turn("q1", null, "user"), turn("a1", "q1", "assistant"),
            turn("a2", "q1", "assistant"), turn("q2", "a1", "user"), turn("a3", "q2", "assistant")];
        for (const each of turns) tree = c.withTurn(tree, each);
        const ids = (tree) => c.pathOf(tree).map((each) => each.id).join(" ");
    """
    found = call(
        page,
        build
        + """
        const before = JSON.stringify(tree);
        const other = c.withBranch(tree, "a2");
        const trees = [tree, other, c.withBranch(other, "a1"), c.withoutTurn(tree, "a1"),
            c.withoutTurn(tree, "q1"), c.withoutTurn(other, "q2")];
        const branches = c.branchesAt(tree, c.turnOf(tree, "a2")).join(" ");
        return [...trees.map(ids), branches, JSON.stringify(tree) === before];""",
    )
    paths = ["q1 a1 q2 a3", "q1 a2", "q1 a1 q2 a3", "q1 a2", "", "q1 a2"]
    assert found == [*paths, "a1 a2", True]
    reasoned = call(
        page,
        """
        let tree = c.newConversation();
        const toolCalls = [{ id: "1", name: "f", arguments: "{}" }];
        const turns = [{ role: "user", content: "q" },
            { role: "assistant", content: "a", reasoning: "old" }, { role: "user", content: "q" },
            { role: "assistant", content: "", reasoning: "new", toolCalls },
            { role: "tool", content: "r", toolCallId: "1" }];
        for (const each of turns) tree = c.withTurn(tree, { parent: tree.leaf, ...each });
        return c.messagesTo(tree, tree.leaf, "s");""",
    )
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert reasoned == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning": "new", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]


def test_changes_of_two_tabs_are_merged(visit: Visit) -> None:
    found = call(
        visit("chat").page,
        """
        const turn = (id, parent, content = id) => ({ id, parent, role: "user", content });
        const base = { id: "c", title: "t", updated: 1, leaf: "b", settings: {},
            turns: [turn("a", null), turn("b", "a")] };
        const texts = ({ title, leaf, turns }) =>
            [title, leaf, ...turns.map((each) => each.content)].join(" ");
        const mine = { ...base, updated: 2, leaf: "m",
            turns: [turn("a", null, "A"), turn("b", "a"), turn("m", "b")] };
        const theirs = { ...base, updated: 3, title: "T", leaf: "x",
            turns: [...base.turns, turn("x", "b")] };
        const without = { ...base, updated: 3, leaf: "a", turns: [turn("a", null)] };
        const pairs = [[mine, theirs], [theirs, mine], [mine, without], [without, mine],
            [mine, undefined]];
        return pairs.map(([one, other]) => texts(c.merged(base, one, other)));""",
    )
    assert found == ["T m A b x m", "T x A b m x", "t a A", "t a A", "t m A b m"]
