"""Preparing models: content of the folder, when it is redone, and refused models."""

import base64
import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from deploy.environment import HostEnvironment
from deploy.models import gguf_file, hf_folder, store
from deploy.models import prepare as preparing_process
from proto.errors import ModelError
from proto.messages.prepared_model import CHAT_TEMPLATES, PreparedModel, TensorIndex
from tests.fakes.edits import edit_middle
from tests.fakes.notices import Recorder
from tests.fakes.tiny_model_files import END, TEMPLATE, TOKENS, write_folder, write_gguf
from worker.models.families import FAMILIES


def silent(what: str) -> None:
    """A reporter that ignores its calls."""


def prepare_silently(source: store.ModelSource, target: str, final: str, *_: object) -> None:
    preparing_process.prepare(
        source.name, source.path, source.kind, source.mmproj, target, final, silent
    )


@pytest.fixture
def around(tmp_path: Path) -> HostEnvironment:
    return HostEnvironment.of({**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})


def prepare(path: Path, around: HostEnvironment) -> PreparedModel:
    return store.prepared_model(str(path), around, Recorder())


def index_of(model: PreparedModel) -> TensorIndex:
    return msgspec.msgpack.decode(
        Path(model.folder, "tensors.msgpack").read_bytes(), type=TensorIndex
    )


def stored(index: TensorIndex, name: str, dtype: Any) -> np.ndarray:
    (entry,) = (each for each in index.tensors if each.name == name)
    with open(index.files[entry.file], "rb") as stream:
        stream.seek(entry.offset)
        return np.frombuffer(stream.read(entry.num_bytes), dtype).reshape(entry.shape)


