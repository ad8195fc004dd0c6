"""The page in a real browser with a real daemon."""

import json
import os
import re
import subprocess
import time
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.visitor import AUTHORIZED, CHROMIUM, KEY, PHONE, Visitor, stream_answer

pytestmark = [
    pytest.mark.suite("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
ENDLESS = "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
"""The model counts on until it is stopped, at a temperature of 0."""
SYSTEM = "Answer in one sentence."
"""With it the model is sure of its answers (0.4 nats or more), in each form of its weights."""


def wait_idle(daemon: Daemon) -> None:
    """Wait until the engine runs no request."""
    deadline = time.monotonic() + 10
    while daemon.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "the engine still runs something"
        time.sleep(0.05)


def test_a_completion_is_streamed_to_the_page(visit, guarded):
    visitor = visit("completion")
    visitor.complete("The capital of France is", 20)
    visitor.wait_done()
    page = visitor.page
    body = {"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=AUTHORIZED).json()
    shown = page.evaluate("document.querySelector('#completion-output .tokens').textContent")
    assert shown == body["prompt"] + answer["choices"][0]["text"]
    summary = page.inner_text("#completion-output .summary")
    assert re.search(
        r"answer 20 tokens(, \d+ guessed ahead)?\s+"
        r"first token after [\d.,]+ m?s\s+speed [\d.,]+ tokens/s",
        summary,
    )
    assert "cut at Max tokens" in summary


def test_text_is_shown_while_it_streams_and_stop_aborts_the_request(visit, guarded):
    visitor = visit("completion")
    visitor.complete(ENDLESS, 2000)
    visitor.wait_until("document.querySelectorAll('#completion-output .token').length > 5")
    assert visitor.page.is_visible("#busy")
    assert guarded.metric("vllm:num_requests_running") == 1
    visitor.page.click("#completion-form [data-action=stop]")
    visitor.wait_done()
    assert "stopped" in visitor.page.inner_text("#completion-output .summary")
    wait_idle(guarded)
    before = guarded.metric("vllm:generation_tokens_total")
    visitor.complete("One", 3)
    visitor.wait_done()
    assert guarded.metric("vllm:generation_tokens_total") == before + 3


def test_a_chat_keeps_its_turns_and_escape_aborts(visit):
    visitor = visit("chat")
    page = visitor.page
    sent = []
    page.on("request", lambda each: sent.append(each.post_data) if "chat" in each.url else None)
    page.fill("#p-temperature", "0")
    page.fill("#p-max_tokens", "30")
    page.fill("#p-system", SYSTEM)
    for message in ("What is the capital of France?", "And of Italy?"):
        page.fill("#message", message)
        page.press("#message", "Enter")
        page.wait_for_selector(".turn:last-child .markdown p")
        visitor.wait_done()
    messages = json.loads([each for each in sent if each][-1])["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "user"]
    first = page.evaluate("document.querySelector('.turn.assistant .tokens').textContent")
    assert page.is_hidden(".turn.assistant .tokens >> nth=0")
    page.click(".turn.assistant >> nth=0 >> button:text-is('Tokens')")
    assert page.is_visible(".turn.assistant .tokens >> nth=0")
    assert messages[2]["content"] == first
    assert messages[0]["content"] == SYSTEM
    assert "Paris" in first
    page.fill("#p-max_tokens", "2000")
    page.fill("#message", "Write a very long story about a lighthouse.")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn:nth-child(6) .token")  # the setting applies to new answers
    page.keyboard.press("Escape")
    visitor.wait_done()
    assert "stopped" in page.inner_text(".turn:nth-child(6) .summary")
    page.click("#chat-new")
    assert page.locator(".turn").count() == 0


def test_tokens_show_their_alternatives(visit):
    visitor = visit("completion")
    visitor.complete("The capital of France is", 8)
    visitor.wait_done()
    page = visitor.page
    page.hover("#completion-output .token >> nth=0")
    shares = page.locator("#token-hint b").all_inner_texts()
    chances = [float(each.removesuffix(" %")) for each in shares]
    assert len(chances) == 5
    assert chances == sorted(chances, reverse=True)
    assert page.inner_text("#token-hint .chosen code") == "·Paris"
    page.uncheck("#p-logprobs")
    page.click("#completion-form [data-action=run]")
    visitor.wait_until("document.querySelector('#completion-output .ending')")
    assert page.locator("#completion-output .token").count() == 0
    assert "Paris" in page.inner_text("#completion-output .tokens")


def completion_event(text: str, tokens: list[str], drafts: list[bool]) -> str:
    """Return an event of a completion with log-probabilities and accepted drafts."""
    logprobs = {"tokens": tokens, "token_logprobs": [-0.1] * len(tokens)}
    logprobs["top_logprobs"] = [{token: -0.1} for token in tokens]
    choice = {"index": 0, "text": text, "logprobs": logprobs, "accepted_drafts": drafts}
    return f"data: {json.dumps({'choices': [choice | {'finish_reason': None}]})}\n\n"


def chat_event(text: str, tokens: list[str], drafts: list[bool]) -> str:
    content = [{"token": token, "logprob": -0.1, "top_logprobs": []} for token in tokens]
    choice = {"index": 0, "delta": {"content": text}, "logprobs": {"content": content}}
    choice |= {"accepted_drafts": drafts, "finish_reason": None}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.mark.parametrize("tab", ["chat", "completion"])
def test_accepted_drafts_are_underlined(tab, visit):
    """Of a simulated answer: a character of several tokens is underlined if all were drafts."""
    event = chat_event if tab == "chat" else completion_event
    events = [
        event(" one two", [" one", " two"], [False, True]),
        event("é", ["\ufffd", "\ufffd"], [True, True]),
        event("ü", ["\ufffd", "\ufffd"], [True, False]),
        event(" three", [" three"], [True]),
    ]
    visitor = visit(tab, color_scheme="light")
    page = visitor.page
    sent = []

    def answer(route: Any) -> None:
        sent.append(json.loads(route.request.post_data))
        route.fulfill(body="".join(events) + "data: [DONE]\n\n", content_type="text/event-stream")

    page.route("**/v1/**completions", answer)
    page.fill("#message" if tab == "chat" else "#prompt", "Count")
    page.click(f"#{tab}-form [data-action=run]")
    page.wait_for_selector(".summary .ending")
    if tab == "chat":
        page.click(".turn.assistant >> button:text-is('Tokens')")
    assert page.locator(".tokens .drafted").all_inner_texts() == [" two", "é", " three"]
    assert page.inner_text(".summary .drafted") == "5 guessed ahead"
    assert page.inner_text("#parameters .drafted") == "guessed ahead"
    line = "(() => { const { textDecorationLine, textDecorationColor } = getComputedStyle("
    line += "document.querySelector('.tokens .drafted')); return [textDecorationLine, "
    line += "textDecorationColor]; })()"
    kind, light = page.evaluate(line)
    page.click("#theme")
    assert page.evaluate(line)[0] == kind == "underline"
    assert page.evaluate(line)[1] != light
    descriptions = [each.get_attribute("aria-description") for each in page.locator(".token").all()]
    assert descriptions == [None, "guessed ahead", "guessed ahead", None, "guessed ahead"]
    page.hover(".token >> nth=0")
    assert page.locator("#token-hint >> text=guessed ahead").count() == 0
    page.hover(".token >> nth=1")
    assert page.is_visible("#token-hint >> text=guessed ahead")
    page.uncheck("#p-logprobs")
    page.fill("#message" if tab == "chat" else "#prompt", "Count")
    page.click(f"#{tab}-form [data-action=run]")
    visitor.wait_done()
    assert ["return_accepted_drafts" in each for each in sent] == [True, False]


def test_drafts_of_a_daemon_are_shown(visit):
    """While the model repeats a text, in the tokens of the answer and in the live view."""
    visitor = visit("live", viewport={"width": 1200, "height": 400})
    page = visitor.page
    visitor.wait_until("document.getElementById('live-state').dataset.state === 'live'")
    assert page.evaluate("scrollY") == 0, "there is nothing to follow"
    visitor.complete(ENDLESS * 3, 1500)
    visitor.wait_until("document.querySelector('#completion-output .token.drafted')")
    page.click("#tab-live")
    page.wait_for_selector("#drafts")
    visitor.wait_until("/^[\\d.]+ %$/.test(document.getElementById('tile-drafts').textContent)")
    assert re.fullmatch(r"[\d.]+ tokens a step", page.inner_text("#tile-drafts-detail"))
    page.click("#tab-completion")
    page.keyboard.press("Escape")
    visitor.wait_done()
    number = page.locator("#completion-output .token.drafted").count()
    assert page.inner_text(".summary .drafted").split()[0] == f"{number:,}"


def test_the_block_map_fills_and_empties(visit, guarded):
    visitor = visit("completion")
    visitor.complete(ENDLESS, 2000)
    page = visitor.page
    page.click("#tab-live")
    visitor.wait_until("Number(document.querySelector('[data-count=held]').textContent) > 5")
    assert page.get_attribute("#live-state", "data-state") == "live"
    assert page.inner_text("#tile-running") == "1"
    assert "299 KV blocks of" in page.inner_text("#live-shape")
    assert "of 299 blocks" in page.inner_text("#tile-used-detail")
    assert "Of 299 blocks" in page.get_attribute("#map", "aria-label")
    assert page.locator("#requests tr").count() == 1
    assert page.inner_text("#requests code").startswith("cmpl-")
    assert visitor.colours() >= 3
    visitor.wait_until("parseFloat(document.getElementById('tile-rate').textContent) > 1")
    page.focus("#map")
    page.keyboard.press("Home")
    for _ in range(20):
        page.keyboard.press("PageDown")
        if "held by cmpl-" in page.inner_text("#map-said"):
            break
    assert "held by cmpl-" in page.inner_text("#map-said")
    page.click("#tab-completion")
    page.keyboard.press("Escape")
    visitor.wait_done()
    page.click("#tab-live")
    visitor.wait_until("document.querySelector('[data-count=held]').textContent === '0'")
    assert page.locator("#requests tr").count() == 0
    assert page.is_visible("#requests-empty")
    assert visitor.count("cached") > 3
    visitor.wait_until("document.getElementById('tile-rate').textContent === '0'")
    wait_idle(guarded)


def test_every_state_of_blocks_and_requests_is_shown(visit):
    """States that one small daemon does not reach; the events are simulated."""
    requests = [
        {"owner": 3, "id": "cmpl-<b>mine</b>", "state": "running", "num_blocks": 2}
        | {"prompt_tokens": 40, "output_tokens": 5, "computed_tokens": 44, "cached_tokens": 16},
        {"owner": 4, "id": None, "state": "waiting_for_kv", "num_blocks": 1}
        | dict.fromkeys(("prompt_tokens", "output_tokens", "computed_tokens", "cached_tokens")),
    ]
    hello = {"model": "toy", "version": "1", "num_blocks": 39, "block_size": 16}
    hello |= {"blocks_per_cell": 2, "max_num_seqs": 8, "max_model_len": 64}
    cells = [[1, 5, 0], [2, 1, 0], [2, 2, 3], [1, 3, 4], [1, 4, 0], [13, 0, 0]]
    view = {"time_s": 1.0, "step": 9, "running": 1, "waiting": 300, "preemptions": 2}
    view |= {"prompt_tokens_per_s": 10.0, "generation_tokens_per_s": 20.0}
    view |= {"prefix_cache_queries": 40, "prefix_cache_hits": 10, "num_omitted_requests": 298}
    view |= {"requests": requests, "cells": cells}
    view |= {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    later = view | {"drafts": 4, "draft_tokens": 20, "accepted_tokens": 13}
    notice = {"time_s": 1.0, "kind": "restart", "text": "engine_core 0 <i>was</i> started again"}
    connections = [(("hello", hello), ("view", view), ("notice", notice))]
    visitor = visit("chat")
    page = visitor.page

    def send_events(route: Any) -> None:
        events = connections.pop(0) if connections else ()
        body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
        route.fulfill(body=body)

    page.route("**/view/events", send_events)
    page.click("#tab-live")
    page.wait_for_selector("#log .restart")
    counts = [visitor.count(each) for each in ("free", "cached", "held", "shared", "pinned")]
    assert counts == [26, 4, 4, 2, 2]
    assert "About, of 39 blocks: 26 free, 4 cached" in page.get_attribute("#map", "aria-label")
    assert page.inner_text("#tile-hits") == "25 %"
    assert page.inner_text("#tile-preemptions") == "2"
    assert page.is_hidden("#drafts"), "there was none yet"
    rows = page.locator("#requests tr").all_inner_texts()
    assert rows[0].split() == ["cmpl-<b>mine</b>", "running", "40", "5", "2"]
    assert rows[1].split("\t")[:4] == ["another tenant's request (4)", "waiting for KV", "–", "–"]
    assert page.inner_text("#requests-more") == "and 298 more"
    assert "<i>was</i>" in page.inner_text("#log .restart")
    assert visitor.colours() >= 6
    page.hover("#requests tr >> nth=0")
    assert page.get_attribute("#requests tr >> nth=0", "class") == "pointed"
    page.focus("#requests tr >> nth=0")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#requests tr >> nth=1", "class") == "pointed"
    page.wait_for_selector("#live-state[data-state=lost]")
    connections.append((("view", later),))
    page.wait_for_selector("#drafts")
    assert page.inner_text("#tile-drafts") == "65 %"
    assert page.inner_text("#tile-drafts-detail") == "4.3 tokens a step"


def test_events_are_requested_only_while_the_live_view_is_visible(visit):
    visitor = visit("chat")
    visitor.wait_until("document.getElementById('model').textContent.length > 3")
    assert visitor.views == {}
    visitor.page.click("#tab-live")
    visitor.wait_until("document.getElementById('live-state').dataset.state === 'live'")
    assert list(visitor.views.values()) == [True]
    visitor.page.click("#tab-chat")
    visitor.wait_until("document.getElementById('live-state').dataset.state === 'off'")
    deadline = time.monotonic() + 10
    while any(visitor.views.values()) and time.monotonic() < deadline:
        visitor.page.wait_for_timeout(20)  # handle events of the browser
    assert list(visitor.views.values()) == [False]


def test_empty_lines_show_that_a_stream_is_alive(visit):
    """The live view connects again after a silence, and keep-alives are empty lines."""
    found = visit().page.evaluate(
        """async () => {
            const { eventsOf } = await import("/page/sse.js");
            const found = [];
            for await (const { event, data } of eventsOf(new Response(
                "data: a\\n\\n\\n\\n: comment\\n\\nevent: e\\ndata: b\\n\\n"
            ))) found.push([event, data]);
            return found;
        }"""
    )
    assert found == [["message", "a"], *[["idle", ""]] * 3, ["e", "b"]]


def test_the_page_asks_for_the_key_and_reports_a_wrong_one(visit):
    visitor = visit("chat", key="")
    page = visitor.page
    page.wait_for_selector("#key-dialog[open]")
    assert "needs an API key" in page.inner_text("#key-reason")
    page.fill("#key-input", "wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=The server refused this key")
    page.fill("#key-input", KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("text=smollm2")
    kept = "[sessionStorage.getItem('tokend.key'), JSON.stringify(localStorage), document.cookie]"
    assert page.evaluate(kept) == [KEY, "{}", ""]
    page.click("#key-button")
    page.click("text=Forget the key")
    assert page.evaluate("sessionStorage.length") == 0
    refusals = [each for each in visitor.wrong if "401" in each]
    assert len(refusals) == 2
    visitor.wrong = [each for each in visitor.wrong if each not in refusals]


def test_the_page_can_be_used_by_keyboard(visit):
    visitor = visit("chat")
    page = visitor.page
    focused = "document.activeElement.id"

    def tab_to(condition: str) -> None:
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate(condition):
                ring = "getComputedStyle(document.activeElement).outlineStyle"
                assert page.evaluate(ring) != "none", condition
                return
        raise AssertionError(f"no way there: {condition}")

    tab_to(f"{focused} === 'tab-chat'")
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "tab-completion"
    tab_to(f"{focused} === 'prompt'")
    page.keyboard.press("Control+A")
    page.keyboard.type("The capital of France is")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#completion-output .ending")
    tab_to("document.activeElement.classList.contains('token')")
    assert page.is_visible("#token-hint")
    page.keyboard.press("ArrowRight")
    second = page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    assert second
    assert page.evaluate("document.activeElement.getAttribute('aria-describedby')") == "token-hint"
    page.keyboard.press("Shift+Tab")
    for _ in range(20):
        if page.evaluate(focused) == "tab-completion":
            break
        page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowRight")
    tab_to(f"{focused} === 'map'")
    assert page.evaluate("document.getElementById('announcer').textContent") != ""


def test_every_control_has_an_accessible_name(visit):
    visitor = visit("completion")
    nameless = visitor.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, canvas, dialog")]
            .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim()
                || each.getAttribute("aria-labelledby")))
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []


def test_the_page_has_light_and_dark_colours(visit):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = visit("chat", color_scheme="light"), visit("chat", color_scheme="dark")
    colours = [each.page.evaluate(background) for each in (light, dark)]
    assert colours[0] != colours[1]
    light.page.click("#theme")
    assert light.page.evaluate(background) == colours[1]
    light.page.reload()
    assert light.page.evaluate(background) == colours[1]
    light.page.click("#theme")
    assert light.page.evaluate("localStorage.length") == 0


def test_error_messages_of_the_server_are_shown(visit, guarded):
    visitor = visit("completion")
    page = visitor.page
    page.fill("#p-top_p", "7")
    page.click("#completion-form [data-action=run]")
    page.wait_for_selector("#completion-output .error")
    body = {"prompt": "x", "top_p": 7}
    answer = httpx.post(f"{guarded.url}/v1/completions", json=body, headers=AUTHORIZED)
    expected = f"{answer.status_code}: {answer.json()['error']['message']}"
    assert page.inner_text("#completion-output .error") == expected
    assert len(visitor.wrong) == 1
    assert "400" in visitor.wrong.pop()


def test_markup_in_the_output_is_shown_as_text(visit):
    visitor = visit("completion")
    prompt = "<img src=x onerror=alert(1)><script>alert(2)</script> <b>"
    visitor.complete(prompt, 8)
    visitor.wait_done()
    page = visitor.page
    assert page.locator("#completion-output img, #completion-output b").count() == 0
    assert prompt in page.evaluate("document.querySelector('#completion-output').textContent")


ANSWER = (
    """# Sorting

| algorithm | best case | average case | worst case | memory | stable | year |
|---|---:|---|---|---|---|---|
| Quicksort | n | n log n | n squared | log n | no | 1961 |

```python
def quicksort(values): return values  # a comment longer than a screen of any phone is wide
```

- [x] **done**
- see [the article](https://example.org/sorting) and [defined later][later]

[later]: https://example.org/later

"""
    + "A paragraph that says something about sorting, again and again.\n\n" * 40
)


def ask(visitor: Visitor) -> None:
    visitor.page.fill("#message", "How are lists sorted?")
    visitor.page.click("#chat-form [data-action=run]")
    visitor.page.wait_for_selector(".markdown >> nth=-1")


@pytest.mark.parametrize("options", [PHONE, {"viewport": {"width": 1440, "height": 900}}])
def test_the_end_of_a_growing_answer_stays_visible(visit, options):
    visitor = visit("chat", **options)
    page = visitor.page
    stream_answer(page, ANSWER)
    # the distance from the summary, the last line, to the composer
    distance = """document.getElementById('chat-form').getBoundingClientRect().top
        - document.querySelector('.summary').getBoundingClientRect().bottom"""
    ask(visitor)
    height = "document.querySelector('.markdown').offsetHeight"
    next_frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
    for _ in range(10):
        page.wait_for_function(f"(before) => {height} > before + 40", arg=page.evaluate(height))
        assert page.evaluate(f"{next_frame}.then(() => {distance})") >= 0
    page.evaluate("document.getElementById('chat-scroller').scrollTop -= 300")
    page.wait_for_function(f"{distance} < 0")
    visitor.wait_done()
    assert page.evaluate(distance) < 0, "the page does not scroll for a reader who scrolled back"
    page.evaluate("document.getElementById('chat-scroller').scrollTop = 1e6")
    assert page.evaluate(distance) >= 0
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(f"{fits} && document.documentElement.scrollHeight <= innerHeight")


def test_on_a_phone_parameters_are_collapsed_and_tables_scroll(visit):
    visitor = visit("chat", **PHONE)
    page = visitor.page
    assert page.is_hidden("#p-temperature")
    page.click("#parameters summary")
    assert page.is_visible("#p-temperature")
    page.click("#parameters summary")
    stream_answer(page, ANSWER, step=200)
    ask(visitor)
    visitor.wait_done()
    for inner in (".markdown .scroller", ".markdown pre"):
        sizes = "({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth]"
        content, box = page.eval_on_selector(inner, sizes)
        assert box < 390 < content, inner
    assert page.evaluate("document.getElementById('chat-scroller').scrollWidth") <= 390
    page.click("#tab-live")
    page.wait_for_selector("#live-state[data-state=live]")
    page.evaluate("document.getElementById('requests-table').hidden = false")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.wait_for_selector("#panel-live .scroll-hint")
    page.goto(page.url.replace("#live", "docs"))
    page.click(".operation summary >> nth=0")
    page.wait_for_selector(".fields td:last-child")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_models_name_stays_on_one_line_of_a_phone(visit):
    page = visit("chat", **PHONE).page
    page.wait_for_function("() => document.getElementById('model').textContent.length > 3")
    height = "document.querySelector('header.top').offsetHeight"
    header = page.evaluate(height)
    sizes = "({ scrollWidth, clientWidth }) => [scrollWidth, clientWidth]"
    content, box = page.eval_on_selector("#model", sizes)
    assert content <= box, "the whole name fits"
    page.evaluate("document.getElementById('busy').hidden = false")
    assert page.evaluate(height) == header, "an answer moves nothing"
    page.evaluate(
        "document.getElementById('model').textContent = 'a-long-name-of-a-model-'.repeat(4)"
    )
    assert page.evaluate(height) == header
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_answers_are_rendered_as_markdown_without_a_token_limit(visit):
    visitor = visit("chat")
    page = visitor.page
    stream_answer(page, ANSWER)
    ask(visitor)
    visitor.wait_done()
    assert page.inner_text(".markdown h1") == "Sorting"
    assert page.locator(".markdown td").all_inner_texts()[:2] == ["Quicksort", "n"]
    assert page.get_attribute(".markdown td >> nth=1", "align") == "right"
    assert page.inner_text(".code-head span") == "python"
    assert page.inner_text(".markdown .hljs-keyword >> nth=0") == "def"
    assert page.is_checked(".markdown input")
    links = page.eval_on_selector_all(
        ".markdown a", "links => links.map((a) => [a.href, a.target, a.rel])"
    )
    assert links == [
        [f"https://example.org/{name}", "_blank", "noopener noreferrer"]
        for name in ("sorting", "later")
    ]
    assert "max_tokens" not in page.evaluate("Object.keys(lastBody)")
    assert "cut at the end of the context" in page.inner_text(".summary")
    ask(visitor)
    visitor.wait_done()
    assert page.evaluate("lastBody.messages[1].content") == ANSWER


@pytest.mark.parametrize("step", [1, 3, 10_000])
def test_answers_cannot_run_scripts(visit, step):
    attacks = [
        "<script>window.ran = 1</script>",
        "<img src=x onerror='window.ran = 2'>",
        "[link](javascript:window.ran=3)",
        "[link](JaVa&#x53;cript:window.ran=4)",
        "[link](data:text/html,<script>window.ran=5</script>)",
        "<javascript:window.ran=6>",
        "![image](javascript:window.ran=7)",
        '![image](https://elsewhere.invalid/x.png "title\\" onload=\\"window.ran=8")',
        "<svg><animate onbegin='window.ran=9'/></svg>",
        "<iframe srcdoc='<script>parent.ran=10</script>'></iframe>",
        "<a href='javascript:window.ran=11'>x</a>",
        "<style>body { display: none }</style>",
        "<form action=//elsewhere.invalid><input name=body><button>x</button></form>",
        '```"onmouseover="window.ran=12\n<img src=x onerror=window.ran=13>\n```',
        "```html\n<img src=x onerror=window.ran=14><script>window.ran=15</script>\n```",
        "| a |\n|---|\n| <img src=x onerror=window.ran=16> |",
        "[x]: javascript:window.ran=17\n\n[x]",
        "<math><mtext><table><mglyph><style><!--</style>"
        "<img title='--&gt;&lt;img src=x onerror=window.ran=18&gt;'>",
    ]
    visitor = visit("chat")
    page = visitor.page
    stream_answer(page, "\n\n".join(attacks), step)
    ask(visitor)
    visitor.wait_done()
    for link in page.locator(".markdown a").all():
        assert re.match("https?:", link.get_attribute("href") or "https:")
    found = page.evaluate(
        """() => {
            const tags = "script, img, svg, iframe, style, form, math";
            const isBad = ({ name, value }) =>
                /^on|style|^id$|^name$/.test(name) || /javascript:|data:/i.test(value);
            return [...document.querySelectorAll(".markdown *")]
                .filter((each) => each.matches(tags) || [...each.attributes].some(isBad))
                .map((each) => each.outerHTML);
        }"""
    )
    assert found == []
    assert page.evaluate("window.ran") is None
    assert attacks[0] in page.inner_text(".markdown")
    assert attacks[1] in page.inner_text(".markdown")


def test_a_chat_and_a_completion_run_concurrently(visit, guarded):
    visitor = visit("completion")
    page = visitor.page
    visitor.complete(ENDLESS, 2000)
    page.click("#tab-chat")
    page.fill("#message", "Write a very long story about a lighthouse.")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.assistant .markdown p")
    assert guarded.metric("vllm:num_requests_running") == 2
    page.keyboard.press("Escape")
    page.wait_for_selector(".turn.assistant .ending")
    assert page.locator("#completion-output .ending").count() == 0
    page.click("#busy")
    visitor.wait_done()
    assert "stopped" in page.locator("#completion-output .summary").text_content()
    wait_idle(guarded)


def test_a_completion_has_a_token_limit(visit):
    visitor = visit("completion")
    visitor.page.click("#completion-form [data-action=curl]")
    assert '"max_tokens": 512' in visitor.page.input_value("#curl-text")


def test_the_content_security_policy_is_enforced(visit):
    """Injected inline scripts, styles and requests to other origins are blocked."""
    visitor = visit("chat")
    refused = visitor.page.evaluate(
        """async () => {
            const seen = new Set();
            document.addEventListener("securitypolicyviolation",
                (event) => seen.add(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            const style = document.createElement("style");
            style.textContent = "body { display: none }";
            document.head.append(script, style);
            const image = new Image();
            image.src = "https://elsewhere.invalid/x.png";
            await fetch("https://elsewhere.invalid/").catch(() => {});
            await new Promise((done) => setTimeout(done, 50));
            return [window.ran ?? false, ...[...seen].sort()];
        }"""
    )
    directives = ["connect-src", "img-src", "script-src-elem", "style-src-elem"]
    assert refused == [False, *directives]
    expected = ("Content Security Policy", "https://elsewhere.invalid/")
    visitor.wrong = [each for each in visitor.wrong if not any(part in each for part in expected)]


def test_the_shown_curl_command_sends_the_same_request(visit):
    visitor = visit("completion")
    page = visitor.page
    page.fill("#p-temperature", "0")
    page.fill("#p-max_tokens", "6")
    page.fill("#prompt", "It's \"Paris\", isn't it?\nThe capital of France is")
    page.click("#completion-form [data-action=curl]")
    command = page.input_value("#curl-text")
    assert KEY not in command
    page.keyboard.press("Escape")
    page.click("#completion-form [data-action=run]")
    page.wait_for_selector("#completion-output .ending")
    shown = page.evaluate("document.querySelector('#completion-output .tokens').textContent")
    environment = {**os.environ, "TOKEND_API_KEY": KEY}
    output = subprocess.check_output(["bash", "-c", command + " 2>/dev/null"], env=environment)
    chunks = re.findall(r"^data: (\{.*)$", output.decode(), re.MULTILINE)
    texts = [choice["text"] for each in chunks for choice in json.loads(each)["choices"]]
    assert page.input_value("#prompt") + "".join(texts) == shown


def test_a_death_is_reported_and_the_live_view_reconnects(browser, guarded):
    """Last in this file: it kills processes of the shared daemon."""
    visitor = Visitor(browser, guarded.url, "live", KEY)
    page = visitor.page
    is_live = "document.getElementById('live-state').dataset.state === 'live'"
    visitor.wait_until(is_live)
    guarded.processes()["engine_core"].kill()
    page.wait_for_selector("#log .restart")
    guarded.processes()["api_server"].kill()
    visitor.wait_until("document.getElementById('live-state').dataset.state === 'lost'")
    assert "disconnected" in page.inner_text("#live-state")
    visitor.wait_until(is_live)
    visitor.close()


def test_the_page_of_the_api_lists_and_sends_requests(visit, guarded):
    """Of every operation, with its fields; nothing comes from another server."""
    visitor = visit("", path="docs")
    page = visitor.page
    document = httpx.get(f"{guarded.url}/openapi.json", headers=AUTHORIZED).json()
    operations = [f"{method}{path}" for path, item in document["paths"].items() for method in item]
    visitor.wait_until(f"document.querySelectorAll('.operation').length === {len(operations)}")
    ids = page.eval_on_selector_all(".operation", "all => all.map(each => each.id)")
    assert ids == operations
    page.fill("#filter", "input_prefix")
    assert page.locator(".operation:visible code").all_inner_texts() == ["/infill"]
    page.fill("#filter", "/v1/completions")
    page.click(".operation:visible summary")
    opened = page.locator(".operation[open]")
    row = opened.locator("tr", has=page.get_by_text("suffix", exact=True))
    assert "Text after the output" in row.inner_text()
    body = {"prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    opened.locator("textarea").fill(json.dumps(body))
    opened.locator("button[type=submit]").click()
    visitor.wait_until("document.querySelector('.operation[open] pre').textContent.length > 100")
    answer = json.loads(opened.locator("pre").inner_text())
    assert answer["choices"][0]["text"].startswith(" four")
    opened.locator("textarea").fill(json.dumps(body | {"stream": True}))
    opened.locator("button[type=submit]").click()
    visitor.wait_until(
        "document.querySelector('.operation[open] pre').textContent.includes('[DONE]')"
    )
    opened.get_by_role("button", name="curl").click()
    assert f"{guarded.url}/v1/completions" in page.input_value("#curl-text")
    assert page.locator("#curl-dialog button").all_inner_texts() == ["Copy", "Close"]


def test_the_page_of_the_api_asks_for_the_key_and_shows_errors(visit):
    visitor = visit("", key="", path="docs")
    page = visitor.page
    page.fill("#key-input", KEY)
    page.click("#key-dialog .main")
    page.wait_for_selector(".operation")
    page.click("[id='post/v1/completions'] summary")
    opened = page.locator(".operation[open]")
    opened.locator("textarea").fill('{"prompt": 5}')
    opened.locator("button[type=submit]").click()
    visitor.wait_until("document.querySelector('.operation[open] pre').textContent.includes('400')")
    assert "prompt must be" in opened.locator("pre").inner_text()
    # Chromium reports the refused requests itself
    assert all(" 401 " in each or " 400 " in each for each in visitor.wrong), visitor.wrong
    visitor.wrong.clear()
