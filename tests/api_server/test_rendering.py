"""Template rendering has a time limit and does not block the event loop."""

import asyncio
import shutil
import threading
import time

import msgspec
import pytest

from api_server.text.chat_template import ChatTemplate, Conversation
from api_server.text.rendering import TemplateRenderer
from proto.errors import InvalidRequestError, ModelError, OverloadedError

MESSAGES = [{"role": "user", "content": "hello"}]
MANY = "range(99999)"
ENDLESS = {
    "loops": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "a filter": f"{{% for a in {MANY} %}}{{{{ {MANY} | map('string') | join }}}}{{% endfor %}}",
    "a global": "{{ lipsum(n=10**9) }}",
    "recursion": "{% macro m() %}{% for a in [1, 2] %}{{ m() }}{% endfor %}{% endmacro %}{{ m() }}",
}
SLOW = "{% if messages|length > 1 %}" + ENDLESS["loops"] + "{% endif %}done"


def timed(source: str, limit: float = 0.2) -> TemplateRenderer:
    return TemplateRenderer(ChatTemplate(source, {}), limit=limit)


def num_renders() -> int:
    return sum(thread.name == "render" for thread in threading.enumerate())


async def until_no_render_is_left() -> None:
    async with asyncio.timeout(20):
        while num_renders():
            await asyncio.sleep(0.01)


async def test_a_render_within_the_limit_returns_its_text() -> None:
    assert await timed("{{ messages[0].content }}!").render(Conversation(MESSAGES)) == "hello!"


async def test_an_exception_of_the_template_is_raised() -> None:
    with pytest.raises(InvalidRequestError, match="no"):
        await timed("{{ raise_exception('no') }}").render(Conversation(MESSAGES))


@pytest.mark.parametrize("kind", ENDLESS)
async def test_an_endless_render_is_stopped(kind: str) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    other = asyncio.create_task(tick())
    with pytest.raises(InvalidRequestError) as caught:
        await timed(ENDLESS[kind]).render(Conversation(MESSAGES))
    assert caught.value.param == "messages"
    await until_no_render_is_left()
    other.cancel()
    if kind != "recursion":  # ends by itself
        assert "longer than 0.2 s" in caught.value.message
        assert ticks >= 2, "the event loop was not blocked"


async def test_renders_work_after_one_was_stopped() -> None:
    rendering = timed(SLOW)
    with pytest.raises(InvalidRequestError):
        await rendering.render(Conversation(MESSAGES * 2))
    assert await rendering.render(Conversation(MESSAGES)) == "done"
    await until_no_render_is_left()


async def test_a_long_wait_for_a_render_slot_is_a_retryable_error() -> None:
    rendering = timed(SLOW)
    slow = [asyncio.create_task(rendering.render(Conversation(MESSAGES * 2))) for _ in range(4)]
    answers = await asyncio.gather(*slow, return_exceptions=True)
    kinds = {type(each) for each in answers}
    assert kinds <= {InvalidRequestError, OverloadedError}
    assert OverloadedError in kinds
    assert await rendering.render(Conversation(MESSAGES)) == "done"


async def test_a_cancelled_render_releases_its_slot() -> None:
    rendering = timed(SLOW, 20.0)
    waiting = asyncio.create_task(rendering.render(Conversation(MESSAGES * 2)))
    while not num_renders():
        await asyncio.sleep(0.001)
    waiting.cancel()
    assert await rendering.render(Conversation(MESSAGES)) == "done"


async def test_a_failure_to_start_a_thread_releases_the_slot(monkeypatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rendering = timed("done")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OverloadedError, match="no thread"):
            await rendering.render(Conversation(MESSAGES))
    assert await rendering.render(Conversation(MESSAGES)) == "done"


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10**9",
        "10**9 * 'a'",
        "[1] * 10**9",
        "9**(9**9)",
        "2**(10**9)",
        "2**4000 * 2**4000",
    ],
)
def test_operators_cannot_create_huge_values(expression: str) -> None:
    """Not even while the template is compiled, when constants are folded."""
    start = time.monotonic()
    for source in (f"{{{{ {expression} }}}}", f"{{% set x = {expression} %}}"):
        with pytest.raises(InvalidRequestError, match="too large"):
            ChatTemplate(source, {}).render(Conversation(MESSAGES))
    assert time.monotonic() - start < 5.0


def test_operators_work_for_normal_values() -> None:
    source = "{{ '-' * 80 }}{{ 2**10 }}{{ 3 * 4 }}{{ 1.5 * 2 }}{{ 2 ** -1 }}{{ (1, 2) * 2 }}"
    expected = "-" * 80 + "1024123.00.5(1, 2, 1, 2)"
    assert ChatTemplate(source, {}).render(Conversation(MESSAGES)) == expected


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ (" * 3000, "{{ '%d' % 'x' }}"])
def test_any_failure_of_a_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises((InvalidRequestError, ModelError)):
        ChatTemplate(source, {}).render(Conversation(MESSAGES))


async def test_the_route_answers_400(start, model, tmp_path) -> None:
    """The template never ends; the front end keeps serving."""
    shutil.copytree(model.folder, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(ENDLESS["loops"])
    served = msgspec.structs.replace(model, folder=str(tmp_path / "m"))
    async with start(served=served, accepts=True) as front_end:
        front_end.app_state.chat_template._limit = 0.2
        response = await front_end.chat()
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert (await front_end.http.get("/health")).status_code == 200
