"""Reads a Hugging Face folder: config.json, safetensors files, tokenizer.

Only data is read, never code of the folder: neither modules named by `auto_map` nor pickled files.
The weights are not copied; the tensor index refers to their files. Of a folder that has a language
model beside a vision or an audio part, the language model is read (wrapped_model.py), and the
vision part if it is supported (vision_files.py).
"""

import contextlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from deploy.models import (
    quantised_folder,
    safetensors_header,
    tiktoken_file,
    torch_file,
    wrapped_model,
)
from deploy.models.pooler_files import family_architecture, read_pooler
from deploy.models.prepared_folder import (
    ModelContents,
    ProgressCallback,
    architecture_of,
    as_model_error,
    is_token_id,
    read_json,
)
from deploy.models.vision_files import (
    IMAGES_FILE,
    PROCESSOR_FILE,
    VisionContents,
    lacks_token,
    read_vision,
)
from proto.errors import ModelError, shown
from proto.messages.prepared_model import (
    CHAT_TEMPLATES,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_FILES,
    TensorEntry,
    TensorIndex,
    TensorPart,
    open_model_file,
    read_model_file,
    require_regular,
)
from proto.runtime.host_resources import process_limits
from proto.settings.generation_config import FILE_NAME, model_settings
from proto.settings.turn_ends import END_TOKENS
from worker.models.families import FAMILIES

_PICKLED: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_PICKLED_HEAD: Final = "pytorch_model.bin"
_TOKENIZER_FILES: Final = (
    *("tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken", "tekken.json"),
)
"""Files of tokenizers in other formats than tokenizer.json, which `transformers` converts."""
_CONVERTED_FILES: Final = (*_TOKENIZER_FILES, tiktoken_file.FILE_NAME)
_PUBLISHED_WITH_CODE: Final = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM")
"""Architectures whose folders still name their own code, from before transformers had them."""
CONVERSION_SECONDS: Final = 300.0
CONVERSION_MEMORY: Final = 8 << 30
"""Of a tokenizer's conversion: bytes in addition to what the process has, torch not included."""
_SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


def read(path: str, report: ProgressCallback) -> ModelContents:
    """Read a model folder; raises ModelError naming the missing or invalid file."""
    folder = Path(path)
    report("reading headers")
    require_regular_files(folder)
    config = whole = read_object(folder / "config.json", required=True)
    wrapped = wrapped_model.find(config)
    if wrapped is not None:
        config = wrapped.config
    # First: what else is missing does not matter for another architecture.
    pooling = read_pooler(folder, config)
    _resolve_architecture(config)
    generation = read_object(folder / FILE_NAME)
    of_modelopt = read_object(folder / quantised_folder.MODELOPT_FILE)
    # refuses before a file of weights is opened
    scheme = quantised_folder.read_scheme(config, of_modelopt)
    entries, files = safetensors_entries(folder)
    vision, unloaded = None, () if wrapped is None else wrapped.other_parts
    if wrapped is not None:
        report(f"finding the language model of {wrapped.architecture}")
        vision = _read_vision(folder, wrapped, entries)
        entries = wrapped_model.language_tensors(entries, wrapped.architecture)
        if any(entry.name.startswith("lm_head.") for entry in entries):
            config["tie_word_embeddings"] = False
        if vision is not None:
            entries += vision.tensors
            config |= vision.settings
            unloaded = tuple(part for part in unloaded if part != "vision")
        elif problem := lacks_token(wrapped.architecture, wrapped.outer, wrapped.config):
            named = {"vision": f"vision ({problem})"}
            unloaded = tuple(named.get(part, part) for part in unloaded)
        entries, files = _used_files(entries, files)
    tensors = pooling.joined_to(_joined(scheme, entries, files))
    report("reading the tokenizer")
    tokenizer_json, tokenizer_config = _tokenizer(folder, report)
    return ModelContents(
        config={key: config[key] for key in config if key not in quantised_folder.CONFIG_KEYS},
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_templates=_chat_templates(folder, tokenizer_config),
        tensors=tensors,
        ends=_end_tokens(generation, whole),
        bos_token_id=_first_token(generation, config),
        pooler=pooling.pooler,
        max_tokens=pooling.max_tokens,
        unloaded_parts=unloaded,
        generation_settings=model_settings(generation),
        vision=None if vision is None else vision.facts,
        files={} if vision is None else vision.files,
    )


