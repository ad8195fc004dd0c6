"""Which tokens end an answer, and what in the model's files says so."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.models import gguf_file, hf_folder, prepared_folder
from deploy.models.prepared_folder import ModelContents
from proto.errors import ModelError
from proto.messages.pooling import Pooler
from proto.messages.prepared_model import PreparedModel
from proto.settings.turn_ends import find_turn_ends
from tests.deploy.test_prepare import silent
from tests.fakes.tiny_model_files import END, TOKENS, write_folder, write_gguf

FIRST = 40
"""Id of the first special token of a folder; the others follow."""
PLAIN = 70
"""Id of an ordinary token with the text of a turn end."""


def prepare(contents: ModelContents, folder: Path) -> PreparedModel:
    folder.mkdir()
    return prepared_folder.write(
        contents, name="tiny", source="tiny", target=str(folder), final=str(folder)
    )


def folder_with(
    folder: Path, special: list[str], plain: str = "", *, config: Any = None, **files: Any
) -> Path:
    """Write a folder. special: texts of tokens. config: its ids. files: JSON, without `.json`."""
    write_folder(folder, config={"eos_token_id": config})
    vocabulary = {token: number for number, token in enumerate(TOKENS)} | {plain: PLAIN}
    added = [
        {"id": FIRST + number, "content": text, "special": True, "normalized": False}
        for number, text in enumerate(special)
    ]
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    tokenizer = {"model": model, "added_tokens": added}
    for name, value in ({"tokenizer": tokenizer, "tokenizer_config": {}} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def ends_of(folder: Path) -> dict[int, str]:
    contents = hf_folder.read(str(folder), silent)
    model = prepare(contents, folder.parent / "prepared")
    return dict(zip(model.eos_token_ids, model.end_reasons, strict=True))


def template(*texts: str) -> dict[str, Any]:
    return {"chat_template": "{{ '" + "' + messages + '".join(texts) + "' }}{# [EOS] #}"}


@pytest.mark.parametrize(
    ("special", "files", "expected"),
    [
        (
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            {
                "config": FIRST,
                "tokenizer_config": template("<|im_start|>", "<|im_end|>\\n"),
            },
            {0: "<|endoftext|> (config.json)", 2: "<|im_end|> (chat template)"},
        ),
        (
            ["<a>", "<b>", "</s>"],
            {
                "config": [FIRST, FIRST + 2],
                "generation_config": {"eos_token_id": [FIRST + 1, FIRST + 1], "eot_token_id": None},
                "tokenizer_config": {
                    "eos_token": {"content": "</s>"},
                    "chat_template": "{{ messages + eos_token }}",
                },
            },
            {
                1: "<b> (generation_config.json)",
                0: "<a> (config.json)",
                2: "</s> (config.json, tokenizer's eos_token, chat template)",
            },
        ),
        (
            ["<eot>", "<eom>", "<x>"],
            {
                "tokenizer_config": {"eot_token": "<eot>", "eom_token": {"content": "<eom>"}},
                "special_tokens_map": {"eos_token": "<x>"},
            },
            {
                2: "<x> (tokenizer's eos_token)",
                0: "<eot> (tokenizer's eot_token)",
                1: "<eom> (tokenizer's eom_token)",
            },
        ),
        # a comment of the template writes nothing, and a token that it does not write ends no turn
        (["[EOS]", "<end_of_turn>", "<|eot_id|>"], {"tokenizer_config": template("x")}, {}),
        (["<|end|>"], {"tokenizer_config": template("<|end|>")}, {0: "<|end|> (chat template)"}),
        # models whose answers are several messages
        *(
            (["<|end|>", "<|eom|>", text, "<|eot|>"], {"tokenizer_config": template(*written)}, end)
            for text, written, end in [
                (
                    "<|call|>",
                    ("<|end|>", "<|call|>"),
                    {2: "<|call|> (chat template)"},
                ),
                ("<|message|>", ("<|eom|>", "<|eot|>"), {3: "<|eot|> (chat template)"}),
                ("<|calls|>", ("<|end|>", "<|calls|>"), {2: "<|calls|> (chat template)"}),
            ]
        ),
        # GLM, and other models that begin turns alike
        (
            ["<|user|>", "<|assistant|>", "<|observation|>"],
            {"tokenizer_config": template("<|user|>", "<|assistant|>", "<|observation|>")},
            {0: "<|user|> (chat template)", 2: "<|observation|> (chat template)"},
        ),
        (
            ["<|user|>", "<|assistant|>"],
            {"tokenizer_config": template("<|user|>", "<|assistant|>")},
            {},
        ),
        # of another name
        (
            ["<|eom_id|>"],
            {
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "default", "template": "x"},
                        {"name": "tool_use", "template": "<|eom_id|>"},
                    ]
                }
            },
            {0: "<|eom_id|> (chat template)"},
        ),
    ],
)
def test_the_end_tokens_of_a_folder(
    tmp_path: Path, special: list[str], files: dict[str, Any], expected: Mapping[int, str]
) -> None:
    folder = folder_with(tmp_path / "mine", special, **files)
    assert ends_of(folder) == {FIRST + number: why for number, why in expected.items()}


def test_an_ordinary_token_ends_no_turn_and_one_outside_of_the_weights_is_left_out(
    tmp_path: Path,
) -> None:
    config = template("<|im_end|>") | {"eos_token": "!"}
    folder = folder_with(
        tmp_path / "mine", [], "<|im_end|>", config=[5000], tokenizer_config=config
    )
    assert ends_of(folder) == {0: "! (tokenizer's eos_token)"}
    encoder = replace(hf_folder.read(str(folder), silent), pooler=Pooler(generates=False))
    assert prepare(encoder, tmp_path / "encoder").eos_token_ids == ()


@pytest.mark.parametrize("key", ["eos_token_id", "eot_token_id"])
@pytest.mark.parametrize("file", ["config", "generation_config"])
def test_an_invalid_id_is_refused_by_file_and_key(tmp_path: Path, file: str, key: str) -> None:
    folder = folder_with(tmp_path / "mine", [], generation_config={})
    path = folder / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {key: [1, "x"]}))
    with pytest.raises(ModelError, match=rf"^{file}\.json: {key} \[1, 'x'\]"):
        hf_folder.read(str(folder), silent)


def test_a_tokenizer_config_that_is_no_object_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer_config\.json must contain a JSON object"):
        find_turn_ends((), b"{}", ["eos_token"], ())


def test_the_end_tokens_of_a_gguf_file(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.chat_template.tool_use": "<|end|>"}
    write_gguf(tmp_path / "tiny.gguf", extra=keys)
    contents = gguf_file.read(str(tmp_path / "tiny.gguf"), silent)
    model = prepare(contents, tmp_path / "prepared")
    assert model.ends_notice == (
        f"{END} <|end|> (tokenizer's eos_token, chat template), "
        f"7 {TOKENS[7]} (tokenizer's eot_token)"
    )
    assert model.has_chat_template
    files = [tmp_path / "prepared" / name for name in ("", "additional_chat_templates/tool_use")]
    assert files[1].with_suffix(".jinja").read_text() == "<|end|>"


def test_comments_without_an_end_are_read_once() -> None:
    began = time.process_time()
    for source in ("{#" * 500_000, "{# a #}" * 100_000 + "{#" * 100_000):
        assert find_turn_ends((), b'{"model": {"vocab": {}}}', {}, [source]) == {}
    assert time.process_time() - began < 5.0
