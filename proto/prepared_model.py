"""A prepared model: converted once, so that later starts need not parse or convert it.

`deploy` writes one folder per model. The worker reads the tensors; the API server reads tokenizer
and chat template. The folder contains

    manifest.json        this Struct as JSON, written last: its presence means complete
    config.json          Hugging Face style model configuration
    tokenizer.json       for the `tokenizers` library
    tokenizer_config.json
    chat_template.jinja  absent for a model without one
    tensors.msgpack      TensorIndex
"""

from typing import Final

import msgspec

from proto.errors import ModelError, shown

MANIFEST_VERSION = 1

FAMILIES: Final = {
    "Gemma3ForCausalLM": "gemma3",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""The supported architectures of config.json, with the module of `worker.models` for each, which
has the name of the architecture in GGUF files."""


def family_of(architecture: str) -> str:
    """Return the family of an architecture; raises ModelError for one that is not supported."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise ModelError(
            f"{shown(architecture)} is not supported; supported: {', '.join(FAMILIES)}"
        )
    return family


class TensorEntry(msgspec.Struct, array_like=True, frozen=True):
    """Location of one tensor.

    name: as in the file (GGUF or safetensors name).
    type: GGUF type name ("Q4_1", "F32") or safetensors dtype ("BF16").
    shape: as in torch, rows first; in elements.
    file: index into TensorIndex.files.
    offset, num_bytes: byte range in that file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: int
    offset: int
    num_bytes: int


class TensorIndex(msgspec.Struct, frozen=True):
    """All tensors of a model. `format` is "gguf" or "safetensors"; `files` are absolute paths."""

    format: str
    files: tuple[str, ...]
    tensors: tuple[TensorEntry, ...]


class PreparedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest: facts that processes need before they load the model.

    folder: absolute path of the prepared folder.
    name: as given by the user, or the last component of the path.
    source: absolute path of the GGUF file or Hugging Face folder.
    architecture: the family, e.g. "LlamaForCausalLM".
    vocab_size: rows of the output head; token ids are below it.
    max_position: maximum number of positions of the model.
    eos_token_ids: tokens at which generation ends by default.
    weights_sha256: hex digest over the weight bytes, part of the KV fingerprint.
    """

    version: int = MANIFEST_VERSION
    folder: str
    name: str
    source: str
    architecture: str
    vocab_size: int
    max_position: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    weights_sha256: str
    has_chat_template: bool = False