def _read_vision(
    folder: Path, wrapped: wrapped_model.WrappedModel, entries: Sequence[TensorEntry]
) -> VisionContents | None:
    """Return the vision part of a folder; None if it is not read."""
    settings = (read_object(folder / name) for name in (IMAGES_FILE, PROCESSOR_FILE))
    return read_vision(wrapped.architecture, wrapped.outer, wrapped.config, entries, *settings)


def check_config(config: dict[str, Any]) -> None:
    """Raise ModelError for a model that cannot be served, as far as its config.json says."""
    wrapped = wrapped_model.find(config)
    config = config if wrapped is None else wrapped.config
    _resolve_architecture(config)
    quantised_folder.read_scheme(config, {})


def _resolve_architecture(config: dict[str, Any]) -> None:
    """Set the architecture to that of the family; raises ModelError if there is no code for it."""
    if (family := family_architecture(config)) in FAMILIES:
        config["architectures"] = [family]
    architecture = architecture_of(config)
    if config.get("auto_map") and architecture not in _PUBLISHED_WITH_CODE:
        raise ModelError(
            "config.json: auto_map names code of the model; code of a model is never run"
        )


def require_regular_files(folder: Path) -> None:
    """Raise ModelError for a file in a folder that is a FIFO, a device or the like.

    Libraries that convert a tokenizer open some of them, too.
    """
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # a link to nothing
            mode = entry.stat().st_mode
            if not stat.S_ISDIR(mode):
                require_regular(entry.path, mode)


