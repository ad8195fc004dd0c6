"""Template rendering has limits of time and memory and does not block the event loop."""

import asyncio
import shutil
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from api_server.text.chat_template import ChatTemplate, Conversation
from api_server.text.rendering import TemplateProcess, TemplateRenderer
from api_server.text.template_process import MODULE
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


async def timed(source: str, limit: float = 0.4) -> TemplateRenderer:
    """Return a renderer whose process has started."""
    renderer = TemplateRenderer(ChatTemplate(source, {}), limit=limit)
    await renderer.compile()
    return renderer


def render_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [child for child in children if MODULE in " ".join(child.cmdline())]


async def until_one_process_is_left() -> None:
    async with asyncio.timeout(20):
        while len(render_processes()) > 1:
            await asyncio.sleep(0.01)


async def test_a_render_within_the_limit_returns_its_text() -> None:
    assert (
        await (await timed("{{ messages[0].content }}!")).render(Conversation(MESSAGES)) == "hello!"
    )


async def test_an_exception_of_the_template_is_raised() -> None:
    with pytest.raises(InvalidRequestError, match="no"):
        await (await timed("{{ raise_exception('no') }}")).render(Conversation(MESSAGES))


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
        await (await timed(ENDLESS[kind])).render(Conversation(MESSAGES))
    assert caught.value.param == "messages"
    await until_one_process_is_left()
    other.cancel()
    if kind != "recursion":  # ends by itself
        assert "longer than 0.4 s" in caught.value.message
        assert ticks >= 2, "the event loop was not blocked"


async def test_renders_work_after_one_was_stopped() -> None:
    rendering = await timed(SLOW)
    with pytest.raises(InvalidRequestError):
        await rendering.render(Conversation(MESSAGES * 2))
    await rendering.compile()
    assert await rendering.render(Conversation(MESSAGES)) == "done"
    await until_one_process_is_left()


async def test_a_long_wait_for_a_render_slot_is_a_retryable_error() -> None:
    rendering = await timed(SLOW)
    slow = [asyncio.create_task(rendering.render(Conversation(MESSAGES * 2))) for _ in range(4)]
    answers = await asyncio.gather(*slow, return_exceptions=True)
    kinds = {type(each) for each in answers}
    assert kinds <= {InvalidRequestError, OverloadedError}
    assert OverloadedError in kinds
    await rendering.compile()
    assert await rendering.render(Conversation(MESSAGES)) == "done"


async def test_a_cancelled_render_releases_its_slot() -> None:
    rendering = await timed(SLOW, 20.0)
    waiting = asyncio.create_task(rendering.render(Conversation(MESSAGES * 2)))
    await asyncio.sleep(0.1)
    waiting.cancel()
    assert await rendering.render(Conversation(MESSAGES)) == "done"
    await until_one_process_is_left()


async def test_a_cancelled_render_that_is_short_keeps_its_process() -> None:
    rendering = await timed("{% for a in range(99999) %}{% endfor %}done", 20.0)
    (before,) = render_processes()
    for _ in range(5):
        waiting = asyncio.create_task(rendering.render(Conversation(MESSAGES)))
        await asyncio.sleep(0.001)
        waiting.cancel()
        assert await rendering.render(Conversation(MESSAGES)) == "done"
    assert render_processes() == [before]


async def test_renderers_share_a_process_also_to_compile() -> None:
    rendering, other = await timed(SLOW, 20.0), TemplateRenderer(ChatTemplate("other", {}))
    (before,) = render_processes()
    running = asyncio.create_task(rendering.render(Conversation(MESSAGES * 2)))
    await asyncio.sleep(0.05)
    waiting = [asyncio.create_task(other.compile())]
    waiting += [asyncio.create_task(other.render(Conversation(MESSAGES)))]
    await asyncio.sleep(0.05)
    assert render_processes() == [before]
    running.cancel()
    assert [await task for task in waiting] == [None, "other"]
    await until_one_process_is_left()


async def test_a_process_that_is_killed_from_outside_costs_no_request() -> None:
    rendering = await timed(
        "{% for a in range(999) %}{% for b in range(999) %}{% endfor %}{% endfor %}!", 20.0
    )
    for _ in range(3):
        (process,) = render_processes()
        waiting = asyncio.create_task(rendering.render(Conversation(MESSAGES)))
        await asyncio.sleep(0.005)
        process.kill()
        assert await waiting == "!"
        (process,) = render_processes()
        process.kill()
        assert await rendering.render(Conversation(MESSAGES)) == "!"


