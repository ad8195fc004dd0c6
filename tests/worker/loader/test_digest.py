"""The digest of all weights is computed once for a state of their files, not used for another."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proto.codec import encode
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, TensorIndex
from tests.fakes.edits import edit_middle
from tests.fakes.gguf_files import write
from tests.fakes.prepared_models import gguf_index, prepare
from worker.loader import digest
from worker.loader.digest import DIGEST_FILE, hash_tensors, hashing, weights_digest

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 8}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of 400 kB: an edit of its middle is far from where the tensors begin and end."""
    numbers = np.random.default_rng(0).standard_normal((2, 50_000), np.float32)
    write(tmp_path / "model.gguf", {"w": ("F32", numbers)})
    return tmp_path / "model.gguf"


@pytest.fixture
def prepared(model: Path) -> PreparedModel:
    return prepare(model.parent / "prepared", CONFIG, gguf_index(model))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[TensorIndex]:
    """The indices whose tensors were hashed."""
    calls: list[TensorIndex] = []

    def hash_and_record(index: TensorIndex) -> str:
        calls.append(index)
        return hash_tensors(index)

    monkeypatch.setattr(digest, "hash_tensors", hash_and_record)
    return calls


def test_a_second_start_does_not_hash(prepared: PreparedModel, hashed: list[TensorIndex]) -> None:
    first = weights_digest(prepared)
    assert weights_digest(prepared) == first
    assert len(hashed) == 1


def test_an_edit_with_restored_times_gives_another_digest(
    model: Path, prepared: PreparedModel
) -> None:
    first, times = weights_digest(prepared), model.stat()
    edit_middle(model)
    assert (model.stat().st_size, model.stat().st_mtime_ns) == (times.st_size, times.st_mtime_ns)
    assert weights_digest(prepared) != first


def test_a_copy_has_the_same_digest(model: Path, prepared: PreparedModel) -> None:
    """So that hosts share KV, and a file that moved keeps its own."""
    copy = model.with_name("copy.gguf")
    shutil.copy(model, copy)
    os.utime(copy, (0, 0))
    other = prepare(model.parent / "other", CONFIG, gguf_index(copy))
    assert weights_digest(other) == weights_digest(prepared)


def test_a_touched_file_is_hashed_again(
    model: Path, prepared: PreparedModel, hashed: list[TensorIndex]
) -> None:
    first = weights_digest(prepared)
    os.utime(model, (0, 0))
    assert weights_digest(prepared) == first
    assert len(hashed) == 2


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80"])
def test_an_invalid_result_is_replaced(prepared: PreparedModel, content: bytes) -> None:
    first = weights_digest(prepared)
    path = Path(prepared.folder, DIGEST_FILE)
    path.write_bytes(content)
    assert weights_digest(prepared) == first
    assert path.read_bytes() != content


def test_a_file_that_changes_meanwhile_is_refused(
    model: Path, prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit_and_hash(index: TensorIndex) -> str:
        edit_middle(model)
        return hash_tensors(index)

    monkeypatch.setattr(digest, "hash_tensors", edit_and_hash)
    with pytest.raises(ModelError, match="changed while they were read"):
        weights_digest(prepared)
    assert not Path(prepared.folder, DIGEST_FILE).exists()


def test_a_file_that_changes_during_the_load_is_refused(
    model: Path, prepared: PreparedModel
) -> None:
    weights_digest(prepared)
    with pytest.raises(ModelError, match="changed while they were read"), hashing(prepared):
        edit_middle(model)


def test_ranks_that_start_together_hash_once(
    prepared: PreparedModel, hashed: list[TensorIndex]
) -> None:
    together = threading.Barrier(3)

    def start(_: int) -> Any:
        together.wait()
        return weights_digest(prepared)

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(start, range(3)))) == 1
    assert len(hashed) == 1


@pytest.mark.timeout(20)
def test_a_failing_load_does_not_wait_for_the_hash(
    prepared: PreparedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def hash_slowly(index: TensorIndex) -> str:
        begun.set()
        may_end.wait()
        return hash_tensors(index)

    monkeypatch.setattr(digest, "hash_tensors", hash_slowly)

    def load() -> None:
        with hashing(prepared) as future:
            futures.append(future)
            assert begun.wait(10)
            raise ModelError("a tensor is missing")

    futures: list[Future[str]] = []
    with pytest.raises(ModelError, match="a tensor is missing"):
        load()
    assert not futures[0].done()
    may_end.set()
    assert len(futures[0].result(10)) == 64


def test_a_process_does_not_end_later_because_of_the_hash(prepared: PreparedModel) -> None:
    """A thread of a pool would be joined at exit."""
    program = f"""
import sys, threading
from proto.codec import MessageDecoder
from proto.messages.prepared_model import PreparedModel
from worker.loader import digest
begun = threading.Event()
def hash_forever(index):
    begun.set()
    threading.Event().wait()
digest.hash_tensors = hash_forever
prepared = MessageDecoder(PreparedModel).decode({encode(prepared)!r})
with digest.hashing(prepared):
    begun.wait()
    sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert ended.returncode == 7