def read_object(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing and not required."""
    value = read_json(path)
    if value is None and not path.exists():
        if required:
            raise ModelError(
                f"{path.parent} has no {path.name} (a Hugging Face model) and no .gguf file"
            )
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object")
    return value


def safetensors_entries(folder: Path) -> tuple[list[TensorEntry], list[Path]]:
    """Return all tensors as they are in the files, and the files."""
    files = _weight_files(folder)
    entries: list[TensorEntry] = []
    owners: dict[str, str] = {}
    for number, path in enumerate(files):
        for entry in safetensors_header.read(str(path), number):
            if entry.name in owners:
                raise ModelError(f"{entry.name} is in {owners[entry.name]} and in {path.name}")
            owners[entry.name] = path.name
            entries.append(entry)
    return entries, files


def _used_files(
    entries: Sequence[TensorEntry], files: Sequence[Path]
) -> tuple[list[TensorEntry], list[Path]]:
    """Return the tensors with only the files that have one of them, so that no other is mapped."""
    numbers = sorted({entry.file for entry in entries})
    entries = [msgspec.structs.replace(entry, file=numbers.index(entry.file)) for entry in entries]
    return entries, [files[number] for number in numbers]


def _joined(
    scheme: quantised_folder.Scheme | None, entries: Sequence[TensorEntry], files: Sequence[Path]
) -> TensorIndex:
    """Return the index of tensors, in which a quantised weight is one."""

    def read_bytes(part: TensorPart) -> bytes:
        with open_model_file(files[part.file]) as stream:
            stream.seek(part.offset)
            return stream.read(part.num_bytes)

    joined = quantised_folder.join_parts(scheme, entries, read_bytes)
    return TensorIndex("safetensors", tuple(str(path) for path in files), joined)


def _weight_files(folder: Path) -> list[Path]:
    index = read_object(folder / "model.safetensors.index.json")
    if index:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict):
            raise ModelError(f"{folder}/model.safetensors.index.json has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            if os.path.basename(name) != name or not os.path.isfile(folder / name):
                raise ModelError(f"{folder} has no {name}, which its weight index names")
        return [folder / name for name in names]
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise ModelError(f"{folder} has several .safetensors files and no index of them")
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelError(
            f"{folder} has no .safetensors weights, and {pickled[0]} is pickled: reading it would "
            "run code in it; convert it to safetensors"
        )
    raise ModelError(f"{folder} has no .safetensors weights")


def _tokenizer(folder: Path, report: ProgressCallback) -> tuple[bytes, dict[str, Any]]:
    """Return tokenizer.json, and the tokenizer configuration with special tokens as strings."""
    config = {**read_object(folder / "special_tokens_map.json")}
    config.update(read_object(folder / "tokenizer_config.json"))
    for key in _SPECIAL_TOKENS:
        if isinstance(config.get(key), dict):
            config[key] = config[key].get("content")
    path = folder / "tokenizer.json"
    if path.is_file():
        read_object(path)
        return read_model_file(path), config
    if (folder / tiktoken_file.FILE_NAME).is_file():
        return tiktoken_file.convert(folder, config), config
    report("converting the tokenizer")
    return _converted_tokenizer(folder), config


def _converted_tokenizer(folder: Path) -> bytes:
    """Return tokenizer.json, converted from an older format such as a SentencePiece model.

    The process ends by SIGPROF after CONVERSION_SECONDS of processor time.
    """
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(
            f"{folder} has no tokenizer: copy the model's tokenizer.json into it "
            f"(or one of {', '.join(_CONVERTED_FILES)}, which are converted)"
        )
    from transformers import AutoTokenizer

    with (
        as_model_error(f"{folder} has no tokenizer.json, and its tokenizer cannot be converted"),
        process_limits(CONVERSION_SECONDS, CONVERSION_MEMORY),
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {folder} cannot be converted to tokenizer.json")
    text: str = tokenizer.backend_tokenizer.to_str(pretty=True)
    return text.encode()


def _chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates by name, of files of their own, or else of a JSON file.

    As in transformers, a `chat_template.jinja` replaces all templates in JSON.
    """
    own = folder / CHAT_TEMPLATES["default"]
    paths = {path.name.removesuffix(".jinja"): path for path in folder.glob(TEMPLATE_FILES)}
    if own.is_file():
        templates, paths["default"] = {}, own
    else:
        templates = _templates_in_json(folder, tokenizer_config)
    for name, path in paths.items():
        try:
            templates[name] = read_model_file(path, MAX_TEMPLATE_BYTES).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: {error}") from None
    return templates


def _templates_in_json(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the templates of the processor or the tokenizer: a text, or several by name."""
    files = (
        read_object(folder / "chat_template.json"),
        read_object(folder / "processor_config.json"),
    )
    given = (settings.get("chat_template") for settings in (*files, tokenizer_config))
    template = next((each for each in given if each is not None), None)
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {entry.get("name"): entry.get("template") for entry in named}
    if not isinstance(template, dict):
        template = {"default": template}
    return {name: text for name, text in template.items() if isinstance(text, str)}


def _end_tokens(generation: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the ids of tokens that end an answer, each with the name of its file.

    config: as the file has it, where the language model may be a part with settings of its own.
    """
    parts = (config.get(key) for key in wrapped_model.TEXT_KEYS)
    places = [(generation, "generation_config.json")]
    places += [(each, "config.json") for each in (config, *parts) if isinstance(each, Mapping)]
    found: list[tuple[int, str]] = []
    for settings, file in places:
        for key in (f"{name}_id" for name in END_TOKENS):
            value = settings.get(key)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(map(is_token_id, ids)):
                raise ModelError(
                    f"{file}: {key} {shown(value)} is neither a token id nor a list of them"
                )
            found += ((token_id, file) for token_id in ids)
    return found


def _first_token(generation: Mapping[str, Any], config: Mapping[str, Any]) -> int | None:
    for settings in (generation, config):
        value = settings.get("bos_token_id")
        if value is not None:
            if not is_token_id(value):
                raise ModelError(f"bos_token_id {shown(value)} is not a token id")
            return int(value)
    return None


def read_head(path: str, report: ProgressCallback) -> ModelContents:
    """Read the folder of a head of EAGLE or EAGLE-3, as these are published; raises ModelError.

    It has config.json and safetensors files, or pytorch_model.bin; tokenizer and often the
    embedding are the target's. Names of tensors differ between publishers: "model." may precede
    them, and the layer is "layers.0" or "midlayer". The prepared head has them as a model of one
    layer would.
    """
    folder = Path(path)
    report("reading headers")
    require_regular_files(folder)
    config = read_object(folder / "config.json", required=True)
    config["architectures"] = ["LlamaForCausalLM"]
    pickled = folder / _PICKLED_HEAD
    if pickled.is_file() and not any(folder.glob("*.safetensors")):
        files, entries = [pickled], torch_file.read(str(pickled), 0)
    else:
        entries, files = safetensors_entries(folder)
    entries = [_named_as_in_models(entry) for entry in entries]
    if not any(entry.name == "fc.weight" for entry in entries):
        raise ModelError(f"{folder} is no head of EAGLE: it has no tensor fc.weight")
    return ModelContents(
        config=config,
        tokenizer_json=b"{}",
        tokenizer_config={},
        tensors=TensorIndex("safetensors", tuple(map(str, files)), tuple(entries)),
    )


def _named_as_in_models(entry: TensorEntry) -> TensorEntry:
    name = entry.name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
    in_model = name.startswith(("layers.", "norm.", "embed_tokens."))
    return msgspec.structs.replace(entry, name=f"model.{name}" if in_model else name)
