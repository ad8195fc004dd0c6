"""A visitor of the page: an open page in headless Chromium, with what it may not do."""

import json
import shutil
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
KEY = "open-sesame"
AUTHORIZED = {"authorization": f"Bearer {KEY}"}
LIMIT_MS = 60_000
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


class Visitor:
    """An open page. wrong: script and console errors, and requests to other origins. views: for
    every request of the engine's events, whether it is open. script: runs before the page's own.
    context: of another visitor, to open a second tab of the same browser.
    """

    def __init__(
        self,
        browser: Any,
        url: str,
        tab: str,
        key: str,
        path: str = "",
        script: str = "",
        context: Any = None,
        **options: Any,
    ) -> None:
        options.setdefault("viewport", {"width": 1200, "height": 900})
        self.context = context or browser.new_context(**options)
        self.wrong: list[str] = []
        self.views: dict[Any, bool] = {}
        if key:
            line = f"sessionStorage.setItem('tokend.key', {json.dumps(key)})"
            self.context.add_init_script(line)
        if script:
            self.context.add_init_script(script)
        self.page = self.context.new_page()
        self.page.set_default_timeout(LIMIT_MS)
        self._url = url
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", self._on_request)
        for event in ("requestfinished", "requestfailed"):
            self.page.on(event, self._on_request_end)
        self.page.goto(f"{url}/{path}#{tab}")

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self._url + "/", "data:")):
            self.wrong.append(request.url)
        if request.url.endswith("/view/events"):
            self.views[request] = True

    def _on_request_end(self, request: Any) -> None:
        if request in self.views:
            self.views[request] = False

    def complete(self, prompt: str, max_tokens: int) -> None:
        """Request a greedy completion, and wait for its first token."""
        page = self.page
        page.click("#tab-completion")
        page.fill("#p-temperature", "0")
        page.fill("#p-max_tokens", str(max_tokens))
        page.fill("#prompt", prompt)
        page.click("#completion-form [data-action=run]")
        page.wait_for_selector("#completion-output .token")

    def wait_done(self) -> None:
        self.page.wait_for_selector("#busy", state="hidden")

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript condition is true."""
        self.page.wait_for_function(f"() => {condition}", timeout=LIMIT_MS)

    def count(self, state: str) -> int:
        """The number of blocks in a state by the legend."""
        return int(self.page.inner_text(f"[data-count={state}]").replace(",", ""))

    def colours(self) -> int:
        """The number of different colours of the block map."""
        return self.page.evaluate(
            """() => {
                const map = document.getElementById("map");
                const dots = map.getContext("2d").getImageData(0, 0, map.width, map.height).data;
                return new Set(new Uint32Array(dots.buffer)).size;
            }"""
        )

    def close(self) -> None:
        self.context.close()


def stream_answer(page: Any, answer: str, step: int = 5) -> None:
    """Answer chats with this text, in chunks of `step` characters, one per 2 ms.

    The stream is created in the browser, because a fulfilled route sends its body at once.
    """
    page.evaluate(
        """([answer, step]) => {
            const sent = window.fetch;
            window.fetch = (address, options) => {
                if (!String(address).endsWith("v1/chat/completions")) return sent(address, options);
                window.lastBody = JSON.parse(options.body);
                let at = 0;
                const encoder = new TextEncoder();
                const pull = async (controller) => {
                    await new Promise((done) => setTimeout(done, 2));
                    const delta = { content: answer.slice(at, at + step) };
                    const finish_reason = (at += step) < answer.length ? null : "length";
                    const chunk = JSON.stringify({ choices: [{ delta, finish_reason }] });
                    controller.enqueue(encoder.encode(`data: ${chunk}\\n\\n`));
                    if (finish_reason) {
                        controller.enqueue(encoder.encode("data: [DONE]\\n\\n"));
                        controller.close();
                    }
                };
                return Promise.resolve(new Response(new ReadableStream({ pull })));
            };
        }""",
        [answer, step],
    )


def script_answers(page: Any) -> None:
    """Let the test write the answers of chats: `window.chats` has an object for each request.

    body: of the request. add(delta): sends a part. end(reason), lose(): end the answer, or the
    connection. isStopped: the page has closed it. `window.refusal` is the response of the next one.
    """
    page.evaluate(
        """() => {
            const sent = window.fetch;
            window.chats = [];
            window.fetch = async (address, options) => {
                if (!String(address).endsWith("v1/chat/completions")) return sent(address, options);
                const chat = { body: JSON.parse(options.body), isStopped: false };
                window.chats.push(chat);
                if (window.refusal) {
                    const { status, error } = window.refusal;
                    window.refusal = null;
                    return new Response(JSON.stringify({ error }), { status });
                }
                const encoder = new TextEncoder();
                const start = (controller) => {
                    const send = (data) => controller.enqueue(encoder.encode(`data: ${data}\n\n`));
                    const choose = (delta, finish_reason) =>
                        send(JSON.stringify({ choices: [{ index: 0, delta, finish_reason }] }));
                    chat.add = (delta) =>
                        choose(typeof delta === "string" ? { content: delta } : delta, null);
                    chat.end = (reason = "stop") => {
                        choose({}, reason);
                        send("[DONE]");
                        controller.close();
                    };
                    chat.lose = () => controller.error(new TypeError("network error"));
                    options.signal.addEventListener("abort", () => {
                        chat.isStopped = true;
                        controller.error(new DOMException("stopped", "AbortError"));
                    });
                };
                return new Response(new ReadableStream({ start }));
            };
        }"""
    )
