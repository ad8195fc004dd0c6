"""Views of the page in a real browser: mathematics, tools, models, the map; accessibility."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.test_page_chat import act, answer, scripted, send, sent, shown
from tests.e2e.visitor import CHROMIUM, PHONE, Visitor, script_answers
from tests.fakes.tiny_encoders import save_encoder
from tests.fakes.tiny_pooling import save_modules

pytestmark = [
    pytest.mark.suite("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
Visit = Callable[..., Visitor]
NPM = Path(__file__).parent / "npm"
FORMULAS = r"""The roots of $ax^2 + bx + c = 0$ are

$$x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}$$

and \(e^{i\pi} + 1 = 0\). It costs $5 and $10, and `$code$` is code.

\[ \sum_{n=1}^{\infty} \frac{1}{n^2} = \begin{pmatrix} a & b \\ c & d \end{pmatrix} \]
"""


@pytest.fixture(scope="session")
def axe() -> str:
    """The source of axe-core, installed by npm at its pinned version."""
    path = NPM / "node_modules/axe-core/axe.min.js"
    if not path.exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm, which installs axe-core")
        command = ["npm", "ci", "--no-audit", "--no-fund"]
        installed = subprocess.run(command, cwd=NPM, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"npm cannot install axe-core: {installed.stderr[-300:]}")
    return path.read_text()


def violations(page: Any, axe: str) -> list[str]:
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [f"{each['id']}: {node['html'][:120]}" for each in found for node in each["nodes"]]


# Mathematics, tools, structured output.


def test_mathematics_is_rendered_and_money_is_not(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "formulas")
    answer(page, FORMULAS)
    page.wait_for_function("() => document.querySelectorAll('.markdown math').length === 4")
    assert page.locator(".math-display math").count() == 2
    assert page.locator("math mfrac").count() == 2
    assert "$5 and $10" in page.inner_text(".markdown")
    assert page.inner_text(".markdown code") == "$code$"
    send(page, "next")
    assert sent(page)[1] == ("assistant", FORMULAS)


def test_styles_in_formulas_are_allowed_by_the_policy(visit: Visit) -> None:
    """Temml sets style attributes for these, which would be refused; `visit` fails on an error."""
    page = scripted(visit)
    send(page, "formulas")
    answer(page, r"$\sideset{_1^2}{_3^4}\sum$ and $\pmb{x}$ and $\boxed{\color{red}y}$")
    page.wait_for_function("() => document.querySelectorAll('.markdown math').length === 3")
    styles = """(math) => [...math.querySelectorAll("*")]
        .map((each) => [each.style.textAlign, each.style.fontWeight].join(" ").trim())
        .filter(Boolean)"""
    found = [each.evaluate(styles) for each in page.locator(".markdown math").all()]
    assert found == [["left", "left"], ["bold"], []]


@pytest.mark.parametrize(
    "source",
    [
        r"\href{javascript:window.ran=1}{x}",
        r"\url{javascript:window.ran=2}",
        r"\htmlData{x=y}{z}",
        r"\includegraphics{https://elsewhere.invalid/x.png}",
        r"\text{<img src=x onerror=window.ran=3>}",
        r"\def\a{\a\a}\a",
        r"\frac{",
        r"\rule{1000000em}{1000000em}",
    ],
)
def test_formulas_are_not_trusted(source: str, visit: Visit) -> None:
    page = scripted(visit)
    send(page, "formula")
    answer(page, f"${source}$ end")
    page.wait_for_selector(".markdown math, .markdown .math-source")
    tags = ".markdown img, .markdown a, .markdown script, .markdown [onerror], .markdown [data-x]"
    assert page.locator(tags).count() == 0
    assert page.evaluate("window.ran") is None
    assert page.evaluate("document.querySelector('.markdown').offsetHeight") < 2000


def test_calls_of_tools_are_answered_by_hand(visit: Visit) -> None:
    page = scripted(visit)
    page.click(".more summary")
    page.fill("#p-tools", "[{")
    page.fill("#message", "weather?")
    page.press("#message", "Enter")
    assert "not JSON" in page.inner_text("#p-tools-error")
    assert page.input_value("#message") == "weather?", "nothing was sent"
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    page.fill("#p-tools", json.dumps(tool))
    send(page, "weather?")
    assert page.evaluate("chats[0].body.tools") == [tool]
    parts = [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": '}}]
    more = [{"index": 0, "function": {"arguments": '"<b>Rome</b>"}'}}]
    for calls in (parts, more):
        page.evaluate("(tool_calls) => chats[0].add({ tool_calls })", calls)
    page.evaluate("chats[0].end('tool_calls')")
    page.wait_for_selector(".call textarea")
    assert "weather" in page.inner_text(".call-head")
    assert '"city": "<b>Rome</b>"' in page.inner_text(".call pre")
    assert "called a tool" in page.inner_text(".summary")
    buttons = page.locator(".turn:last-child .turn-actions button").all_inner_texts()
    assert buttons == ["Regenerate", "Delete"]
    page.fill(".call textarea", "18 °C")
    page.click("text=Send result")
    page.wait_for_function("() => chats.length === 2")
    messages = page.evaluate("chats[1].body.messages")
    called = {"name": "weather", "arguments": '{"city": "<b>Rome</b>"}'}
    assert messages[1]["tool_calls"] == [{"id": "c1", "type": "function", "function": called}]
    assert messages[2] == {"role": "tool", "tool_call_id": "c1", "content": "18 °C"}
    answer(page, "It is mild.")
    page.reload()
    page.wait_for_selector(".markdown >> text=It is mild.")
    assert page.inner_text(".turn.tool .said") == "18 °C"
    assert page.locator(".call textarea").count() == 0


def test_reasoning_is_folded_and_kept(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    page.evaluate("chats[0].add({ reasoning: 'let me see' })")
    page.wait_for_selector(".thoughts summary")
    assert page.is_hidden(".thought")
    answer(page, "one")
    page.reload()
    page.click(".thoughts summary")
    assert page.inner_text(".thought") == "let me see"


def test_structured_output_and_the_servers_error_beside_it(visit: Visit) -> None:
    visitor = visit("chat")
    page = visitor.page
    page.click(".more summary")
    page.select_option("#p-structure_kind", "regex")
    page.fill("#p-structure", "(red|green")
    page.fill("#message", "A colour?")
    page.press("#message", "Enter")
    page.wait_for_selector("#p-structure-error")
    assert page.get_attribute("#p-structure", "aria-invalid") == "true"
    assert page.inner_text("#p-structure-error") in page.inner_text(".turn .summary")
    page.fill("#p-structure", "(red|green) (apple|pear)")
    assert page.locator("#p-structure-error").count() == 0
    act(page, 1, "Try again")
    page.wait_for_selector(".turn .ending >> text=complete")
    assert shown(page)[1][1] in ("red apple", "red pear", "green apple", "green pear")
    page.select_option("#p-structure_kind", "json")
    page.fill("#p-structure", json.dumps({"type": "boolean"}))
    act(page, 1, "Regenerate")
    page.wait_for_selector(".branches >> text=3 of 3")
    visitor.wait_done()
    assert shown(page)[1][1] in ("true", "false")
    assert [each for each in visitor.wrong if "400" not in each] == []
    visitor.wrong.clear()


@pytest.mark.parametrize("step", [3, 1000])
def test_an_answer_in_json_is_shown_as_code(step: int, visit: Visit) -> None:
    page = scripted(visit)
    send(page, "json")
    text = '{\n  "city": "<b>Rome</b>",\n  "fence": "~~~ ```"\n}'
    for at in range(0, len(text), step):
        page.evaluate("(part) => chats[0].add(part)", text[at : at + step])
    page.evaluate("chats[0].end()")
    page.wait_for_selector("#busy", state="hidden")
    assert page.inner_text(".markdown pre") == text
    assert page.inner_text(".code-head span") == "json"
    send(page, "a list of links")
    answer(page, '["one"](https://example.org)\n\nText follows.')
    assert page.locator(".turn:last-child .markdown pre").count() == 0
    assert page.locator(".turn:last-child .markdown a").count() == 1


# Words, copies, a phone.


def test_a_copy_is_confirmed_on_the_button(visit: Visit) -> None:
    page = scripted(visit)
    send(page, "first")
    answer(page, "one")
    act(page, 1, "Copy")
    page.wait_for_selector(".turn.assistant >> button:text-is('Copied')")
    page.wait_for_selector(".turn.assistant >> button:text-is('Copy')")


def test_controls_of_a_phone_are_44_pixels_and_tables_say_that_they_scroll(visit: Visit) -> None:
    page = scripted(visit, **PHONE)
    send(page, "table")
    answer(page, "|a|b|\n|---|---|\n|" + "wide_" * 20 + "|" + "cell_" * 20 + "|\n\n```\ncode\n```")
    page.wait_for_selector(".scroll-hint")
    page.click("#parameters summary >> nth=0")
    small = """() => [...document.querySelectorAll("button, select, input, summary")]
        .filter((each) => each.checkVisibility() && each.type !== "checkbox")
        .map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
        .filter(([, box]) => box.width > 1 && box.height < 43.5)
        .map(([text, box]) => `${text} ${box.height}`)"""
    assert page.evaluate(small) == []
    page.click("#parameters summary >> nth=0")
    page.click("#chat-form [data-action=curl]")
    assert page.evaluate("document.getElementById('curl-text').scrollTop") == 0
    page.keyboard.press("Escape")
    page.click("#history-button")
    page.wait_for_selector("#conversations button")
    assert page.evaluate(small) == []
    page.keyboard.press("Escape")
    assert page.is_hidden("#history")
    insets = page.evaluate(
        """() => [".turns", "#chat-form", "#parameters"].map((each) => {
            const box = document.querySelector(each).getBoundingClientRect();
            return [Math.round(box.left), Math.round(innerWidth - box.right)];
        })"""
    )
    assert insets == [[12, 12]] * 3


# Models.


def test_several_names_are_a_menu_and_are_sent(browser: Any) -> None:
    with Daemon("smollm2-135m-instruct", "--served-model-name", "large", "small") as daemon:
        visitor = Visitor(browser, daemon.url, "chat", "")
        page = visitor.page
        page.select_option("#model select", "small")
        page.fill("#p-max_tokens", "2")
        with page.expect_request("**/chat/completions") as request:
            page.fill("#message", "hello")
            page.press("#message", "Enter")
        assert request.value.post_data_json["model"] == "small"
        visitor.wait_done()
        visitor.close()
        assert visitor.wrong == []


def test_a_pooling_model_opens_on_its_forms(browser: Any, tmp_path: Path, axe: str) -> None:
    model = save_encoder("bert", tmp_path / "model")
    save_modules(tmp_path / "model", model.config.hidden_size, "mean_tokens")
    with Daemon(str(tmp_path / "model"), "--dtype", "float32") as daemon:
        visitor = Visitor(browser, daemon.url, "chat", "")
        page = visitor.page
        page.wait_for_selector("#panel-pooling")
        assert page.locator(".tabs button:visible").all_inner_texts() == ["Embeddings", "Live"]
        page.fill("#embed-texts", "w5 w6\nw5 w6\nw7 w8 <b>")
        page.click("#embed-form >> text=Compare")
        page.wait_for_selector(".matrix")
        cells = page.locator(".similarity").all_inner_texts()
        assert len(cells) == 9
        assert [cells[at] for at in (0, 1, 4, 8)] == ["1.00"] * 4
        page.fill("#rank-query", "w5 w6")
        page.fill("#rank-texts", "w7 w8\nw5 w6")
        page.click("#rank-form >> text=Rank")
        page.wait_for_selector(".scores")
        assert page.locator(".scores .text").all_inner_texts() == ["w5 w6", "w7 w8"]
        assert violations(page, axe) == []
        visitor.close()
        assert visitor.wrong == []


def test_a_model_with_labels_opens_on_their_form(browser: Any, tmp_path: Path, axe: str) -> None:
    """The label that is shown is the likeliest one of the same request to the API."""
    save_encoder("bert", tmp_path, num_labels=3)
    with Daemon(str(tmp_path), "--dtype", "float32") as daemon:
        visitor = Visitor(browser, daemon.url, "chat", "")
        page = visitor.page
        page.wait_for_selector("#classify-form")
        assert page.locator(".tabs button:visible").all_inner_texts() == ["Labels", "Live"]
        assert page.locator("#panel-pooling form:visible").count() == 1
        page.fill("#classify-texts", "w5 w6 <b>\n\nw7 w8")
        with page.expect_request("**/classify") as request:
            page.click("#classify-form >> text=Classify")
        body = {"input": ["w5 w6 <b>", "w7 w8"]}
        assert request.value.post_data_json == body
        page.wait_for_selector(".scores")
        rows = [each.inner_text().split("\t") for each in page.locator(".scores tbody tr").all()]
        results = httpx.post(f"{daemon.url}/classify", json=body).json()["data"]
        assert [(text, label) for text, label, _ in rows] == [
            (text, each["label"]) for text, each in zip(body["input"], results, strict=True)
        ]
        assert [float(share) for *_, share in rows] == [
            pytest.approx(max(each["probs"]), abs=6e-4) for each in results
        ]
        page.click("#classify-form [data-action=curl]")
        assert f"{daemon.url}/classify" in page.input_value("#curl-text")
        page.keyboard.press("Escape")
        assert violations(page, axe) == []
        page.fill("#classify-texts", "")
        page.click("#classify-form >> text=Classify")
        page.wait_for_selector("#classify-output .error")
        visitor.close()
        assert all("400" in each for each in visitor.wrong)


def test_a_model_without_a_chat_template_opens_on_completion(visit: Visit) -> None:
    visitor = visit("live")
    page = visitor.page
    cards = [{"id": "base", "max_model_len": 64, "supported_tasks": ["generate"]}]
    cards[0] |= {"default_sampling_params": {}}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.reload()
    page.wait_for_selector("#model >> text=base")
    page.evaluate("location.hash = '#chat'")
    page.reload()
    page.wait_for_selector("#panel-completion")
    assert page.locator(".tabs button:visible").all_inner_texts() == ["Completion", "Live"]


def test_an_adapter_is_chosen_in_the_menu_of_models(visit: Visit) -> None:
    page = visit("chat").page
    card = {
        "max_model_len": 64,
        "supported_tasks": ["generate", "chat"],
        "default_sampling_params": {},
    }
    cards = [card | {"id": "base", "parent": None}, card | {"id": "pirate", "parent": "base"}]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": cards}))
    page.reload()
    page.select_option("#model select", "pirate")
    script_answers(page)
    send(page, "hello")
    assert page.evaluate("chats.at(-1).body.model") == "pirate"
    answer(page, "Arr")


# Live.


def events_of_an_idle_pool(num_blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the data of the events `hello` and `view`, the latter without cells."""
    hello = {"model": "toy", "version": "1", "num_blocks": num_blocks, "block_size": 16}
    hello |= {"blocks_per_cell": 1, "max_num_seqs": 8, "max_model_len": 64}
    view: dict[str, Any] = dict.fromkeys(("time_s", "step", "running", "waiting", "preemptions"), 0)
    view |= dict.fromkeys(("prompt_tokens_per_s", "generation_tokens_per_s"), 0)
    view |= dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits"), 0)
    view |= dict.fromkeys(("num_omitted_requests", "drafts", "draft_tokens", "accepted_tokens"), 0)
    view["requests"] = []
    return hello, view


