"""tokenizer.json made of tiktoken.model, as Kimi K2 is published; `tiktoken` is the reference."""

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from deploy.models import hf_folder
from proto.byte_level import BYTE_LETTERS
from proto.errors import ModelError
from tests.fakes.tiny_model_files import write_folder

PIECES = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""As tokenization_kimi.py has them, for the engine of `tiktoken`."""

TEXTS = [
    "The quick brown fox's cat wasn't HERE; we'LL see, I'd say. HTTPServer iPhone camelCase",
    "中文English混合，日本語のひらがなとカタカナ。한국어 문장도 있다. 北京市 Pascal 汉字abc",
    "Привет, мир! Ελληνικά κείμενο; العربية مع النص، עברית, हिन्दी में पाठ ไทย Việt Nam ǅungla",
    "1234567890 3.14159 1,000,000 ٣٤٥ ½ Ⅷ x2y3 2026-11-26T22:19:13Z 0xDEADBEEF",
    "def f(x):\n    return {'a': [x ** 2, None]}  # done\n\n\n\tif a != b && c <= d || !e:\r\n\r\n",
    "aaaaaaa aaaaaaaa bababab abababa    spaces       more \u3000\u00a0 \n \n  \t\t end   ",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 a\u0308\u0323 \u200b\u200d \x00\x01 \x7f \x85 \ufffd",
    "<|im_end|> [BOS]<|reserved_token_",
    "",
]
BYTES = {bytes([byte]): byte for byte in range(256)}


def ranks_of(texts: list[str], size: int) -> dict[bytes, int]:
    """Return a vocabulary trained on these texts."""
    letters = BYTE_LETTERS
    alphabet = list(letters.values())
    byte_of = {letter: byte for byte, letter in letters.items()}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return {
        bytes(byte_of[letter] for letter in token): rank
        for token, rank in tokenizer.get_vocab().items()
    }


def named(first: int) -> dict[str, dict[str, Any]]:
    """Return added_tokens_decoder with a gap, and with tokens that texts keep."""
    contents = {0: ("[BOS]", True), 1: ("[EOS]", True), 3: ("<|im_end|>", True), 5: ("<t>", False)}
    return {
        str(first + place): {"content": content, "special": special, "normalized": False}
        for place, (content, special) in contents.items()
    }


def write(folder: Path, ranks: dict[bytes, int], **config: Any) -> Path:
    write_folder(folder)
    (folder / "tokenizer.json").unlink()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": named(len(ranks)),
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config))
    # Would end the test if it ran
    (folder / "tokenization_kimi.py").write_text("raise SystemExit(1)\n")
    return folder


def test_tokens_are_those_of_tiktoken(tmp_path: Path) -> None:
    ranks = ranks_of([*TEXTS, *TEXTS], 600)
    assert len(ranks) == 600
    folder = write(tmp_path / "kimi", ranks)
    contents = hf_folder.read(str(folder), lambda what: None)
    ours = Tokenizer.from_str(contents.tokenizer_json.decode())
    special = {value["content"]: int(key) for key, value in named(len(ranks)).items()}
    special |= {f"<|reserved_token_{number}|>": number for number in (602, 604)}
    theirs = tiktoken.Encoding(
        "kimi", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special
    )
    rng = random.Random(0)
    characters = "".join(TEXTS)
    cut = ["".join(rng.choices(characters, k=rng.randrange(60))) for _ in range(400)]
    periodic = ["".join(rng.choices("ab \n", k=30)) for _ in range(100)]
    for text in [*TEXTS, *cut, *periodic, "<t>a<|reserved_token_602|>[EOS]"]:
        expected = theirs.encode(text, allowed_special="all")
        assert ours.encode(text).ids == expected, repr(text)
        assert ours.decode(expected, skip_special_tokens=False) == text
    assert ours.decode([*ours.encode("a").ids, 603, 605]) == "a<t>"
    assert contents.tokenizer_config["eos_token"] == "[EOS]"


def without_a_byte(ranks: dict[bytes, int]) -> dict[bytes, int]:
    others = [token for token in ranks if token != b"a"]
    return {token: rank for rank, token in enumerate(others)}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (without_a_byte, {}, r"tiktoken\.model has no token for the byte 97"),
        (lambda ranks: ranks | {b"zz": 0}, {}, "each rank from 0 on once"),
        (lambda ranks: ranks | {b"z" * 2000: len(ranks)}, {}, "line 257 has a token of 2000 bytes"),
        (dict, {"tokenizer_class": "Other"}, "tokenizer_class .* is Other.*TikTokenTokenizer"),
        (dict, {"added_tokens_decoder": []}, "added_tokens_decoder must be an object"),
        (dict, {"added_tokens_decoder": {"3": {"content": "x"}}}, "begin with 256"),
        (dict, {"added_tokens_decoder": {"256": {}}}, "no content for 256"),
        (dict, {"added_tokens_decoder": {"256": {"content": "a"}}}, "another token's name"),
    ],
)
def test_what_is_invalid_is_named(
    tmp_path: Path,
    change: Callable[[dict[bytes, int]], dict[bytes, int]],
    config: dict[str, Any],
    message: str,
) -> None:
    folder = write(
        tmp_path / "kimi", change({bytes([byte]): byte for byte in range(256)}), **config
    )
    with pytest.raises(ModelError, match=message):
        hf_folder.read(str(folder), lambda what: None)


def test_a_line_that_is_no_rank_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "kimi", BYTES)
    with (folder / "tiktoken.model").open("a") as stream:
        stream.write("YWI=\n")
    with pytest.raises(ModelError, match="line 257 is not"):
        hf_folder.read(str(folder), lambda what: None)
