"""Names of the Hugging Face hub: which files are needed, and downloads from a hub on this machine.

Downloads run in a process of their own with the real huggingface_hub.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest

from deploy.environment import HostEnvironment
from deploy.models import gguf_header, hub, hub_download, inventory, safetensors_header, store
from deploy.models.hub import HubName, parse_name, select_files
from proto.errors import ModelError
from tests.fakes.hub_server import COMMIT, HubServer, Repository
from tests.fakes.notices import Recorder

pytestmark = pytest.mark.suite("settings")  # each download is a process of a second

# ---- Which files are needed ----

OTHERS = [
    *(
        "README.md",
        ".gitattributes",
        "LICENSE",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
    *("tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "onnx/config.json"),
    *("original/consolidated.00.pth", "consolidated.safetensors", "figures/a.png"),
    *("model.fp16.safetensors", "modeling_mine.py", "openvino/openvino_model.bin"),
]
NEEDED = [
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
]


@pytest.mark.parametrize("weights", ["model.safetensors", hub.INDEX_FILE])
def test_a_folder_is_its_safetensors_tokenizer_and_templates(weights: str) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    names = [*OTHERS, *NEEDED, weights, *(shards if weights == hub.INDEX_FILE else ())]
    assert set(select_files(names, HubName("org/name"))) == {*NEEDED, weights}


def test_modules_of_sentence_transformers_are_needed() -> None:
    modules = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    names = ["config.json", "modules.json", "model.safetensors", *modules]
    others = ["2_Dense/pytorch_model.bin", "onnx/config.json"]
    assert set(select_files([*names, *others], HubName("org/name"))) == set(names)


QUANTISED = [
    *("x-Q4_K_M.gguf", "x-Q4_K_S.gguf", "x-Q8_0.gguf", "x-UD-Q4_K_XL.gguf", "x-IQ4_XS.gguf"),
    *("BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"),
    *("mmproj-F16.gguf", "imatrix.gguf", "config.json", "README.md"),
]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("", ["x-Q4_K_M.gguf"]),
        ("Q4_K_M", ["x-Q4_K_M.gguf"]),
        ("q8_0", ["x-Q8_0.gguf"]),
        ("UD-Q4_K_XL", ["x-UD-Q4_K_XL.gguf"]),
        ("x-IQ4_XS.gguf", ["x-IQ4_XS.gguf"]),
        ("BF16", QUANTISED[5:7]),
        ("BF16/x-BF16-00001-of-00002.gguf", QUANTISED[5:7]),
    ],
)
def test_one_gguf_model_with_all_its_parts_is_needed(file: str, expected: list[str]) -> None:
    name = HubName("org/name", file)
    assert select_files(QUANTISED, name) == [*expected, "mmproj-F16.gguf"]
    assert select_files(QUANTISED, name, with_mmproj=False) == expected


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"], "mmproj-BF16.gguf"),
        (["mmproj-F32.gguf", "mmproj-Q8_0.gguf", "mmproj.json"], "mmproj-Q8_0.gguf"),
        (["mmproj-F16.gguf", "Q8_0/x.mmproj-F32.gguf"], "Q8_0/x.mmproj-F32.gguf"),
        (["BF16/mmproj-F16.gguf"], None),
    ],
)
def test_which_vision_part_is_needed(beside: list[str], expected: str | None) -> None:
    """That of its folder comes before one above; others belong to other models."""
    model = "Q8_0/x-Q8_0.gguf"
    needed = [model] if expected is None else [model, expected]
    assert select_files([model, *beside], HubName("org/name")) == needed


@pytest.mark.parametrize(
    ("names", "file", "expected"),
    [
        (QUANTISED, "Q4_K", "no model that matches :Q4_K: .* one of BF16, IQ4_XS, Q4_K_M, Q4_K_S"),
        (QUANTISED[1:], "", "several GGUF models: org/name:NAME with NAME one of BF16, IQ4_XS"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "several models that match .* a-Q8_0.gguf, b-Q8"),
        ([*QUANTISED, "x-Q2_K-00001-of-00002.gguf"], "Q2_K", "00002-of-00002.gguf is missing"),
        (["config.json", "model.safetensors"], "Q8_0", "has no GGUF files"),
        (["config.json", "pytorch_model.bin"], "", "reading pytorch_model.bin would run code"),
        (["README.md"], "", "has no weights in safetensors or GGUF files$"),
        (
            ["a.safetensors", "b.safetensors"],
            "",
            "several .safetensors files and no ",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(names: list[str], file: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        select_files(names, HubName("org/name", file))


def test_a_head_may_be_pickled() -> None:
    assert set(select_files(["config.json", "pytorch_model.bin"], HubName("o/n"), "head")) == {
        *("config.json", "pytorch_model.bin")
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubName("org/name")),
        ("org/name-1.5_b:Q4_K_M", HubName("org/name-1.5_b", "Q4_K_M")),
        ("org/name:sub/x.gguf", HubName("org/name", "sub/x.gguf")),
        ("https://huggingface.co/org/name", HubName("org/name")),
        ("https://huggingface.co/org/name/tree/main?x=1", HubName("org/name")),
        ("hf.co/org/name:Q8_0", HubName("org/name", "Q8_0")),
        ("https://hf.co/org/name/", HubName("org/name")),
        (
            "https://huggingface.co/org/name/resolve/main/sub/x.gguf?download=true",
            HubName("org/name", "sub/x.gguf"),
        ),
        *((f"https://{text}", None) for text in ("example.org/org/name", "huggingface.co/org")),
        *((text, None) for text in ("name", "a/b/c", "/a/b", "../a", "a/b:", "a/b:../c", "a b/c")),
    ],
)
def test_names(text: str, expected: HubName | None) -> None:
    assert parse_name(text) == expected


# ---- Downloads ----

WEIGHTS = bytes(range(256)) * 40
SHARDS = {
    f"model-0000{number}-of-00002.safetensors": WEIGHTS + bytes([number]) for number in (1, 2)
}
CONFIG = b'{"architectures": ["LlamaForCausalLM"]}'
FOLDER = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}  ",
    hub.INDEX_FILE: json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
    **SHARDS,
    "pytorch_model.bin": b"pickled",
    "onnx/model.onnx": b"onnx",
}


@pytest.fixture
def server() -> Iterator[HubServer]:
    server = HubServer()
    server.repositories["org/name"] = Repository(dict(FOLDER))
    yield server
    server.close()


@pytest.fixture
def variables(server: HubServer, tmp_path: Path) -> dict[str, str]:
    kept = {key: os.environ[key] for key in ("PATH", "HOME", "PYTHONPATH") if key in os.environ}
    return {
        **kept,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": server.url,
    }


def fetch(variables: dict[str, str], name: str = "org/name", **more: object) -> Path:
    """Return the folder of a name, downloaded; `more` are parameters of `hub.snapshot`."""
    more.setdefault("display", Recorder())
    parsed = parse_name(name)
    assert parsed is not None
    return Path(hub.snapshot(parsed, HostEnvironment.of(variables), **more))


def refusal(variables: dict[str, str], name: str = "org/name", **more: object) -> str:
    """Return the error of a download; assert that neither a lock nor a snapshot is left of it."""
    with pytest.raises(ModelError) as caught:
        fetch(variables, name, **more)
    root = Path(variables["HF_HOME"])
    assert not list(root.rglob("tokend*.lock"))
    assert not list(root.rglob("snapshots/*/*.safetensors"))
    return str(caught.value)


def blobs(variables: dict[str, str]) -> Path:
    return Path(variables["HF_HOME"], "hub", "models--org--name", "blobs")


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in hub.files_below(str(folder))}


def test_only_needed_files_are_downloaded_once(
    server: HubServer, variables: dict[str, str]
) -> None:
    display = Recorder()
    folder = fetch(variables, display=display)
    needed = {name: FOLDER[name] for name in FOLDER if not name.startswith(("pyt", "onnx"))}
    assert contents(folder) == needed
    assert (display.fractions[-1], display.lines) == (1.0, [])
    assert display.steps[-1].startswith("downloading org/name: ")
    num_requests = len(server.requests)
    assert fetch(variables) == folder
    source = store.locate("org/name", HostEnvironment.of(variables), display)
    assert (source.name, source.kind, source.path) == ("org/name", "folder", str(folder))
    assert len(server.requests) == num_requests, "what is there needs no hub"
    assert not [each for each in blobs(variables).iterdir() if "incomplete" in each.name]


def test_the_cache_is_that_of_huggingface_hub(server: HubServer, variables: dict[str, str]) -> None:
    """Other programs find what tokend has downloaded, and tokend what they have."""
    script = (
        "import sys; from huggingface_hub import snapshot_download as get; "
        "print(get('org/name', allow_patterns=['*.json', '*.safetensors']))"
    )
    program = [sys.executable, "-c", script]
    environment = {**variables, "HF_HUB_DISABLE_XET": "1"}
    by_library = subprocess.check_output(program, env=environment, text=True).strip()
    num_requests = len(server.requests)
    assert str(fetch(variables)) == by_library
    assert len(server.requests) == num_requests
    shutil.rmtree(variables["HF_HOME"])
    ours = fetch(variables)
    offline = {**environment, "HF_HUB_OFFLINE": "1"}
    assert subprocess.check_output(program, env=offline, text=True).strip() == str(ours)


def gguf_with_a_long_header(path: Path) -> bytes:
    """Write a GGUF file of 4 MiB behind a header that is longer than what is asked for first."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token {number}" for number in range(150_000)])
    writer.add_tensor("w", np.ones((1024, 1024), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_header.read(str(path)).num_bytes > 2 * hub_download._FIRST_HEADER_BYTES
    return path.read_bytes()


@pytest.mark.parametrize("has_ranges", [True, False])
def test_headers_are_read_without_the_weights(
    server: HubServer, variables: dict[str, str], tmp_path: Path, has_ranges: bool
) -> None:
    """The rest of a file is a hole. The cache that others read stays as it is."""
    content = gguf_with_a_long_header(tmp_path / "x.gguf")
    server.repositories["org/name"] = Repository({"x.gguf": content, "config.json": CONFIG})
    server.has_ranges = has_ranges
    folder = tmp_path / "headers"
    environment = HostEnvironment.of(variables | {"HF_TOKEN": "secret"})
    environment = replace(environment, headers_folder=str(folder))
    found = Path(hub.snapshot(HubName("org/name"), environment, Recorder()), "x.gguf")
    assert found.is_relative_to(folder)
    assert found.stat().st_size == len(content)
    assert gguf_header.read(str(found)) == gguf_header.read(str(tmp_path / "x.gguf"))
    length = gguf_header.read(str(found)).num_bytes
    assert not any(found.read_bytes()[2 * length :])
    assert found.stat().st_blocks * 512 < 2 * length + 4096
    if has_ranges:
        assert server.num_sent < 2 * length + 10_000
    assert not Path(variables["HF_HOME"]).exists()
    assert {each.token for each in server.requests if each.on_cdn} == {None}
    assert {each.token for each in server.requests if not each.on_cdn} == {"secret"}


def test_a_header_that_is_not_one(
    server: HubServer, variables: dict[str, str], tmp_path: Path
) -> None:
    server.repositories["org/name"].files["model-00001-of-00002.safetensors"] = b"\xff" * (4 << 20)
    environment = replace(HostEnvironment.of(variables), headers_folder=str(tmp_path / "headers"))
    folder = hub.snapshot(HubName("org/name"), environment, Recorder())
    with pytest.raises(ModelError, match="is not a safetensors file"):
        safetensors_header.read(f"{folder}/model-00001-of-00002.safetensors", 0)
    assert server.num_sent < 2 << 20


def test_a_folder_without_one_shard_is_completed(
    server: HubServer, variables: dict[str, str]
) -> None:
    folder = fetch(variables)
    lost = folder / list(SHARDS)[1]
    lost.resolve().unlink()
    lost.unlink()
    server.requests.clear()
    assert contents(fetch(variables))[lost.name] == SHARDS[lost.name]
    large = [each for each in server.requests if each.method == "GET" and each.on_cdn]
    assert len(large) == 1


def test_a_newer_revision_is_fetched_on_request_only(
    server: HubServer, variables: dict[str, str]
) -> None:
    before = fetch(variables)
    repository = server.repositories["org/name"]
    repository.files["config.json"] = CONFIG + b" "
    repository.revisions = {"main": "b" * 40, "old": COMMIT}
    assert fetch(variables) == before
    after = fetch(variables, refresh=True)
    assert (after.name, contents(after)["config.json"]) == ("b" * 40, CONFIG + b" ")
    assert fetch(variables, revision="old") == before or fetch(variables, revision=COMMIT) == before


def test_one_gguf_of_a_repository(server: HubServer, variables: dict[str, str]) -> None:
    parts = {f"Q8_0/x-Q8_0-0000{it}-of-00002.gguf": WEIGHTS + bytes([it]) for it in (1, 2)}
    files = {"x-Q4_K_M.gguf": WEIGHTS, **parts, "README.md": b"text"}
    server.repositories["org/name"] = Repository(files)
    folder = fetch(variables, "org/name:Q8_0")
    assert contents(folder) == parts
    num_requests = len(server.requests)
    assert fetch(variables, "org/name:Q8_0") == folder
    source = store.locate("org/name:Q8_0", HostEnvironment.of(variables), Recorder())
    assert (source.name, source.kind) == ("org/name:Q8_0", "gguf")
    assert source.path == str(folder / next(iter(parts)))
    assert len(source.stamp) == len(parts)
    assert len(server.requests) == num_requests
    assert "x-Q4_K_M.gguf" in contents(fetch(variables, "org/name:Q4_K_M"))
    assert "one of Q4_K_M, Q8_0" in refusal(variables, "org/name:Q2_K")


MMPROJ = b"mmproj" * 99


def test_a_vision_part_comes_with_a_gguf(server: HubServer, variables: dict[str, str]) -> None:
    """Also beside a model that was downloaded before there was one, but not if there is no hub."""
    model, others = "Q8_0/x-Q8_0.gguf", {"mmproj-F32.gguf": b"f32", "x-Q4_K_M.gguf": b"q4"}
    files = {model: WEIGHTS, "mmproj-F16.gguf": MMPROJ, **others}
    server.repositories["org/name"] = Repository(files)
    environment = HostEnvironment.of(variables)
    folder = fetch(variables, "org/name:Q8_0", with_mmproj=False)
    assert contents(folder) == {model: WEIGHTS}
    without = store.locate("org/name:Q8_0", environment, Recorder(), mmproj="")
    assert (without.mmproj, len(without.stamp)) == ("", 1)
    offline = {**variables, "HF_ENDPOINT": "http://127.0.0.1:1"}
    assert fetch(offline, "org/name:Q8_0") == folder
    assert fetch(variables, "org/name:Q8_0") == folder
    assert contents(folder) == {model: WEIGHTS, "mmproj-F16.gguf": MMPROJ}
    num_requests = len(server.requests)
    source = store.locate("org/name:Q8_0", environment, Recorder())
    assert Path(source.mmproj).read_bytes() == MMPROJ
    assert (len(source.stamp), len(server.requests)) == (2, num_requests)
    assert source.key != without.key
    assert inventory.remove("org/name:Q8_0", environment) == len(WEIGHTS) + len(MMPROJ)
    assert hub.files_below(str(folder)) == set()


@pytest.fixture
def large(server: HubServer) -> bytes:
    """Weights of more than two chunks of the library, in one file."""
    weights = os.urandom(24 << 20)
    server.repositories["org/name"] = Repository(
        {"config.json": CONFIG, "model.safetensors": weights}
    )
    return weights


def test_a_broken_connection_is_continued(
    server: HubServer, variables: dict[str, str], large: bytes
) -> None:
    server.break_connections(large, times=2, after=11 << 20)
    assert contents(fetch(variables))["model.safetensors"] == large
    ranges = [each.range for each in server.requests if each.on_cdn and each.method == "GET"]
    assert ranges == [f"bytes={at << 20}-{len(large) - 1}" for at in (0, 11, 22)]


def test_a_killed_download_is_continued_by_the_next(
    server: HubServer, variables: dict[str, str], large: bytes
) -> None:
    server.break_connections(large, times=1, after=11 << 20)
    arguments = ["org/name", "", "model", "", str(blobs(variables).parents[1]), "all", "mmproj"]
    program = [sys.executable, "-P", "-m", "deploy.models.hub_download", *arguments]

    def partials() -> list[Path]:
        return list(blobs(variables).glob("*.incomplete"))

    with subprocess.Popen(program, env=variables, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 30
        while not [each for each in partials() if each.stat().st_size >= 10 << 20]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
    (arrived,) = [each.stat().st_size for each in partials()]
    assert arrived < len(large)
    server.requests.clear()
    assert contents(fetch(variables))["model.safetensors"] == large
    (after,) = [each.range for each in server.requests if each.on_cdn and each.method == "GET"]
    assert after == f"bytes={arrived}-{len(large) - 1}"


def test_a_download_ends_with_its_parent(
    server: HubServer, variables: dict[str, str], large: bytes
) -> None:
    """It would go on without the lock, and write where the next download does."""
    server.may_send.clear()
    script = (
        "import os, io; from deploy.models import hub; from deploy.display import Display; "
        "from deploy.environment import HostEnvironment as E; "
        "hub.snapshot(hub.HubName('org/name'), E.of(os.environ), Display(io.StringIO()))"
    )
    with subprocess.Popen([sys.executable, "-c", script], env=variables) as parent:
        assert server.is_sending.wait(30)
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
    child.wait(10)
    server.may_send.set()
    assert contents(fetch(variables))["model.safetensors"] == large


def test_a_file_without_a_hash_is_refused(server: HubServer, variables: dict[str, str]) -> None:
    server.repositories["org/name"].hashes["config.json"] = "../../../x"
    assert refusal(variables) == "the hub gives no valid hash for each file of org/name"


def test_a_damaged_file_is_refused_and_fetched_again(
    server: HubServer, variables: dict[str, str]
) -> None:
    shard = next(iter(SHARDS))
    server.damage(SHARDS[shard])
    message = refusal(variables)
    assert message.startswith(
        f"{shard} of org/name arrived damaged and was removed; try again: its"
    )
    assert "SHA-256 is " in message
    server.sends.clear()
    assert contents(fetch(variables))[shard] == SHARDS[shard]


def test_a_disk_that_is_too_small_is_noticed_before_the_download(
    server: HubServer, variables: dict[str, str]
) -> None:
    shard = next(iter(SHARDS))
    server.repositories["org/name"].sizes[shard] = 1 << 60
    message = refusal(variables)
    assert "not enough space on the disk of " in message
    assert "1,152,921,504.6 GB are needed and " in message
    assert not [each for each in server.requests if each.on_cdn]


def test_a_disk_that_fills_up_during_the_download(
    server: HubServer, variables: dict[str, str]
) -> None:
    """The kernel answers each write to /dev/full as a full disk does."""
    fetch(variables)
    for path in list(blobs(variables).iterdir()):
        if len(path.name) == 64:  # a large file
            path.unlink()
            path.with_name(f"{path.name}.tokend.incomplete").symlink_to("/dev/full")
    with pytest.raises(ModelError) as caught:
        fetch(variables, refresh=True)
    message = str(caught.value)
    assert "is full: 0.0 MB of org/name are still to come and " in message
    for path in blobs(variables).glob("*.incomplete"):
        path.unlink()
    assert contents(fetch(variables)).keys() >= SHARDS.keys()


def test_a_file_that_the_hub_does_not_send_over_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_download, "check_space", lambda folder, num_bytes: None)
    transfer = hub_download.Transfer(HubName("org/name"), COMMIT, str(tmp_path))
    huge = hub_download.HubFile("x.gguf", 51_000_000_000, "", "0" * 64)
    with pytest.raises(ModelError, match=r"has 51\.0 GB, and the hub sends at most 50\.0 GB"):
        transfer.fetch([huge])


def test_a_cache_that_cannot_be_written(server: HubServer, variables: dict[str, str]) -> None:
    message = refusal({**variables, "HF_HOME": "/proc/nowhere"})
    assert message.startswith("org/name cannot be downloaded to /proc/nowhere/hub: ")
    assert "set HF_HOME to a folder that user " in message


def test_a_group_that_may_write_to_the_folder_above_may_write_to_the_cache(
    variables: dict[str, str], tmp_path: Path
) -> None:
    """As in a container's volume, whose next user may be another one of the group."""
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume").chmod(0o770)
    folder = fetch({**variables, "HF_HOME": str(tmp_path / "volume/huggingface")})
    paths = [folder / "config.json", folder, *folder.parents[:4]]
    assert all(path.stat().st_mode & stat.S_IWGRP for path in paths)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "auto_map": {"AutoConfig": "x.Y"}}, "auto_map"),
        (
            {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "new"}},
            "new",
        ),
    ],
)
def test_what_is_not_supported_is_refused_before_its_weights_are_downloaded(
    server: HubServer, variables: dict[str, str], config: dict[str, object], expected: str
) -> None:
    server.repositories["org/name"].files["config.json"] = json.dumps(config).encode()
    assert expected in refusal(variables)
    assert not [each for each in server.requests if each.on_cdn]


