"""Reads the folder of a head of EAGLE or EAGLE-3, as these are published.

It has config.json and safetensors files, or pytorch_model.bin; tokenizer and often the embedding
are the target's. Names of tensors differ between publishers: "model." may precede them, and the
layer is "layers.0" or "midlayer". The prepared head has them as a model of one layer would.
"""

from pathlib import Path
from typing import Final

import msgspec

from deploy.models import torch_file
from deploy.models.hf_folder import read_object, require_regular_files, safetensors_entries
from deploy.models.prepared_folder import ModelContents, ProgressCallback
from proto.errors import ModelError
from proto.messages.prepared_model import TensorEntry, TensorIndex

_PICKLED: Final = "pytorch_model.bin"


def read(path: str, report: ProgressCallback) -> ModelContents:
    """Read a head's folder; raises ModelError naming the missing or invalid file."""
    folder = Path(path)
    report("reading headers")
    require_regular_files(folder)
    config = read_object(folder / "config.json", required=True)
    config["architectures"] = ["LlamaForCausalLM"]
    pickled = folder / _PICKLED
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        files, entries = [pickled], torch_file.read(str(pickled), 0)
    else:
        entries, files = safetensors_entries(folder)
    entries = [_renamed(entry) for entry in entries]
    if not any(entry.name == "fc.weight" for entry in entries):
        raise ModelError(f"{folder} is no head of EAGLE: it has no tensor fc.weight")
    return ModelContents(
        config=config,
        tokenizer_json=b"{}",
        tokenizer_config={},
        tensors=TensorIndex("safetensors", tuple(map(str, files)), tuple(entries)),
    )


def _renamed(entry: TensorEntry) -> TensorEntry:
    name = entry.name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    in_model = name.startswith(("layers.", "norm.", "embed_tokens."))
    return msgspec.structs.replace(entry, name=f"model.{name}" if in_model else name)