async def test_the_process_has_no_keys_of_the_daemon(monkeypatch) -> None:
    monkeypatch.setenv("TOKEND_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    for process in render_processes():
        process.kill()
        process.wait()
    await timed("done")
    (process,) = render_processes()
    assert "secret" not in process.environ().values()
    assert process.environ()["TZ"] == "UTC", "for strftime_now"


async def test_a_template_that_crashes_is_reported() -> None:
    rendering, killed = await timed(SLOW, 20.0), set[psutil.Process]()
    waiting = asyncio.create_task(rendering.render(Conversation(MESSAGES * 2)))
    async with asyncio.timeout(20):
        while len(killed) < 2:
            await asyncio.sleep(0.01)
            for process in set(render_processes()) - killed:
                process.kill()
                killed.add(process)
    with pytest.raises(InvalidRequestError, match="the chat template crashed on these messages"):
        await waiting


async def test_a_text_that_is_too_long_is_reported_with_the_limit() -> None:
    rendering = await timed("{% for a in range(99) %}{{ 'x' * 100000 }}{% endfor %}", 20.0)
    with pytest.raises(InvalidRequestError, match=r"into 9900000 bytes, more than the limit of 83"):
        await rendering.render(Conversation(MESSAGES))


async def test_a_machine_without_processes_releases_the_slot(monkeypatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise BlockingIOError("fork: resource temporarily unavailable")

    rendering = TemplateRenderer(ChatTemplate("done", {}))
    with monkeypatch.context() as patch:
        patch.setattr("api_server.text.rendering._PROCESS", TemplateProcess())
        patch.setattr(subprocess, "Popen", refuse)
        with pytest.raises(OverloadedError, match="no process"):
            await rendering.render(Conversation(MESSAGES))
    assert await rendering.render(Conversation(MESSAGES)) == "done"


SCARCE = """
import asyncio, os, resource
from api_server.text.chat_template import ChatTemplate, Conversation
from api_server.text.rendering import TemplateRenderer
from proto.errors import OverloadedError

async def main(free):
    rendering = TemplateRenderer(ChatTemplate("done", {}))
    before = os.listdir("/proc/self/fd")
    lowest = os.dup(0)  # all below are in use
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + free, limits[1]))
    os.close(lowest)
    for _ in range(3):
        try:
            await rendering.render(Conversation([]))
        except OverloadedError as error:
            assert "no process" in error.message
        else:
            raise AssertionError(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert os.listdir("/proc/self/fd") == before

limits = resource.getrlimit(resource.RLIMIT_NOFILE)
for free in range(5):
    asyncio.run(main(free))
"""


def test_scarce_descriptors_are_closed_again() -> None:
    """A process takes five, for a moment."""
    subprocess.run([sys.executable, "-c", SCARCE], check=True)


BAD_EXPRESSIONS = {
    "center": "{{ 'x' | center(10**10) }}",
    "format": "{{ '%10000000000d' % 1 }}",
    "a method": "{{ 'x'.ljust(10**10) }}",
    "doubling": "{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}{{ n.x }}",
    "a list": "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}{{ n.x }}",
    "indent": "{{ [1] | tojson(indent=10**10) }}",
    "batch": "{{ [1] | batch(10**10, 'x') | list }}",
    "output": "{% for i in range(99999) %}{{ messages[0].content * 9999 }}{% endfor %}",
}
SLOW_EXPRESSIONS = {
    "sum": "{{ range(99999) | batch(1) | sum(start=[]) }}",
    "urlize": "{{ ('www.a' ~ '(' * 400000 ~ ')' * 400000) | urlize }}",
    "wordwrap": "{{ ('a' * 900000) | wordwrap(1) }}",
    "unique": "{% set x = range(99999) | map('center', 9000) | unique | list %}",
    "replace": "{% set x = ('ab' * 500000).replace('a', 'ab' * 100) %}{{ x.count('c') }}",
}


@pytest.mark.parametrize("kind", BAD_EXPRESSIONS)
async def test_memory_is_limited(kind: str) -> None:
    """Also while constants of the template are computed."""
    before = psutil.Process().memory_info().rss
    rendering = TemplateRenderer(ChatTemplate(BAD_EXPRESSIONS[kind], {}), limit=20.0)
    with pytest.raises((InvalidRequestError, ModelError)):
        await rendering.render(Conversation(MESSAGES))
    assert psutil.Process().memory_info().rss - before < 100 << 20
    assert await (await timed("ok")).render(Conversation(MESSAGES)) == "ok"
    assert all(process.memory_info().rss < 200 << 20 for process in render_processes())


@pytest.mark.parametrize("kind", SLOW_EXPRESSIONS)
async def test_a_single_slow_operation_ends_in_time(kind: str) -> None:
    rendering = await timed("ok")
    rendering = TemplateRenderer(ChatTemplate(SLOW_EXPRESSIONS[kind], {}), limit=0.4)
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.4 s|too much memory"):
        await rendering.render(Conversation(MESSAGES))
    assert time.monotonic() - began < 2.0


async def test_a_long_conversation_may_take_more_memory() -> None:
    messages = [{"role": "user", "content": "né 🦙 " * 170_000}] * 8
    source = "{% for m in messages %}{{ m.content | trim }}{{ m.content | upper }}{% endfor %}"
    expected = ChatTemplate(source, {}).render(Conversation(messages))
    rendering = TemplateRenderer(ChatTemplate(source, {}), limit=60.0)
    assert await rendering.render(Conversation(messages)) == expected


async def test_values_arrive_unchanged() -> None:
    """Large integers, halves of surrogate pairs, and everything else that JSON has."""
    messages = [
        {"role": "user", "content": "\ud83e", "n": 2**70, "x": [None, True, 0.1, {"a": -1}]}
    ]
    source = "{{ messages }}{{ messages[0].content }}{{ add_generation_prompt }}{{ extra.a }}"
    conversation = Conversation(messages, variables={"extra": {"a": 1e100}})
    expected = ChatTemplate(source, {}).render(conversation)
    rendering = await timed(source, 20.0)
    assert await rendering.render(conversation) == expected


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
        front_end.app_state.chat_template._limit = 1.0
        response = await front_end.chat()
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"
        assert (await front_end.http.get("/health")).status_code == 200