def test_a_gated_repository(server: HubServer, variables: dict[str, str]) -> None:
    repository = server.repositories["org/name"]
    repository.is_gated, repository.readers = True, ("hf_good",)
    page = f"org/name is gated: ask for access at {server.url}/org/name"
    message = refusal(variables)
    assert message.startswith(page)
    assert "give a token of that account" in message
    assert "HF_TOKEN, --hf-token or hf auth login" in message
    message = refusal({**variables, "HF_TOKEN": "hf_other"})
    assert message == f"{page} with the account of the token that was sent, which has no access yet"
    assert fetch({**variables, "HF_TOKEN": "hf_good"})
    assert {each.token for each in server.requests if each.on_cdn} == {None}, "only the hub gets it"


def test_a_name_that_does_not_exist(server: HubServer, variables: dict[str, str]) -> None:
    message = refusal(variables, "org/nane")
    assert message.startswith(
        f"{server.url} has no model org/nane, or it is private, which needs a"
    )
    fetch(variables)
    assert "; did you mean org/name?" in refusal_of_another(variables, "org/nane")
    server.repositories["org/name"].is_private = True
    message = refusal_of_another({**variables, "HF_TOKEN": "hf_other"}, "org/name2")
    assert "is private and the token that was sent may not read it" in message


def refusal_of_another(variables: dict[str, str], name: str) -> str:
    with pytest.raises(ModelError) as caught:
        fetch(variables, name)
    assert not Path(variables["HF_HOME"], "hub", "models--" + name.replace("/", "--")).exists()
    return str(caught.value)


