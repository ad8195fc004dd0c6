"""KV in a shared folder: what the worker and the engine side write, read and refuse."""

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine_core.kv_cache.free_queue import NULL_BLOCK
from engine_core.kv_connector.shared_storage import SharedStorageScheduler
from proto.errors import ConfigError
from proto.messages.kv_connector import (
    KVConnectorOutput,
    SharedStorageReport,
    SharedStorageStep,
    pack,
    unpack,
)
from proto.messages.lifecycle import KVCacheGeometry
from proto.settings.kv_transfer_config import KVTransferConfig
from tests.engine_core.kv_connector.test_connector_registry import context as engine_context
from tests.fakes.devices import CPU
from tests.fakes.kv_requests import Setup, make_manager
from worker.attention.kv_cache import KVCache, kv_layout
from worker.kv_connector.base import WorkerContext
from worker.kv_connector.shared_storage import SharedStorageWorker

FINGERPRINT = b"f" * 32
HASHES = [bytes([value]) * 32 for value in (1, 2, 3)]


def config(folder: Path | str, **changes: str) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="SharedStorageConnector",
        kv_connector_extra_config={"shared_storage_path": str(folder)},
        **changes,
    )


def worker(folder: Path, dtype: str = "float32") -> tuple[SharedStorageWorker, KVCache]:
    geometry = KVCacheGeometry(2, 2, 8, dtype, 0)
    cache = KVCache(geometry, kv_layout([None, None]), 6, 4)
    connector = SharedStorageWorker(config(folder), WorkerContext(0, 1, FINGERPRINT, 4, CPU))
    connector.register_kv_caches(cache)
    return connector, cache


def run(connector: SharedStorageWorker, step: SharedStorageStep) -> SharedStorageReport:
    connector.bind_connector_metadata(pack(step))
    connector.start_load_kv()
    for layer in range(2):
        connector.wait_for_layer_load(layer)
    for layer in range(2):
        connector.save_kv_layer(layer)
    connector.wait_for_save()
    metadata = connector.build_connector_worker_meta()
    return unpack(metadata, SharedStorageReport) if metadata else SharedStorageReport()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_blocks_come_back_as_they_were_stored(tmp_path: Path, dtype: str) -> None:
    first, cache = worker(tmp_path, dtype)
    cache.buffer.view(torch.uint8).random_(0, 200)
    kept = cache.buffer[[3, 5]].clone()
    report = run(first, SharedStorageStep([], [], HASHES[:2], [3, 5]))
    assert report == SharedStorageReport(HASHES[:2])
    second, other = worker(tmp_path, dtype)
    assert run(second, SharedStorageStep(HASHES[:2], [1, 4])) == SharedStorageReport()
    assert second.get_block_ids_with_load_errors() == []
    assert torch.equal(other.buffer[[1, 4]].view(torch.uint8), kept.view(torch.uint8))
    assert not other.buffer[[2, 3, 5]].view(torch.uint8).any(), "nothing else is written to"


@pytest.mark.parametrize("harm", ["torn", "longer", "flipped", "gone"])
def test_a_damaged_file_is_an_invalid_block(tmp_path: Path, harm: str) -> None:
    connector, _ = worker(tmp_path)
    run(connector, SharedStorageStep([], [], HASHES[:2], [3, 5]))
    path = next(tmp_path.rglob(f"{HASHES[0].hex()}*"))
    content = bytearray(path.read_bytes())
    if harm == "gone":
        path.unlink()
    elif harm == "flipped":
        content[77] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[:-9] if harm == "torn" else content + b"x")
    report = run(connector, SharedStorageStep(HASHES[:2], [1, 2]))
    assert connector.get_block_ids_with_load_errors() == [1]
    assert report.lost == [HASHES[0]]


def test_a_removed_folder_stores_nothing(tmp_path: Path) -> None:
    connector, _ = worker(tmp_path)
    (folder,) = tmp_path.iterdir()
    folder.rmdir()
    assert run(connector, SharedStorageStep([], [], HASHES[:1], [3])).lost == HASHES[:1]


