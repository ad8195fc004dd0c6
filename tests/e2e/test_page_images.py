"""Images in chats of the page, in a real browser: how they come, what is sent, what is kept.

The model is the packaged one, which reads no images: the test writes the list of models and the
answers.
"""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.e2e.visitor import CHROMIUM, PHONE, Visitor, script_answers

pytestmark = [
    pytest.mark.suite("browser"),
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium"),
]
Visit = Callable[..., Visitor]
CARD = {
    "id": "seer",
    "max_model_len": 64,
    "supported_tasks": ["generate", "chat"],
    "default_sampling_params": {},
}


def picture(path: Path, size: tuple[int, int] = (40, 20), **fields: Any) -> Path:
    Image.new("RGB", size, "red").save(path, **fields)
    return path


def seeing(visit: Visit, modalities: tuple[str, ...] = ("text", "image"), **options: Any) -> Any:
    """Return the page of a model with these inputs. `page.counted` has the bodies of /tokenize."""
    page = visit("chat", **options).page
    card = CARD | {"input_modalities": list(modalities)}
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [card]}))
    page.counted = []

    def count(route: Any) -> None:
        page.counted.append(route.request.post_data_json)
        route.fulfill(json={"count": 7, "max_model_len": 64, "tokens": []})

    page.route("**/tokenize", count)
    page.reload()
    page.wait_for_selector("#model >> text=seer")
    script_answers(page)
    return page


def send(page: Any, message: str) -> list[Any]:
    """Send a message; return the parts of its content."""
    number = page.evaluate("chats.length")
    page.fill("#message", message)
    page.press("#message", "Enter")
    page.wait_for_function("(number) => chats.length > number", arg=number)
    content = page.evaluate("chats.at(-1).body.messages.at(-1).content")
    page.evaluate("chats.at(-1).add('red'); chats.at(-1).end()")
    page.wait_for_selector("#busy", state="hidden")
    assert isinstance(content, list)
    return content


def size_of(part: dict[str, Any]) -> tuple[str, tuple[int, int]]:
    """Return media type and size of an image part."""
    head, _, data = part["image_url"]["url"].partition(",")
    with Image.open(io.BytesIO(base64.b64decode(data))) as image:
        return head, image.size


def drop(page: Any, path: Path, kind: str) -> None:
    """Drop or paste a file."""
    data = base64.b64encode(path.read_bytes()).decode()
    page.evaluate(
        """([data, name, kind]) => {
            const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
            const files = new DataTransfer();
            files.items.add(new File([bytes], name, { type: "image/png" }));
            const options = { bubbles: true, cancelable: true };
            const event = kind === "paste"
                ? new ClipboardEvent("paste", { ...options, clipboardData: files })
                : new DragEvent("drop", { ...options, dataTransfer: files });
            document.getElementById("message").dispatchEvent(event);
        }""",
        [data, path.name, kind],
    )


def test_images_come_by_file_drop_and_paste(visit: Visit, tmp_path: Path) -> None:
    page = seeing(visit)
    small, large = picture(tmp_path / "a.png"), picture(tmp_path / "b.png", (3000, 1000))
    page.set_input_files("#attach-file", [small, small])
    page.wait_for_selector(".thumb >> nth=1")
    drop(page, small, "drop")
    page.wait_for_selector(".thumb >> nth=2")
    drop(page, large, "paste")
    page.wait_for_selector(".thumb >> nth=3")
    for _ in range(2):
        page.click("button[aria-label='Remove image 2']")
    assert page.locator(".thumb").count() == 2
    parts = send(page, "What colour?")
    assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
    assert parts[2]["text"] == "What colour?"
    assert parts[0]["image_url"]["url"].partition(",")[2] == (
        base64.b64encode(small.read_bytes()).decode()
    )
    assert size_of(parts[1]) == ("data:image/jpeg;base64", (1536, 512))
    assert page.locator(".thumb").count() == 0
    assert page.locator(".turn.user .picture").count() == 2


