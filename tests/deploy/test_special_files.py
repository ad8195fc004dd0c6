"""A FIFO, a device or a directory in place of a file of a model is refused by name at once."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from api_server.text.chat_template import find_chat_templates, read_chat_template
from api_server.text.tokenizer import special_token_texts
from deploy.models import gguf_header, hf_folder, safetensors_header, tiktoken_file
from deploy.models.pooler_files import read_pooler
from proto.errors import ModelError
from proto.messages.prepared_model import open_model_file, read_model_file
from proto.settings.config import ModelConfig
from proto.settings.generation_config import generation_defaults

FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "model.safetensors", "model.safetensors.index.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "tiktoken.model"),
)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def directory(path: Path) -> None:
    path.mkdir()


def unix_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # a path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(before)


KINDS = {"FIFO": fifo, "device": device, "directory": directory, "socket": unix_socket}


@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(ModelError, match=f"file is a {kind}, not a regular file"):
        open_model_file(path)


def test_a_large_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_model_file(path, 3) == b"abc"
    with pytest.raises(ModelError, match="file is larger than 2 bytes"):
        read_model_file(path, 2)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match="larger"):
        read_model_file(path, 1 << 10)


@pytest.mark.parametrize("name", FILES)
def test_every_file_of_a_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / name).unlink(missing_ok=True)
    fifo(tmp_path / name)
    for read in (hf_folder.read, hf_folder.read_head):
        with pytest.raises(ModelError, match=f"{name} is a FIFO"):
            read(str(tmp_path), lambda what: None)


@pytest.mark.parametrize("kind", ["FIFO", "device", "socket"])
def test_every_reader(tmp_path: Path, kind: str) -> None:
    """Also those that read without the check of the whole folder."""
    readers: dict[str, Callable[[], object]] = {
        "a.gguf": lambda: gguf_header.read(str(tmp_path / "a.gguf")),
        "a.safetensors": lambda: safetensors_header.read(str(tmp_path / "a.safetensors"), 0),
        "a.json": lambda: hf_folder.read_object(tmp_path / "a.json"),
        "a.jinja": lambda: read_chat_template(tmp_path / "a.jinja", {}),
        "chat_template.jinja": lambda: find_chat_templates([str(tmp_path)], {}),
        "tokenizer_config.json": lambda: special_token_texts(str(tmp_path)),
        "generation_config.json": lambda: generation_defaults(
            ModelConfig(generation_config=str(tmp_path)),
            None,  # type: ignore[arg-type]
        ),
        "sentence_bert_config.json": lambda: read_pooler(tmp_path, {}),
        "tiktoken.model": lambda: tiktoken_file.convert(
            tmp_path, {"tokenizer_class": "TikTokenTokenizer"}
        ),
    }
    for name, read in readers.items():
        KINDS[kind](tmp_path / name)
        with pytest.raises(ModelError, match=f"{name} is a {kind}"):
            read()
        (tmp_path / name).unlink()


def test_a_folder_in_which_links_lead_nowhere_is_read_on(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "1_Pooling").mkdir()
    hf_folder.require_regular_files(tmp_path)
    shutil.rmtree(tmp_path / "1_Pooling")