def test_the_live_view_shows_where_adapters_are(visit: Visit) -> None:
    hello, view = events_of_an_idle_pool(99)
    view["cells"] = [[99, 0, 0]]
    idle = {"running": 0, "requests": 0, "bytes": 3 << 20}
    view["adapters"] = [
        {"name": "pirate", "state": "resident", "running": 1, "requests": 2, "bytes": 5 << 20},
        {"name": "poems", "state": "loading", **idle},
    ]
    page = visit("chat").page
    events = (("hello", hello), ("view", view))
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    page.route("**/view/events", lambda route: route.fulfill(body=body))
    page.click("#tab-live")
    page.wait_for_selector("#adapters-list >> text=pirate")
    shown_texts = page.locator("#adapters-list li").all_inner_texts()
    assert [" ".join(text.split()) for text in shown_texts] == [
        "pirate resident, 5 MiB, 1 of 2 requests run",
        "poems loading, 3 MiB, no requests",
    ]


def test_the_map_draws_what_was_used_and_says_what_it_leaves_out(visit: Visit) -> None:
    hello, view = events_of_an_idle_pool(9_999)
    view |= {"state_slots": 24, "held_states": 3}
    view |= {"state_cells": [[2, 2, 1], [1, 1, 0], [1, 2, 2], [20, 0, 0]]}
    first = view | {"cells": [[1, 5, 0], [9, 2, 1], [5000, 0, 0], [10, 4, 0], [4980, 0, 0]]}
    later = view | {"cells": [[1, 5, 0], [9, 0, 0], [5000, 0, 0], [10, 4, 0], [4980, 0, 0]]}
    later |= {"waiting": 2, "step_limit": "sequences"}
    later |= {"tiers": [{"medium": "GPU", "blocks": 9_999, "used": 10}]}
    later["tiers"] += [{"medium": "CPU", "blocks": 2000, "used": 500}]
    page = visit("chat").page
    events = (("hello", hello), ("view", first), ("view", later))
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in events)
    page.route("**/view/events", lambda route: route.fulfill(body=body))
    page.click("#tab-live")
    page.wait_for_selector("#map-scale >> text=Not drawn: 9,980 free blocks and 20 free slots")
    page.focus("#map")
    page.keyboard.press("End")
    assert page.inner_text("#map-said") == "State 4: held by request 2"
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#map-said") == "State 3: free, with cached content"
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    assert page.inner_text("#map-said") == "Block 5,019: retained for an agent session's next turn"
    assert page.inner_text("#tile-waiting-detail") == "as many run as may"
    legend = page.inner_text("#legend-states").split()
    assert " ".join(legend) == "states of recurrent layers, in use 3 of 24"
    assert page.inner_text("#tiers").split() == ["host", "memory", "500", "of", "2,000", "blocks"]
    assert page.evaluate("document.querySelector('#tiers meter').value") == 500
    height = page.evaluate("document.getElementById('map').offsetHeight")
    assert height < 80
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 30, box["y"] + height - 8)
    page.wait_for_selector(".hint >> text=State 2: held by request 1")
    page.mouse.move(box["x"] + box["width"] - 40, box["y"] + 8)
    page.wait_for_selector(".hint", state="hidden")