def test_a_gguf_file(
    tmp_path: Path, around: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared in this process, which shares the import of transformers with other tests."""
    monkeypatch.setattr(store, "_run_preparation", prepare_silently)
    path = tmp_path / "tiny.gguf"
    weights = write_gguf(
        path, extra={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    )
    model = prepare(path, around)
    assert model.name == "tiny"
    assert model.source == str(path)
    assert model.architecture == "LlamaForCausalLM"
    assert (model.vocab_size, model.max_position) == (len(TOKENS), 64)
    assert model.eos_token_ids == (END,)
    assert model.has_chat_template
    folder = Path(model.folder)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    config = json.loads((folder / "config.json").read_text())
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 8
    assert config["tie_word_embeddings"] is True
    assert config["rope_parameters"] == {
        "rope_theta": 10000.0,
        "rope_type": "linear",
        "factor": 2.0,
    }
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("b a<|end|>").ids == [TOKENS.index("b"), TOKENS.index("Ġa"), END]
    index = index_of(model)
    assert {entry.name for entry in index.tensors} == set(weights)
    for name, weight in weights.items():
        np.testing.assert_array_equal(stored(index, name, np.float32), weight)


@pytest.mark.parametrize(("layers", "query_scalar"), [(18, 16), (62, 8)])
def test_a_gguf_file_of_gemma3(tmp_path: Path, layers: int, query_scalar: int) -> None:
    """Missing values have defaults; RoPE scaling applies to full attention only."""
    write_gguf(
        tmp_path / "tiny.gguf",
        architecture="gemma3",
        layers=layers,
        head_dim=16,
        extra={
            "gemma3.attention.key_length": 16,
            "gemma3.attention.sliding_window": 16,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    )
    config = gguf_file.read(str(tmp_path / "tiny.gguf"), silent).config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["layer_types"][4:7] == [
        "sliding_attention",
        "full_attention",
        "sliding_attention",
    ]
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (16, query_scalar)
    assert config["rope_parameters"] == {
        "full_attention": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }


@pytest.mark.parametrize("shards", [1, 2])
def test_a_hugging_face_folder(tmp_path: Path, around: HostEnvironment, shards: int) -> None:
    write_folder(tmp_path / "mine", shards=shards)
    model = prepare(tmp_path / "mine", around)
    assert model.name == "mine"
    assert (model.vocab_size, model.max_position) == (len(TOKENS), 64)
    assert (model.bos_token_id, model.eos_token_ids) == (0, (END,))
    folder = Path(model.folder)
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((folder / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
    assert (folder / "tokenizer.json").read_bytes() == (
        tmp_path / "mine/tokenizer.json"
    ).read_bytes()
    index = index_of(model)
    assert index.format == "safetensors"
    assert len(index.files) == shards
    np.testing.assert_array_equal(stored(index, "model.norm.weight", np.float16), np.ones(32))


def test_the_sample_does_not_depend_on_shards(tmp_path: Path, around: HostEnvironment) -> None:
    write_folder(tmp_path / "one", shards=1)
    write_folder(tmp_path / "two", shards=2)
    one, two = (prepare(tmp_path / name, around) for name in ("one", "two"))
    assert one.weights_sample == two.weights_sample


def test_the_sampling_settings_of_a_model_are_kept(tmp_path: Path, around: HostEnvironment) -> None:
    write_folder(tmp_path / "mine")
    given = {"temperature": 0.6, "top_k": None, "top_p": "x", "do_sample": True, "bos_token_id": 0}
    (tmp_path / "mine/generation_config.json").write_text(json.dumps(given))
    settings = prepare(tmp_path / "mine", around).generation_settings
    assert settings == (("temperature", 0.6), ("top_k", None), ("top_p", "x"))
    prefix = "general.sampling."
    write_gguf(
        tmp_path / "mine.gguf",
        extra={prefix + "temp": 0.6, prefix + "top_k": 20, prefix + "sequence": "kp"},
    )
    settings = prepare(tmp_path / "mine.gguf", around).generation_settings
    assert settings == ((prefix + "temp", 0.6), (prefix + "top_k", 20), (prefix + "sequence", "kp"))


def test_a_template_file_takes_precedence_over_the_tokenizer_config(
    tmp_path: Path, around: HostEnvironment
) -> None:
    write_folder(tmp_path / "mine")
    (tmp_path / "mine/chat_template.jinja").write_text("{{ messages }}")
    model = prepare(tmp_path / "mine", around)
    assert Path(model.folder, "chat_template.jinja").read_text() == "{{ messages }}"


NAMED = [{"name": name, "template": f"{name} in JSON"} for name in ("default", "tool_use")]
IN_JSON = {"default": "default in JSON", "tool_use": "tool_use in JSON"}


@pytest.mark.parametrize(
    ("given", "files", "expected"),
    [
        (NAMED, (), IN_JSON),
        ({"default": "a", "tool_use": "b", "rag": "c"}, (), {"default": "a", "tool_use": "b"}),
        ("one", (), {"default": "one"}),
        ([*NAMED[1:], {"name": 1}, "x"], (), {"tool_use": "tool_use in JSON"}),
        (NAMED, ("chat_template",), {"default": "of chat_template"}),
        (
            NAMED,
            ("additional_chat_templates/tool_use",),
            IN_JSON | {"tool_use": "of additional_chat_templates/tool_use"},
        ),
    ],
)
def test_the_default_template_and_the_one_for_tools_are_kept(
    tmp_path: Path,
    around: HostEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    given: Any,
    files: tuple[str, ...],
    expected: dict[str, str],
) -> None:
    monkeypatch.setattr(store, "_run_preparation", prepare_silently)
    folder = tmp_path / "mine"
    write_folder(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    (folder / "additional_chat_templates").mkdir()
    for file in files:
        (folder / f"{file}.jinja").write_text(f"of {file}")
    model = prepare(folder, around)
    paths = {name: Path(model.folder, path) for name, path in CHAT_TEMPLATES.items()}
    found = {name: path.read_text() for name, path in paths.items() if path.is_file()}
    assert found == expected
    (folder / "additional_chat_templates/more.jinja").write_text("")
    assert prepare(folder, around).folder != model.folder, "a new file is a change"


def test_a_second_start_reuses_the_prepared_model(tmp_path: Path, around: HostEnvironment) -> None:
    write_folder(tmp_path / "mine")
    first = prepare(tmp_path / "mine", around)
    made = Path(first.folder, "manifest.json").stat().st_mtime_ns
    again = Recorder()
    assert store.prepared_model(str(tmp_path / "mine"), around, again) == first
    assert again.calls == []
    assert Path(first.folder, "manifest.json").stat().st_mtime_ns == made


def test_a_changed_source_is_prepared_again(tmp_path: Path, around: HostEnvironment) -> None:
    write_folder(tmp_path / "mine")
    first = prepare(tmp_path / "mine", around)
    write_folder(tmp_path / "mine", config={"max_position_embeddings": 32})
    second = prepare(tmp_path / "mine", around)
    assert second.folder != first.folder
    assert second.max_position == 32


def test_a_file_edited_with_restored_times_is_prepared_again(
    tmp_path: Path, around: HostEnvironment
) -> None:
    write_folder(tmp_path / "mine")
    first = prepare(tmp_path / "mine", around)
    edit_middle(tmp_path / "mine/model.safetensors")
    assert prepare(tmp_path / "mine", around).folder != first.folder


def test_remains_of_a_killed_preparation_are_removed(
    tmp_path: Path, around: HostEnvironment
) -> None:
    write_folder(tmp_path / "mine")
    folder = Path(prepare(tmp_path / "mine", around).folder)
    (folder / "manifest.json").unlink()
    left_over = folder.parent / f".{folder.name}.killed"
    left_over.mkdir()
    assert Path(prepare(tmp_path / "mine", around).folder) == folder
    assert (folder / "manifest.json").exists()
    assert not left_over.exists()


def test_concurrent_starts_prepare_once(tmp_path: Path, around: HostEnvironment) -> None:
    write_folder(tmp_path / "mine")
    recorders = [Recorder() for _ in range(4)]
    with ThreadPoolExecutor(len(recorders)) as pool:
        models = list(
            pool.map(
                lambda each: store.prepared_model(str(tmp_path / "mine"), around, each), recorders
            )
        )
    assert len({model.folder for model in models}) == 1
    prepared = [any(call.startswith("preparing") for call in each.calls) for each in recorders]
    assert sum(prepared) == 1


def test_a_start_from_a_prepared_model_has_no_heavy_imports(
    tmp_path: Path, around: HostEnvironment
) -> None:
    write_folder(tmp_path / "mine")
    prepare(tmp_path / "mine", around)
    script = (
        "import os, sys; from deploy import serve; from deploy.models import store; "
        "from deploy.environment import HostEnvironment; "
        f"store.prepared_model({str(tmp_path / 'mine')!r}, HostEnvironment.of(os.environ), None); "
        "print(sorted({'torch', 'transformers', 'gguf', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=dict(around.variables),
    )
    assert done.stdout.strip() == "[]"


def refusal(path: Path, around: HostEnvironment) -> str:
    with pytest.raises(ModelError) as caught:
        prepare(path, around)
    assert "\n" not in str(caught.value)
    root = Path(around.cache, "prepared")
    assert [each.name for each in root.iterdir() if each.suffix != ".lock"] == []
    return str(caught.value)


def test_errors_of_the_preparing_process_are_raised_in_the_parent(
    tmp_path: Path, around: HostEnvironment
) -> None:
    (tmp_path / "text.gguf").write_text("Once upon a time")
    assert "text.gguf is not a GGUF file" in refusal(tmp_path / "text.gguf", around)
    (tmp_path / "empty").mkdir()
    assert "empty has no config.json (a Hugging Face model) and no .gguf file" in refusal(
        tmp_path / "empty", around
    )


def gguf_refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        gguf_file.read(str(path), silent)
    return str(caught.value)


@pytest.mark.parametrize("length", [4, 20, 500, 4000, -10])
def test_a_truncated_gguf_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:length])
    assert "truncated" in gguf_refusal(path)


@pytest.mark.parametrize("count", [0, 1])
def test_a_gguf_file_with_a_split_count_of_one_is_accepted(tmp_path: Path, count: int) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra={"split.count": count})
    assert gguf_file.read(str(tmp_path / "tiny.gguf"), silent).tensors.tensors


def test_a_gguf_file_without_a_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tokenizer=False)
    assert "tiny.gguf has no tokenizer" in gguf_refusal(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.attention.sliding_window", 16, "sets llama.attention.sliding_window, which is not"),
        ("llama.logit_scale", 2.0, "sets llama.logit_scale, which is not supported"),
        ("split.count", 2, "sets split.count to 2: a part of a model must have its name"),
    ],
)
def test_an_unsupported_gguf_setting_is_refused(
    tmp_path: Path, key: str, value: Any, expected: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", extra={key: value})
    assert expected in gguf_refusal(tmp_path / "tiny.gguf")


def folder_refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        hf_folder.read(str(folder), silent)
    return str(caught.value)


def test_a_truncated_safetensors_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert "ends beyond the file" in folder_refusal(tmp_path)
    weights.write_bytes(weights.read_bytes()[:20])
    assert "truncated" in folder_refusal(tmp_path)


def test_an_inconsistent_safetensors_header_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "w is not as long as its shape" in folder_refusal(tmp_path)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("config.json", "has no config.json"),
        ("model.safetensors", "has no .safetensors weights"),
    ],
)
def test_a_folder_without_a_required_file_is_refused(
    tmp_path: Path, missing: str, expected: str
) -> None:
    write_folder(tmp_path)
    (tmp_path / missing).unlink()
    assert expected in folder_refusal(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    expected = f"{tmp_path} has no tokenizer: copy the model's tokenizer.json into it"
    assert folder_refusal(tmp_path).startswith(expected)
    (tmp_path / "vocab.json").write_text("{}")
    assert "its tokenizer cannot be converted: " in folder_refusal(tmp_path)


def write_tekken(folder: Path, *pieces: bytes) -> tuple[list[bytes], tuple[str, ...]]:
    """Write a model with tekken.json in place of tokenizer.json.

    Returns its tokens, those of bytes first, and the names of its special tokens.
    """
    tokens = [*(bytes([byte]) for byte in range(256)), *pieces]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(tokens)
    ]
    names = ("<unk>", "<s>", "</s>", "[INST]")
    special = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    sizes = {"num_vocab_tokens": len(tokens), "default_vocab_size": len(tokens) + 10}
    settings = {"pattern": r"\s?\p{L}+|\s", "default_num_special_tokens": 10, "version": "v11"}
    write_folder(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / "tekken.json").write_text(
        json.dumps({"config": settings | sizes, "vocab": vocabulary, "special_tokens": special})
    )
    return tokens, names


def test_a_folder_with_the_tokenizer_of_mistral(tmp_path: Path) -> None:
    """tekken.json: special tokens have the first ids, then come the ranks; pieces by its regex."""
    tokens, names = write_tekken(tmp_path, b"th", b"the", b" a", b" the")
    contents = hf_folder.read(str(tmp_path), silent)
    tokenizer = Tokenizer.from_str(contents.tokenizer_json.decode())
    expected = [10 + tokens.index(token) for token in (b"the", b" a", b" the", b" ", b"h")]
    ids = tokenizer.encode("[INST]the a the h", add_special_tokens=False).ids
    assert ids == [names.index("[INST]"), *expected]
    assert tokenizer.decode(ids[1:]) == "the a the h"


def test_a_conversion_that_takes_too_long_is_ended(
    tmp_path: Path, around: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path / "mine", b"ab" * 200_000)
    shortened = (
        "import sys; from deploy.models import hf_folder, prepare; "
        "hf_folder.CONVERSION_SECONDS = 0.5; sys.exit(prepare.main())"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} -P -c "{shortened}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelError, match="converting the tokenizer takes too long"):
        prepare(tmp_path / "mine", around)


@pytest.mark.parametrize("architecture", ["MadeUpForCausalLM", "BertForMaskedLM"])
def test_an_unsupported_architecture_is_reported_first(tmp_path: Path, architecture: str) -> None:
    """The folder has neither weights nor a tokenizer."""
    config = {"architectures": [architecture], **AUTO_MAP}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert folder_refusal(tmp_path) == (
        f"{architecture} is not supported; supported: {', '.join(FAMILIES)}"
    )


def test_an_unsupported_gguf_architecture_is_reported_before_its_keys(tmp_path: Path) -> None:
    extra = {"mamba.attention.sliding_window": 16}
    write_gguf(tmp_path / "tiny.gguf", architecture="mamba", tokenizer=False, extra=extra)
    names = dict.fromkeys(name for family in FAMILIES.values() for name in family.gguf_names)
    assert gguf_refusal(tmp_path / "tiny.gguf") == (
        f"GGUF architecture mamba is not supported; supported: {', '.join(names)}"
    )


def test_missing_weights_are_reported_before_a_missing_tokenizer(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    assert folder_refusal(tmp_path) == f"{tmp_path} has no .safetensors weights"


def located(model: str | Path, around: HostEnvironment) -> store.ModelSource:
    return store.locate(str(model), around, Recorder())


def test_a_folder_with_one_gguf_file_loads_that_file(
    tmp_path: Path, around: HostEnvironment
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text("{}")  # common in folders of GGUF files
    write_gguf(folder / "tiny.gguf")
    source = located(folder, around)
    assert (source.name, source.path) == ("mine", str(folder / "tiny.gguf"))
    assert source.kind == "gguf"
    write_gguf(folder / "small.gguf")
    with pytest.raises(ModelError, match=r"give the path of one: small\.gguf, tiny\.gguf$"):
        located(folder, around)


@pytest.mark.parametrize(
    ("link", "name"), [("given.gguf", "given"), ("given", "given"), ("v1.5", "v1.5")]
)
def test_a_symlinked_model_is_named_by_the_given_path(
    tmp_path: Path, around: HostEnvironment, link: str, name: str
) -> None:
    write_gguf(tmp_path / "0123abcd")
    (tmp_path / link).symlink_to(tmp_path / "0123abcd")
    source = located(tmp_path / link, around)
    assert (source.name, source.path) == (name, str(tmp_path / "0123abcd"))


def write_hub_cache(cache: Path, name: str) -> Path:
    """Create the folders of a downloaded model as huggingface_hub does; return the snapshot."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("a" * 40)
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    return snapshot


def test_a_hub_model_is_loaded_from_the_local_cache(
    tmp_path: Path, around: HostEnvironment
) -> None:
    offline = HostEnvironment.of({**around.variables, "HF_HUB_OFFLINE": "1"})
    expected = "org/tiny is not, or not all, in the Hugging Face cache"
    with pytest.raises(ModelError, match=expected):
        located("org/tiny", offline)
    snapshot = write_hub_cache(Path(around.hugging_face_cache), "org/tiny")
    (snapshot / "config.json").write_text("{}")  # a partial snapshot
    with pytest.raises(ModelError, match=expected):
        located("org/tiny", offline)
    write_folder(snapshot)
    model = store.prepared_model("org/tiny", around, Recorder())
    assert (model.name, model.source) == ("org/tiny", str(snapshot))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/cache", "HF_HOME": "/hf"}, "/hf/hub"),
        ({"HF_HOME": "/hf", "HF_HUB_CACHE": "/models"}, "/models"),
    ],
)
def test_the_cache_folder_equals_that_of_huggingface_hub(
    variables: dict[str, str], expected: str
) -> None:
    assert HostEnvironment.of(variables).hugging_face_cache == expected


