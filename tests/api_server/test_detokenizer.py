"""Incremental detokenisation equals decoding all tokens, and never emits partial characters."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from api_server.text.tokenizer import ModelTokenizer
from tests.api_server.conftest import CORPUS

TEXTS = [
    "emoji 😀😀 family 👩‍👩‍👧‍👦 flag 🇩🇪",
    "你好，世界。これは日本語です",
    "e\u0301 a\u0308 combining, zero\u200bwidth, right-to-left שלום",
    "   leading and   inner spaces\n\n\ttabs ",
    "<|im_start|>user\nhi<|im_end|>after a special token",
    "<tool call> is no special token",
    "\ufffd is a character too \ufffd",
    "",
]


def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer like SentencePiece with byte fallback and a stripped first space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox, said the old man to the sea"], trainer)
    form = json.loads(tokenizer.to_str())
    form["added_tokens"] = form["added_tokens"][:3]  # byte tokens are normal tokens
    return Tokenizer.from_str(json.dumps(form))


def pieces_of(tokenizer: ModelTokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt)
    return [*(detokenizer.decode_token(token_id) for token_id in ids), detokenizer.flush_text()]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(ModelTokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("seed", range(50))
def test_byte_level_random_ids(tokenizer: Tokenizer, seed: int) -> None:
    source = random.Random(seed)
    ids = [source.randrange(tokenizer.get_vocab_size()) for _ in range(60)]
    assert "".join(pieces_of(ModelTokenizer(tokenizer), ids)) == tokenizer.decode(ids)


def test_a_partial_character_is_held_back(tokenizer: Tokenizer) -> None:
    model = ModelTokenizer(tokenizer)
    ids = tokenizer.encode("😇").ids
    assert len(ids) > 1
    pieces = pieces_of(model, ids)
    assert pieces == [""] * (len(ids) - 1) + ["😇", ""]
    assert pieces_of(model, ids[:-1])[-1] == tokenizer.decode(ids[:-1]) == "\ufffd"


@pytest.mark.parametrize("text", [*CORPUS, *TEXTS[:4]])
def test_metaspace_texts(text: str) -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode(text).ids
    pieces = pieces_of(ModelTokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_metaspace_continues_its_prompt() -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode("the quick brown fox").ids
    for cut in range(1, len(ids)):
        prompt, output = tuple(ids[:cut]), ids[cut:]
        text = tokenizer.decode(list(prompt)) + "".join(
            pieces_of(ModelTokenizer(tokenizer), output, prompt)
        )
        assert text == "the quick brown fox"


def test_metaspace_emits_invalid_bytes() -> None:
    tokenizer = metaspace_tokenizer()
    broken = [tokenizer.token_to_id("<0x80>")] * 100
    pieces = pieces_of(ModelTokenizer(tokenizer), broken)
    assert "".join(pieces) == "\ufffd" * 100
    assert pieces[7] != ""


BROKEN = {
    b"\xff": "\ufffd",
    b"\xe4\xbd": "\ufffd",  # a truncated character is one invalid part
    b"\x80\x80": "\ufffd\ufffd",
    b"\xe4\xbd\xe4\xbd\xa0": "\ufffd你",
    b"\xe4\xbd\xa0\xff\xe5\xa5\xbd": "你\ufffd好",
    b"\xf0\x9f\x98" * 4 + "😀".encode(): "\ufffd" * 4 + "😀",
    "\ufffd▁".encode(): "\ufffd▁",
    b"\xff" * 20 + "你".encode(): "\ufffd" * 20 + "你",
}


@pytest.mark.parametrize(("data", "text"), BROKEN.items())
def test_invalid_bytes_of_byte_tokens(data: bytes, text: str) -> None:
    """Decoded like Python does; valid characters around them are kept."""
    tokenizer = metaspace_tokenizer()
    model = ModelTokenizer(tokenizer)
    run = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    words = tokenizer.encode("the fox").ids
    ids = [*words, *run, *words]
    assert text == data.decode(errors="replace")
    whole = model.decode(ids, skip_special_tokens=True)
    assert whole == f"the fox{text} the fox"
    assert "".join(pieces_of(model, ids)) == whole
    assert "".join(pieces_of(model, run)) == text
    assert b"".join(map(model.token_bytes, run)) == data


@pytest.mark.parametrize("seed", range(100))
def test_random_byte_tokens(seed: int) -> None:
    tokenizer = metaspace_tokenizer()
    source = random.Random(seed)
    words = tokenizer.encode("the quick fox 你 😀").ids
    some = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in (0x80, 0xE4, 0xBD, 0xF0, 0x9F)]
    ids = [words[0], *source.choices([*words, *some, *some], k=40)]
    model = ModelTokenizer(tokenizer)
    whole = model.decode(ids, skip_special_tokens=True)
    assert "".join(pieces_of(model, ids)) == whole


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    model = ModelTokenizer(tokenizer)
    assert pieces_of(model, [1, 2, 0]) == ["", "", "", ""]
    assert model.token_text(1) == "<|im_start|>"


def test_bytes_of_tokens_concatenate(tokenizer: Tokenizer) -> None:
    model = ModelTokenizer(tokenizer)
    text = "naïve 你好 😀"
    ids = tokenizer.encode(text).ids
    assert b"".join(model.token_bytes(token_id) for token_id in ids) == text.encode()


def test_cached_token_texts_are_shared(tokenizer: Tokenizer) -> None:
    """After decoding every token of a large vocabulary, no second copy of it is in memory."""
    detokenizer = ModelTokenizer(tokenizer).detokenizer(())
    assert "".join(map(detokenizer.decode_token, tokenizer.encode("hello fox").ids)) == "hello fox"
    assert not detokenizer._tokens._bytes