def test_a_revision_is_for_names_on_the_hub(variables: dict[str, str], tmp_path: Path) -> None:
    for model in (str(tmp_path), "smollm2-135m-instruct", "nonsense"):
        with pytest.raises(ModelError, match=r"^--revision is for names on the Hugging Face hub"):
            store.locate(model, HostEnvironment.of(variables), Recorder(), "v1")


def test_a_revision_that_does_not_exist(server: HubServer, variables: dict[str, str]) -> None:
    assert "org/name has no revision v9: see " in refusal(variables, revision="v9")


def test_offline(server: HubServer, variables: dict[str, str]) -> None:
    offline = {**variables, "HF_HUB_OFFLINE": "1"}
    expected = "org/name is not, or not all, in the Hugging Face cache, and HF_HUB_OFFLINE is set"
    assert refusal(offline).startswith(f"{expected}; without the hub: ")
    assert server.requests == []
    folder = fetch(variables)
    assert fetch(offline) == folder
    display = Recorder()
    assert fetch(offline, display=display, refresh=True) == folder
    assert display.lines == [f"{expected}; the files that are here are used"]


def test_no_network(server: HubServer, variables: dict[str, str]) -> None:
    closed = {**variables, "HF_ENDPOINT": "http://127.0.0.1:9"}
    message = refusal(closed)
    assert message.startswith("http://127.0.0.1:9 cannot be reached for org/name: ")
    assert "Connection refused" in message
    for way in ("tokend models", "the path of a model", "HF_ENDPOINT"):
        assert way in message


def test_a_hub_that_fails(server: HubServer, variables: dict[str, str]) -> None:
    server.status = 503
    assert "answered with status 503 for org/name" in refusal(variables)


def test_of_two_downloads_at_once_one_waits_and_says_so(
    server: HubServer, variables: dict[str, str]
) -> None:
    server.may_send.clear()
    displays = [Recorder(), Recorder()]
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda it=each: folders.append(fetch(variables, display=it)))
        for each in displays
    ]
    threads[0].start()
    assert server.is_sending.wait(30)
    threads[1].start()
    deadline = time.monotonic() + 30
    while not displays[1].lines:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    server.may_send.set()
    for thread in threads:
        thread.join(60)
    assert folders[0] == folders[1]
    assert displays[1].lines == ["waiting for another process that downloads org/name"]
    large = [each.path for each in server.requests if each.on_cdn and each.method == "GET"]
    assert len(large) == len(set(large)) == len(SHARDS), "each file is downloaded once"
    assert not list(Path(variables["HF_HOME"]).rglob("tokend*.lock"))
