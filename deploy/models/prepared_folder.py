"""Writes a prepared folder: the files of `proto.messages.prepared_model`, the manifest last.

`ModelContents` is what a reader (gguf_file.py, hf_folder.py) returns, `write` stores it.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

from proto.codec import encode, to_json
from proto.errors import MAX_SHOWN, ModelError, shown
from proto.messages.pooling import Pooler
from proto.messages.prepared_model import (
    CHAT_TEMPLATES,
    TEXT_BODIES,
    ModelSetting,
    PreparedModel,
    TensorIndex,
    VisionFacts,
    read_model_file,
)
from proto.settings.turn_ends import find_turn_ends
from worker.models.families import FAMILIES, family_of

_PANIC: Final = "PanicException"
"""Exception for a panic of a library in Rust: a BaseException that cannot be imported."""
_MAX_CHARACTERS: Final = 3 * MAX_SHOWN


@contextmanager
def as_model_error(what: str) -> Iterator[None]:
    """Turn any exception of a library about a model file into a ModelError.

    Libraries raise all kinds of exceptions for invalid files. what: begin of the message.
    """
    try:
        yield
    except ModelError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        text = " ".join(str(error).split())[:_MAX_CHARACTERS]
        raise ModelError(f"{what}: {text or type(error).__name__}") from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None for no such file. Raises ModelError."""
    try:
        return json.loads(read_model_file(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None


def check_space(folder: str, num_bytes: int) -> None:
    """Raise ModelError if the disk of a folder has less than num_bytes free."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"not enough space on the disk of {folder}: {size_text(num_bytes)} are needed "
            f"and {size_text(free)} are free"
        )


def size_text(num_bytes: float) -> str:
    """Return a size of files as text: "98.4 MB", from 1 GB on "4.7 GB"."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


_SAMPLE_BYTES: Final = 4096
_HEAD_NAMES: Final = (
    "output.weight",
    "lm_head.weight",
    "token_embd.weight",
    "model.embed_tokens.weight",
)
"""Tensors whose rows are the vocabulary, by preference; the last two for tied embeddings."""

_MAX_TOKENS: Final = 1 << 31
"""Limit of vocabulary and context length: token ids and positions fit 32 bits everywhere."""

ProgressCallback = Callable[[str], None]


@dataclass(frozen=True)
class ModelContents:
    """Everything that is read from a model file or folder.

    config: Hugging Face style. tokenizer_json: for the `tokenizers` library.
    tokenizer_config: at least bos_token and eos_token where the model has them.
    chat_templates: by name; the names of CHAT_TEMPLATES are kept.
    ends: ids of tokens that end an answer, as the model's files name them, each with the place.
    pooler: how the model pools; None for one that only generates. max_tokens: longest text of a
        model that pools, if it is shorter than the model's length.
    unloaded_parts, generation_settings, vision: as in PreparedModel.
    files: further files of the prepared folder, by name.
    """

    config: Mapping[str, Any]
    tokenizer_json: bytes
    tokenizer_config: Mapping[str, Any]
    tensors: TensorIndex
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    ends: Sequence[tuple[int, str]] = ()
    bos_token_id: int | None = field(default=None)
    pooler: Pooler | None = None
    max_tokens: int | None = None
    unloaded_parts: tuple[str, ...] = ()
    generation_settings: tuple[ModelSetting, ...] = ()
    vision: VisionFacts | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def write(
    contents: ModelContents,
    *,
    name: str,
    source: str,
    target: str,
    final: str,
) -> PreparedModel:
    """Fill the folder `target`, which will be moved to `final`; return the manifest."""
    config = contents.config
    vocab_size = _vocab_size(contents)
    generates = contents.pooler is None or contents.pooler.generates
    ends = _turn_ends(contents, vocab_size) if generates else {}
    templates = {
        file: contents.chat_templates[name]
        for name, file in CHAT_TEMPLATES.items()
        if name in contents.chat_templates
    }
    manifest = PreparedModel(
        folder=final,
        name=name,
        source=source,
        architecture=architecture_of(config),
        vocab_size=vocab_size,
        max_position=min(_max_position(config), contents.max_tokens or _MAX_TOKENS),
        bos_token_id=contents.bos_token_id,
        eos_token_ids=tuple(ends),
        end_reasons=tuple(ends.values()),
        weights_sample=weights_sample(contents.tensors),
        has_chat_template=bool(templates),
        pooler=contents.pooler,
        generates=generates,
        hidden_size=_hidden_size(config),
        unloaded_parts=contents.unloaded_parts,
        generation_settings=contents.generation_settings,
        vision=contents.vision,
    )
    files = {
        **contents.files,
        "config.json": _json(config),
        "tokenizer.json": contents.tokenizer_json,
        "tokenizer_config.json": _json(contents.tokenizer_config),
        "tensors.msgpack": encode(contents.tensors),
    }
    files |= {file: _template(text) for file, text in templates.items()}
    files["manifest.json"] = to_json(manifest)
    check_space(target, sum(map(len, files.values())))
    for file, data in files.items():
        _write(target, file, data)
    return manifest


def weights_sample(index: TensorIndex) -> str:
    """Return the SHA-256 of name, type, shape and some middle bytes of every tensor, by name.

    Does not depend on how tensors are distributed over files. Reads a few MB of a model of any
    size; worker.loader.digest reads everything where that is needed.
    """
    digest = hashlib.sha256()
    streams = [open(path, "rb") for path in index.files]  # noqa: SIM115 (closed below, all)
    try:
        for tensor in sorted(index.tensors, key=lambda entry: entry.name):
            digest.update(f"{tensor.name}\0{tensor.type}\0{tensor.shape}\0".encode())
            for file, offset, num_bytes in tensor.byte_ranges:
                length = min(num_bytes, _SAMPLE_BYTES)
                stream = streams[file]
                stream.seek(offset + (num_bytes - length) // 2)
                sample = stream.read(length)
                if len(sample) < length:
                    raise ModelError(f"{index.files[file]} ends inside {tensor.name}")
                digest.update(sample)
    finally:
        for stream in streams:
            stream.close()
    return digest.hexdigest()


def _template(text: str) -> bytes:
    """Encode the template; JSON can contain unpaired surrogates, which have no encoding."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ModelError("the chat template is not valid text") from None


def first_architecture(config: Mapping[str, Any]) -> str:
    """Return the architecture that a config.json names; "" if it names none."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the architecture; raises ModelError if it is missing or not supported."""
    name = first_architecture(config)
    if not name:
        raise ModelError("config.json has no valid key `architectures`")
    is_body = config.get("model_type") in TEXT_BODIES
    if name not in FAMILIES and not is_body and not _is_known_to_transformers(name):
        family_of(name)
    return name


def _is_known_to_transformers(architecture: str) -> bool:
    """Return whether transformers has the architecture as a causal language model.

    Whether its code can run over KV pages is decided by the worker, which builds it.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def _vocab_size(contents: ModelContents) -> int:
    shapes = {tensor.name: tensor.shape for tensor in contents.tensors.tensors}
    for name in _HEAD_NAMES:
        if shapes.get(name):
            return shapes[name][0]
    size = contents.config.get("vocab_size")
    if not isinstance(size, int) or not 0 < size < _MAX_TOKENS:
        raise ModelError("neither config.json nor the weights define the size of the vocabulary")
    return size


def _turn_ends(contents: ModelContents, vocab_size: int) -> dict[int, str]:
    """Return the tokens that end an answer, and why; without tokens that have no logit."""
    with as_model_error("tokenizer.json"):
        ends = find_turn_ends(
            contents.ends,
            contents.tokenizer_json,
            contents.tokenizer_config,
            contents.chat_templates.values(),
        )
    return {token_id: why for token_id, why in ends.items() if token_id < vocab_size}


def _hidden_size(config: Mapping[str, Any]) -> int:
    """Return the size of a hidden state; 0 if it is not a number, which the worker refuses."""
    size = config.get("hidden_size")
    return size if type(size) is int and 0 < size < _MAX_TOKENS else 0


def _max_position(config: Mapping[str, Any]) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or not 0 < length < _MAX_TOKENS:
        raise ModelError(
            "config.json must give max_position_embeddings as a positive number, "
            f"not {shown(length)}"
        )
    return length


def is_token_id(value: Any) -> TypeGuard[int]:
    """Whether a setting can be a token id; `True` is an int in Python, but not a token id."""
    return type(value) is int and 0 <= value < _MAX_TOKENS


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode() + b"\n"


def _write(folder: str, name: str, data: bytes) -> None:
    path = os.path.join(folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
