"""Images through the daemon with a GGUF pair, and the requests of llama.cpp's test_vision_api.py.

Its model (ggml-org/tinygemma3-GGUF) is on no package index, so a tiny random one is asked the same.
The classes that it names are not compared; whether a request is answered is.
"""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.daemon import Daemon
from tests.e2e.test_images import FLAGS, Served, data_uri, message
from tests.fakes.tiny_vision import prepare_vision_model, random_image, save_vision_model
from tests.fakes.vision_ggufs import write_grid_mmproj, write_language_model
from worker.models.registry import read_config

pytestmark = pytest.mark.suite("images")
NAME = "qwen3_vl"
IMAGES = (random_image(1, 30, 30), random_image(2, 32, 32))
"""As large as the image processors of the folder and of the pair leave them."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("pair")
    model = save_vision_model(NAME, folder / "source")
    reference = prepare_vision_model(folder / "source", folder / "reference")
    (folder / "gguf").mkdir()
    path = folder / "gguf/tiny.gguf"
    write_language_model(NAME, model, read_config(reference), path)
    write_grid_mmproj(folder / "source", folder / "gguf/mmproj-F32.gguf")
    with Daemon(*FLAGS, "--model", str(path)) as daemon:
        yield Served(NAME, model, daemon)


def test_tokens_are_those_of_the_folder(served: Served) -> None:
    for content in (("see", IMAGES[0]), ("a", *IMAGES, "c")):
        served.assert_greedy(served.answer(message(*content)), content)


def test_a_model_says_that_it_reads_images(served: Served) -> None:
    (card,) = httpx.get(f"{served.daemon.url}/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "image"]


@pytest.mark.parametrize(
    ("prompt", "url", "status"),
    [
        ("What is this:\n", data_uri(IMAGES[0]), 200),
        ("What is this:\n", data_uri(IMAGES[1]), 200),
        ("Test test\n", data_uri(IMAGES[1]), 200),
        ("What is this:\n", "malformed", 400),
        ("What is this:\n", "https://google.com/404", 400),
        ("What is this:\n", "https://ggml.ai", 400),
        ("What is this:\n", "data:text/html;base64,aGVsbG8=", 400),
    ],
)
def test_chat(prompt: str, url: str, status: int, served: Served) -> None:
    """A host that the operator does not allow is never asked."""
    parts = [
        {"type": "text", "text": prompt},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = {
        "temperature": 0.0,
        "top_k": 1,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": parts}],
    }
    response = httpx.post(f"{served.daemon.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == status, response.text
    if status == 200:
        assert response.json()["choices"][0]["message"]["role"] == "assistant"
    else:
        assert response.json()["error"]["param"] == "messages[0].content[1].image_url"


def test_tokens_of_an_image_are_counted(served: Served) -> None:
    body = {"messages": [message("What is this:", IMAGES[0])]}
    without = {"messages": [message("What is this:")]}
    url = f"{served.daemon.url}/tokenize"
    counts = [httpx.post(url, json=each, timeout=60).json()["count"] for each in (body, without)]
    assert counts[0] - counts[1] > 10


PROMPT = {"prompt_string": "What is this: <__media__>\n", "multimodal_data": ["malformed"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
        ("/v1/embeddings", {"input": [PROMPT]}),
        ("/v1/embeddings", {"input": [{"content": message("What is this: ", *IMAGES)["content"]}]}),
    ],
)
def test_images_outside_of_messages(path: str, body: dict[str, Any], served: Served) -> None:
    """llama.cpp takes them in a form of its own; here they are refused."""
    response = httpx.post(served.daemon.url + path, json=body, timeout=60)
    assert response.status_code == 400, response.text
