"""The trace page in a real browser: content, navigation, and speed with a large trace."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.trace.command import read_trace
from deploy.trace.condense import STEP_COLUMNS, Condensed, State
from deploy.trace.page import render
from proto.messages.sched_trace import Arrival, Finish
from tests.fakes.traced_engine import TracedEngine, random_load

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.suite("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Shown:
    """An open page. wrong: errors of its scripts and its console."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1200, "height": 800}, **options)
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.on("request", lambda request: self._on_request(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("#stage[data-drawn]")
        self.box = self.page.locator("#stage").bounding_box()

    def _on_console(self, message: Any) -> None:
        if message.type == "error":
            self.wrong.append(message.text)

    def _on_request(self, url: str) -> None:
        if not url.startswith("file:"):
            self.wrong.append(url)

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of an attribute of the stage once the requested view is drawn."""
        self.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        return [float(each) for each in self.page.get_attribute("#stage", name).split()]

    def point(self, right: float, down: float) -> None:
        """Move the mouse to a position given as fractions of the stage."""
        box = self.box
        self.page.mouse.move(box["x"] + right * box["width"], box["y"] + down * box["height"])

    def colours(self, canvas: int = 0) -> int:
        """Return the number of different colours of a canvas."""
        return self.page.evaluate(
            """(index) => {
                const canvas = document.querySelectorAll("canvas")[index];
                const pen = canvas.getContext("2d");
                const dots = pen.getImageData(0, 0, canvas.width, canvas.height).data;
                return new Set(new Uint32Array(dots.buffer)).size;
            }""",
            canvas,
        )


@pytest.fixture
def small(browser, tmp_path: Path) -> Iterator[Shown]:
    engine = TracedEngine(24)
    random_load(6, engine)
    path = tmp_path / "small.html"
    trace = tmp_path / "small.jsonl"
    trace.write_bytes(engine.content)
    path.write_text(render(read_trace(trace), trace.name))
    shown = Shown(browser, path)
    yield shown
    assert shown.wrong == []
    shown.page.close()


def test_the_trace_is_drawn_and_hovering_shows_details(small: Shown) -> None:
    assert small.page.locator("canvas").count() == 5
    for canvas in range(5):
        assert small.colours(canvas) > 3
    assert "preemptions" in small.page.inner_text("#summary")
    tip = small.page.locator("#tip")
    small.point(0.5, 0.2)
    assert "request 1" in tip.inner_text()
    assert "prompt tokens" in tip.inner_text()
    small.point(0.5, 0.7)
    assert "Step " in tip.inner_text()
    assert "blocks" in small.page.inner_text("#step")


def test_wheel_drag_and_buttons(small: Shown) -> None:
    start, end = small.numbers("data-span")
    small.point(0.5, 0.2)
    for _ in range(5):
        small.page.mouse.wheel(0, -120)
    inside = small.numbers("data-span")
    assert start < inside[0] < inside[1] < end
    small.page.mouse.down()
    small.point(0.3, 0.2)
    small.page.mouse.up()
    moved = small.numbers("data-span")
    assert moved[0] > inside[0]
    assert moved[1] - moved[0] == pytest.approx(inside[1] - inside[0])
    small.page.click("#fit")
    assert small.numbers("data-span") == [start, end]
    small.page.click("#in")
    again = small.numbers("data-span")
    assert again[1] - again[0] == pytest.approx((end - start) / 2)


@pytest.mark.parametrize("width", [1200, 390])
def test_names_and_the_placeholder_are_not_cut(small: Shown, width: int) -> None:
    """Record the names that are written while all of them, with a long one, are drawn again."""
    name = "a-session-with-a-name-longer-than-a-third-of-the-window-" * (width // 390)
    small.page.set_viewport_size({"width": width, "height": 800})
    small.page.evaluate(
        """(name) => {
            const { page } = window;
            page.trace.about.jobs[0] = name;
            page.timeline = new Timeline(page.view);
            window.written = {};
            const write = CanvasRenderingContext2D.prototype.fillText;
            CanvasRenderingContext2D.prototype.fillText = function (text, x, y, most) {
                window.written[text] = [x, x + this.measureText(text).width, LEFT];
                return write.call(this, text, x, y, most);
            };
            page.draw();
        }""",
        name,
    )
    small.numbers("data-span")
    written = small.page.evaluate("window.written")
    (request, *_) = (each for each in written if each.endswith("/1"))
    for each in (name, request):
        left, right, space = written[each]
        assert 0 < left < right <= width
        assert (right > space) == (each == name), "only the long one goes on over the row"
        assert space <= width / 3 + 1
    cut = "all => all.filter((each) => each.scrollWidth > each.clientWidth).length"
    assert small.page.eval_on_selector_all("figcaption, #summary", cut) == 0
    room = """(field) => {
        const pen = document.createElement("canvas").getContext("2d");
        const style = getComputedStyle(field);
        pen.font = style.font;
        const inner = field.clientWidth - parseFloat(style.paddingLeft) * 2;
        return inner - pen.measureText(field.placeholder).width;
    }"""
    assert small.page.eval_on_selector("#find", room) >= 0


def test_keyboard_navigation(small: Shown) -> None:
    page = small.page
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "stage":
            break
    assert page.evaluate("document.activeElement.id") == "stage"
    whole = small.numbers("data-span")
    page.keyboard.press("+")
    page.keyboard.press("+")
    near = small.numbers("data-span")
    assert near[1] - near[0] < whole[1] - whole[0]
    page.keyboard.press("ArrowRight")
    assert small.numbers("data-span")[0] > near[0]
    page.keyboard.press("]")
    rows = small.numbers("data-rows")
    page.keyboard.press("ArrowDown")
    assert small.numbers("data-rows")[0] >= rows[0]
    page.keyboard.press("0")
    assert small.numbers("data-span") == whole
    for _ in range(3):
        page.keyboard.press(".")
    small.numbers("data-span")
    assert page.inner_text("#step").startswith("Step 3 ")
    page.keyboard.press(",")
    small.numbers("data-span")
    assert page.inner_text("#step").startswith("Step 2 ")


def test_sorting_and_searching(small: Shown) -> None:
    page = small.page
    for order in ("tenant", "duration", "job", "arrival"):
        page.select_option("#order", order)
        small.numbers("data-span")
    whole = small.numbers("data-span")
    page.fill("#find", page.evaluate("window.page.trace.about.requests[5]"))
    assert small.numbers("data-span") != whole
    assert page.evaluate("window.page.view.hovered") == 5


def test_light_and_dark_colour_schemes(browser, small: Shown, tmp_path: Path) -> None:
    dark = Shown(browser, tmp_path / "small.html", color_scheme="dark")
    colours = [
        each.page.evaluate("getComputedStyle(document.body).backgroundColor")
        for each in (small, dark)
    ]
    assert colours[0] != colours[1]
    assert dark.wrong == []
    dark.page.close()


def large(num_requests: int, num_steps: int) -> Condensed:
    """Return condensed data of this many requests and steps, without trace lines."""
    condensed = Condensed(TracedEngine().header)
    span = 10_000 * num_steps
    for step in range(num_steps):
        condensed.step_times.append(step * 10_000)
        condensed.step_ends.append(step * 10_000 + 9_000)
        for place, name in enumerate(STEP_COLUMNS):
            condensed.steps[name].append(step if name == "step" else (step * (place + 3)) % 90)
    for row in range(num_requests):
        at = row * span // num_requests
        condensed.arrivals.append(
            Arrival(
                time_us=at,
                arrived_us=at,
                seq_id=row,
                request_id=row,
                num_prompt_tokens=9,
                max_tokens=9,
            )
        )
        for state in State:
            condensed.segments.append(
                (row, int(state), at + state * 400_000, at + (state + 1) * 400_000)
            )
        condensed.finishes[row] = Finish(
            time_us=at + 2_000_000, seq_id=row, reason="stop", num_output_tokens=9
        )
    condensed.end = span + 2_000_000
    return condensed


def test_ten_thousand_requests_and_a_hundred_thousand_steps(browser, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(render(large(10_000, 100_000), "large.jsonl"))
    shown = Shown(browser, path)
    assert "10,000 requests · 100,000 steps" in shown.page.inner_text("#summary")
    assert shown.colours() > 4
    before = shown.numbers("data-drawn")[0]
    shown.point(0.5, 0.2)
    for _ in range(40):
        shown.page.mouse.wheel(0, -120)
    assert shown.numbers("data-drawn")[0] > before
    start, end = shown.numbers("data-span")
    assert end - start < 10_000_000
    assert shown.numbers("data-rows")[1] < 100
    assert shown.colours() > 4
    assert shown.wrong == []
    shown.page.close()
