"""Images through the daemon: greedy tokens are those of transformers on the same weights.

One and several images, between texts, in a second turn, in chunks, from the caches, and after the
death of a worker and of the engine.
"""

import base64
import io
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from PIL import Image

from tests.e2e.daemon import Daemon, eventually
from tests.fakes.tiny_vision import (
    VISION_MODELS,
    random_image,
    read_vision_model,
    save_vision_model,
    vision_processor,
)

pytestmark = pytest.mark.suite("images")

NUM_TOKENS = 8
FLAGS = ("--dtype", "float32", "--max-model-len", "512", "--no-enable-log-requests")


def data_uri(image: Image.Image) -> str:
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()


def message(*content: str | Image.Image, role: str = "user") -> dict[str, Any]:
    """Return a message of texts and images for the API."""
    parts = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else {"type": "image_url", "image_url": {"url": data_uri(each)}}
        for each in content
    ]
    return {"role": role, "content": parts}


@dataclass
class Served:
    """A daemon, and the same model in transformers."""

    name: str
    model: Any
    daemon: Daemon

    def answer(self, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
        body = {
            "messages": list(messages),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        response = httpx.post(f"{self.daemon.url}/v1/chat/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def assert_greedy(self, answer: dict[str, Any], *contents: Sequence[str | Image.Image]) -> None:
        """Check the tokens of an answer to messages, alternately of the user and the assistant."""
        prompt, images = "<s>", []
        for number, content in enumerate(contents):
            prompt += ("user", "assistant")[number % 2] + ":"
            for each in content:
                prompt += each if isinstance(each, str) else VISION_MODELS[self.name].placeholder
                images += [] if isinstance(each, str) else [each]
            prompt += "<|end|>"
        prompt += "assistant:"
        batch = vision_processor(self.name)(
            images=[images] if images else None,
            text=[prompt],
            return_tensors="pt",
            add_special_tokens=False,
        )
        tokens = batch["input_ids"][0].tolist()
        assert answer["prompt_token_ids"] == tokens
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        with torch.inference_mode():
            output = self.model.generate(
                **batch, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        assert answer["choices"][0]["token_ids"] == output[0, len(tokens) :].tolist()


@pytest.fixture(scope="module", params=list(VISION_MODELS))
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("model") / "model"
    save_vision_model(request.param, folder)
    with Daemon(*FLAGS, "--model", str(folder)) as daemon:
        yield Served(request.param, read_vision_model(folder), daemon)


def test_images_between_texts(served: Served) -> None:
    first, second = random_image(1, 40, 30), random_image(2, 20, 50)
    for content in (("see", first), (first, "see"), ("a", first, "b", second, "c"), ("text",)):
        served.assert_greedy(served.answer(message(*content)), content)


def test_the_next_turn_finds_the_image_in_the_caches(served: Served) -> None:
    first = ("look", random_image(3, 33, 44))
    served.assert_greedy(served.answer(message(*first)), first)
    hits = served.daemon.metric("vllm:prefix_cache_hits_total")
    second = ("and", random_image(4, 30, 30))
    messages = [message(*first), {"role": "assistant", "content": "a"}, message(*second)]
    served.assert_greedy(served.answer(*messages), first, ("a",), second)
    assert served.daemon.metric("vllm:prefix_cache_hits_total") > hits
    other = ("look", random_image(5, 33, 44))
    served.assert_greedy(served.answer(message(*other)), other)


def test_choices_share_the_image_and_are_the_same_from_the_caches(served: Served) -> None:
    content = ("see", random_image(6, 25, 25))
    sampled = {"n": 3, "temperature": 1.0, "seed": 5}
    first, again = (served.answer(message(*content), **sampled) for _ in range(2))
    tokens = [choice["token_ids"] for choice in first["choices"]]
    assert tokens == [choice["token_ids"] for choice in again["choices"]]
    assert len(set(map(tuple, tokens))) > 1
    served.assert_greedy(served.answer(message(*content)), content)


@pytest.mark.parametrize("role", ["worker", "engine_core"])
def test_an_answer_goes_on_after_a_death(served: Served, role: str) -> None:
    content = ("dies", random_image(7, 30, 20))
    before = served.answer(message(*content))
    restarts = served.daemon.metric("tokend:restarts_total")
    os.kill(served.daemon.processes()[role].pid, signal.SIGKILL)
    after = served.answer(message(*content))
    assert after["choices"][0]["token_ids"] == before["choices"][0]["token_ids"]
    served.assert_greedy(after, content)
    eventually(lambda: served.daemon.metric("tokend:restarts_total") > restarts)


def test_without_images_the_language_model_is_served_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("text") / "model"
    save_vision_model("smolvlm", folder)
    limit = ("--limit-mm-per-prompt", '{"image": 0}')
    with Daemon(*FLAGS, "--model", str(folder), *limit) as daemon:
        assert "vision part is not loaded: text only" in daemon.text
        served = Served("smolvlm", read_vision_model(folder), daemon)
        served.assert_greedy(served.answer(message("text")), ("text",))
        body = {"messages": [message(random_image(1, 20, 20))]}
        refused = httpx.post(f"{daemon.url}/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert "image_url" in refused.json()["error"]["message"]