def test_an_image_alone_is_a_message_and_stays_in_the_conversation(
    visit: Visit, tmp_path: Path
) -> None:
    page = seeing(visit)
    page.set_input_files("#attach-file", picture(tmp_path / "a.png"))
    page.wait_for_selector(".thumb")
    (image,) = send(page, "")
    page.wait_for_selector("#conversations >> text=Image")
    page.reload()
    page.wait_for_selector(".turn.user .picture")
    script_answers(page)
    page.fill("#message", "and now?")
    page.press("#message", "Enter")
    page.wait_for_function("() => chats.length")
    messages = page.evaluate("chats[0].body.messages")
    assert messages[0]["content"] == [image]
    assert messages[-1]["content"] == "and now?"
    page.evaluate("chats[0].add('red'); chats[0].end()")
    page.wait_for_selector("#busy", state="hidden")
    page.click(".turn >> nth=0 >> button:text-is('Edit')")
    page.fill(".edited", "What is it?")
    page.press(".edited", "Enter")
    page.wait_for_function("() => chats.length === 2")
    edited = page.evaluate("chats[1].body.messages")
    assert edited[-1]["content"] == [image, {"type": "text", "text": "What is it?"}]


def test_the_gauge_sends_an_image_once(visit: Visit, tmp_path: Path) -> None:
    page = seeing(visit)
    page.set_input_files("#attach-file", picture(tmp_path / "a.png"))
    page.wait_for_selector("#gauge >> text=7 of 64 tokens")
    page.fill("#message", "What is it?")
    page.wait_for_timeout(1000)  # the gauge counts 0.4 s after a change
    first, *_, last = [
        body["messages"][-1]["content"][0]
        for body in page.counted
        if isinstance(body["messages"][-1]["content"], list)
    ]
    assert first["image_url"]["url"].startswith("data:image/png;base64,")
    assert (last["image_url"], last["uuid"]) == (None, first["uuid"])


def test_what_is_no_image_is_named(visit: Visit, tmp_path: Path) -> None:
    page = seeing(visit)
    path = tmp_path / "note.png"
    path.write_text("no image")
    page.set_input_files("#attach-file", path)
    page.wait_for_selector("#notice-words >> text=note.png is not an image")
    assert page.locator(".thumb").count() == 0


def test_a_model_that_reads_text_only_is_offered_no_images(visit: Visit, tmp_path: Path) -> None:
    page = seeing(visit, ("text",))
    assert page.is_hidden("#attach")
    drop(page, picture(tmp_path / "a.png"), "paste")
    page.fill("#message", "hello")
    page.press("#message", "Enter")
    page.wait_for_function("() => chats.length")
    assert page.evaluate("chats[0].body.messages") == [{"role": "user", "content": "hello"}]


def test_a_phone_has_its_camera(visit: Visit) -> None:
    page = seeing(visit, **PHONE)
    assert page.is_visible("#camera")
    assert page.get_attribute("#camera-file", "capture") == "environment"
    assert page.get_attribute("#camera-file", "accept") == "image/*"
    desktop = seeing(visit)
    assert desktop.is_hidden("#camera")


def test_an_export_has_the_images(visit: Visit, tmp_path: Path) -> None:
    page = seeing(visit)
    page.set_input_files("#attach-file", picture(tmp_path / "a.png"))
    page.wait_for_selector(".thumb")
    send(page, "look")
    with page.expect_download() as download:
        page.click("#history-export")
    path = tmp_path / "export.json"
    download.value.save_as(path)
    other = seeing(visit)
    other.set_input_files("#history-file", path)
    other.click("#conversations >> text=look")
    other.wait_for_selector(".turn.user .picture")
    file = json.loads(path.read_text())
    file["conversations"][0]["id"] = "other"
    file["conversations"][0]["turns"][0]["images"][0]["url"] = "https://a.example/b.png"
    path.write_text(json.dumps(file))
    other.set_input_files("#history-file", path)
    other.wait_for_selector("#notice-words >> text=images must have id and url")