# Accessibility and speed.


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("options", [{}, PHONE], ids=["desktop", "phone"])
def test_axe_finds_nothing(options: dict[str, Any], scheme: str, visit: Visit, axe: str) -> None:
    page = scripted(visit, color_scheme=scheme, **options)
    found = {"empty chat": violations(page, axe)}
    send(page, "table and code")
    page.evaluate("chats[0].add({ reasoning: 'hm' })")
    answer(page, "|a|b|\n|---|---|\n|1|2|\n\n```python\nx = 1  # one\n```\n\n" + FORMULAS)
    act(page, 1, "Regenerate")
    answer(page, "two", "length")
    found["branches"] = violations(page, axe)
    page.click("button[aria-label='Previous answer']")
    page.click(".thoughts summary")
    found["chat"] = violations(page, axe)
    error = {"message": "too hot", "param": "temperature"}
    page.evaluate("(error) => { window.refusal = { status: 400, error }; }", error)
    page.fill("#message", "refused")
    page.press("#message", "Enter")
    page.wait_for_selector(".turn.lost")
    page.click(".more summary")
    page.select_option("#p-structure_kind", "json")
    found["refused"] = violations(page, axe)
    if options:
        page.click("#history-button")
        found["drawer"] = violations(page, axe)
        page.keyboard.press("Escape")
    page.click("#key-button")
    found["dialog"] = violations(page, axe)
    page.keyboard.press("Escape")
    page.click("#tab-completion")
    page.fill("#p-max_tokens", "5")
    page.click("#completion-form [data-action=run]")
    page.wait_for_selector("#completion-output .ending")
    found["completion"] = violations(page, axe)
    page.click("#tab-live")
    page.wait_for_selector("#live-state[data-state=live]")
    found["live"] = violations(page, axe)
    assert {view: each for view, each in found.items() if each} == {}


PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"


@pytest.mark.parametrize("path", ["", "docs"])
def test_the_first_paint_needs_only_the_document(path: str, visit: Visit) -> None:
    """With its final colours; no other file is ever sent, and no request to the API answered."""
    page = visit("", path=path, color_scheme="dark").page
    page.click("#theme")
    chosen = page.evaluate("getComputedStyle(document.body).backgroundColor")
    asked = []

    def answer(route: Any) -> None:
        if route.request.resource_type == "document":
            route.continue_()
        else:
            asked.append(route.request.url)

    page.route("**/*", answer)
    page.reload(wait_until="commit")
    page.wait_for_function(f"() => {PAINT}")
    assert page.is_visible("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == chosen
    assert [each for each in asked if each.endswith(".js")], "the scripts come later"
    page.unroute("**/*")