def test_folders_and_files_are_private_to_their_owner(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        connector, _ = worker(tmp_path / "shared")
        run(connector, SharedStorageStep([], [], HASHES[:1], [3]))
    finally:
        os.umask(before)
    folder = tmp_path / "shared"
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes == {0o700}
    (file,) = (path for path in folder.rglob("*") if path.is_file())
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_store_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    connector, _ = worker(tmp_path)
    monkeypatch.setattr(os, "replace", full)
    assert run(connector, SharedStorageStep([], [], HASHES[:1], [3])).lost == HASHES[:1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def engine(folder: Path, **changes: str) -> SharedStorageScheduler:
    return SharedStorageScheduler(config(folder, **changes), engine_context())


def test_the_engine_matches_leading_blocks_present_on_all_ranks(tmp_path: Path) -> None:
    setup = Setup(make_manager(10, 4))
    request = setup.requests.make("aaaa bbbb cccc dddd")
    connector = engine(tmp_path)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    stored = SharedStorageReport([request.block_hashes[index] for index in (0, 1, 3)])
    connector.update_connector_output(KVConnectorOutput(worker_metadata=pack(stored)))
    assert connector.get_num_new_matched_tokens(request, 0) == (8, False)
    assert connector.get_num_new_matched_tokens(request, 4) == (4, False)
    lost = SharedStorageReport([], [request.block_hashes[1]])
    connector.update_connector_output(KVConnectorOutput(worker_metadata=pack(lost)))
    assert connector.get_num_new_matched_tokens(request, 0) == (4, False)
    assert connector.reset_cache()
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)


def test_the_engine_finds_blocks_stored_before_its_start(tmp_path: Path) -> None:
    setup = Setup(make_manager(10, 4))
    request = setup.requests.make("aaaa bbbb cccc")
    connector, _ = worker(tmp_path)
    run(connector, SharedStorageStep([], [], request.block_hashes, [1, 2, 3]))
    folder = next(tmp_path.iterdir())
    (folder / "notes.txt").write_text("not a block")
    match = engine(tmp_path).get_num_new_matched_tokens(request, 0)
    assert match == (8, False), "the last token is always computed"
    producer = engine(tmp_path, kv_role="kv_producer")
    assert producer.get_num_new_matched_tokens(request, 0) == (0, False)


def test_null_blocks_are_not_stored(tmp_path: Path) -> None:
    request = Setup(make_manager(10, 4)).requests.make("aaaa bbbb cccc")
    table = [5, NULL_BLOCK, 7]
    context = replace(engine_context(), block_ids=lambda seq_id: [table])
    connector = SharedStorageScheduler(config(tmp_path), context)
    connector.update_state_after_alloc(request, [table], 0)
    cached = SimpleNamespace(
        seq_ids=[request.seq_id], num_computed_tokens=[0], num_scheduled_tokens=[12]
    )
    output = SimpleNamespace(new_requests=[], cached_requests=cached)
    step = unpack(connector.build_connector_meta(output), SharedStorageStep)
    hashes = request.block_hashes
    assert (step.store_hashes, step.store_blocks) == ([hashes[0], hashes[2]], [5, 7])


@pytest.mark.parametrize("reset", [False, True])
def test_a_store_that_ends_after_an_invalidation_is_not_matched(
    tmp_path: Path, reset: bool
) -> None:
    request = Setup(make_manager(10, 4)).requests.make("aaaa bbbb")
    context = replace(engine_context(), block_ids=lambda seq_id: [[5, 6]], num_ranks=2)
    connector = SharedStorageScheduler(config(tmp_path), context)

    def store() -> list[bytes]:
        connector.update_state_after_alloc(request, [[5, 6]], 0)
        cached = SimpleNamespace(
            seq_ids=[request.seq_id], num_computed_tokens=[0], num_scheduled_tokens=[8]
        )
        output = SimpleNamespace(new_requests=[], cached_requests=cached)
        metadata = connector.build_connector_meta(output)
        return unpack(metadata, SharedStorageStep).store_hashes if metadata else []

    def report(**hashes: list[bytes]) -> int:
        metadata = pack(SharedStorageReport(**hashes))
        connector.update_connector_output(KVConnectorOutput(worker_metadata=metadata))
        return connector.get_num_new_matched_tokens(request, 0).num_tokens

    first, second = store()
    assert report(stored=[first]) == 0
    if reset:
        assert connector.reset_cache()
    else:
        connector.invalidate_request(request)
    connector.request_finished(request, [[5, 6]])
    assert store() == [first, second], "the next request stores the blocks again"
    assert report(stored=[first, second]) == 0, "rank 1, of the first store"
    assert report(lost=[second]) == 0, "rank 0, of the first store"
    assert report(stored=[first, second]) == 0, "rank 0, of the second store"
    assert report(stored=[first, second]) == 4, "the last token is always computed"


@pytest.mark.parametrize("windows", [(64,), (None, 64)])
def test_models_with_sliding_windows_are_refused(
    tmp_path: Path, windows: tuple[int | None, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"SharedStorageConnector .* sliding windows"):
        SharedStorageScheduler(config(tmp_path), engine_context(*windows))


@pytest.mark.parametrize(
    "extra", [{}, {"shared_storage_path": ""}, {"shared_storage_path": "/proc/x"}, {"path": "x"}]
)
def test_invalid_settings_are_refused_by_name(extra: dict[str, str]) -> None:
    wrong = KVTransferConfig(kv_connector="X", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match=r"shared_storage_path|has no path"):
        SharedStorageScheduler(wrong, engine_context())