def test_a_full_disk_is_reported_with_the_numbers(
    tmp_path: Path, around: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_run_preparation", prepare_silently)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1_000))
    write_folder(tmp_path / "mine")
    numbers = r"[\d.,]+ MB are needed and 0\.0 MB are free"
    with pytest.raises(ModelError, match=rf"disk of {around.cache}/prepared/\S+: {numbers}"):
        prepare(tmp_path / "mine", around)
    with pytest.raises(ModelError, match=rf"disk of {around.cache}/models: {numbers}"):
        prepare(Path("gemma3-270m"), around)


def test_an_index_must_not_point_outside_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "mine", shards=2)
    (tmp_path / "other.safetensors").write_bytes(b"")
    (tmp_path / "mine/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "../other.safetensors"}})
    )
    assert "has no ../other.safetensors" in folder_refusal(tmp_path / "mine")


AUTO_MAP = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}}


@pytest.mark.parametrize("in_config", [True, False])
def test_code_in_a_folder_is_not_run(tmp_path: Path, in_config: bool) -> None:
    traces = tmp_path / "traces"
    write_folder(tmp_path / "mine", config=AUTO_MAP if in_config else {})
    (tmp_path / "mine/evil.py").write_text(f"open({str(traces)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "mine/tokenizer.json").rename(tmp_path / "mine/vocab.json")
    (tmp_path / "mine/tokenizer_config.json").write_text(json.dumps(AUTO_MAP))
    message = folder_refusal(tmp_path / "mine")
    assert not in_config or "auto_map" in message
    assert not traces.exists()


def test_code_beside_a_gguf_file_is_not_run(tmp_path: Path) -> None:
    """transformers also reads the tokenizer settings in the folder of the file."""
    traces = tmp_path / "traces"
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "evil.py").write_text(f"open({str(traces)!r}, 'w')\nclass Evil: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(AUTO_MAP))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", **AUTO_MAP}))
    with contextlib.suppress(ModelError):
        gguf_file.read(str(tmp_path / "tiny.gguf"), silent)
    assert not traces.exists()


