"""Token ids and rendered chats of the prepared model equal transformers' on the same file."""

import inspect
import random
import textwrap

import pytest

from api_server.text.chat_template import Conversation, find_chat_templates
from api_server.text.tokenizer import ModelTokenizer, special_token_texts
from tests.e2e.reference import Reference, packaged_model

pytestmark = pytest.mark.suite("daemons")

PIECES = [
    "你好,世界。今天天气怎么样?",
    "こんにちは、元気ですか。カタカナとひらがな",
    "안녕하세요 세계",
    "👩🏽‍🚀🎉 emoji 👨‍👩‍👧‍👦 and flags 🇫🇷🇯🇵",
    "<|im_start|>user\nhi<|im_end|>",
    "<|endoftext|>",
    "naïve café — “quotes” … ½ ≠ ∞",
    "\t\tindented\n\n\n   spaces   ",
    "https://example.org/a?b=c&d=%20",
    "0123456789 3.14159 1,000,000 2024-01-31",
    "العربية עברית हिन्दी ไทย",
    "e\u0301 a\u0308 combining",
    "\u200b zero width \ufeff",
    "def f(x):\n    return x ** 2  # ±",
]


def lines() -> list[str]:
    """1,000 lines of code and of random mixtures of the pieces."""
    code = (inspect.getsource(textwrap) + inspect.getsource(inspect)).splitlines()
    rng = random.Random(0)
    mixed = ["".join(rng.choices(PIECES, k=rng.randint(1, 4))) for _ in range(400)]
    return [line for line in code if line][:600] + mixed


@pytest.fixture(scope="module")
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(packaged_model().folder)


async def test_token_ids_equal_transformers(
    reference: Reference, tokenizer: ModelTokenizer
) -> None:
    texts = lines()
    assert len(texts) == 1000
    ours = [ids async for ids in tokenizer.encode(texts, add_special_tokens=True)]
    for text, ids in zip(texts, ours, strict=True):
        assert ids == reference.tokenizer.encode(text), text


async def test_decoded_text_equals_transformers(
    reference: Reference, tokenizer: ModelTokenizer
) -> None:
    encoded = [ids async for ids in tokenizer.encode(lines(), add_special_tokens=False)]
    for text, ids in zip(lines(), encoded, strict=True):
        for skip in (True, False):
            expected = reference.tokenizer.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, text


def test_rendered_chats_equal_transformers(reference: Reference) -> None:
    folder = packaged_model().folder
    template = find_chat_templates([folder], special_token_texts(folder))["default"]
    assert template is not None
    texts = lines()
    for i in range(0, 1000, 4):
        messages = [
            {"role": "system", "content": texts[i]},
            {"role": "user", "content": texts[i + 1]},
            {"role": "assistant", "content": texts[i + 2]},
            {"role": "user", "content": texts[i + 3]},
        ][i // 4 % 2 : 4]
        expected = reference.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert template.render(Conversation(messages)) == expected