class Burst:
    """Creates a file when unpickled."""

    def __init__(self, traces: Path) -> None:
        self._traces = traces

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._traces), "w")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_by_name(
    tmp_path: Path, around: HostEnvironment, name: str
) -> None:
    traces = tmp_path / "traces"
    write_folder(tmp_path / "mine")
    (tmp_path / "mine/model.safetensors").unlink()
    (tmp_path / "mine" / name).write_bytes(pickle.dumps(Burst(traces)))
    message = refusal(tmp_path / "mine", around)
    assert name in message
    assert "safetensors" in message
    assert not traces.exists()
    (tmp_path / "mine/model.safetensors").write_bytes(pickle.dumps(Burst(traces)))
    assert "safetensors" in refusal(tmp_path / "mine", around)
    assert not traces.exists()


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("config.json", {"eos_token_id": "7"}),
        ("config.json", {"eos_token_id": [True]}),
        ("config.json", {"bos_token_id": 1 << 40}),
        ("config.json", {"max_position_embeddings": 1 << 70}),
        ("config.json", {"architectures": [["LlamaForCausalLM"]]}),
        ("tokenizer_config.json", {"chat_template": "\ud800"}),
        (
            "tokenizer_config.json",
            {"chat_template": [1, {"name": "default", "template": "\ud800"}]},
        ),
    ],
)
def test_settings_of_a_wrong_type_are_refused(
    tmp_path: Path, around: HostEnvironment, file: str, wrong: dict[str, Any]
) -> None:
    write_folder(tmp_path / "mine")
    path = tmp_path / "mine" / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | wrong))
    assert refusal(tmp_path / "mine", around)


@pytest.mark.suite("daemons")
def test_the_default_model(around: HostEnvironment) -> None:
    """The model is downloaded into a temporary cache."""
    model = store.prepared_model("smollm2-135m-instruct", around, Recorder())
    assert model.name == "smollm2-135m-instruct"
    assert (model.architecture, model.vocab_size) == ("LlamaForCausalLM", 49152)
    assert (model.max_position, model.eos_token_ids) == (8192, (2,))
    assert "<|im_start|>" in Path(model.folder, "chat_template.jinja").read_text()
    assert len(index_of(model).tensors) == 272
    again = Recorder()
    assert store.prepared_model("smollm2-135m-instruct", around, again) == model
    assert again.calls == []
