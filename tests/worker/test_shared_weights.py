"""Packed weights lie in memory once for workers that have the same, and no other changes them."""

import fcntl
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from deploy import flags
from deploy.supervisor.processes import WeightFiles
from proto.messages.lifecycle import Notice, Progress
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ServeConfig
from tests.fakes.gguf_models import prepared_gguf
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.cpu.device import CpuDevice
from worker.cpu.formats import OwnFormat
from worker.cpu.kernels import Kernels
from worker.cpu.weights import Bf16Weight, Fp8Weight, KernelWeight, PackedWeight, RotatedWeight
from worker.host import shared_weights
from worker.host.large_pages import WeightArena
from worker.host.memory_nodes import LARGE_PAGE
from worker.loaded_model import LoadedModel, load
from worker.parallel.group import RankGroup

pytestmark = pytest.mark.suite("long")

FINGERPRINT = b"f" * 32
SIZE = (5 << 20) + 3
WRITER = """
import sys
from worker.host.shared_weights import shared_weights

with shared_weights(
    int(sys.argv[1]), b"f" * 32, None, must_share=True, on_growth=lambda size: None
) as memory:
    weight, is_filled = memory.place("a weight", (5 << 20) + 3)
    weight.fill_(7)
    print(is_filled, flush=True)
    sys.stdin.readline()
sys.stdin.readline()
"""
"""A worker that writes a weight, and seals the file after a line of input."""


@pytest.fixture
def file() -> Iterator[int]:
    files = WeightFiles()
    yield files.descriptor(1, 0, None)
    files.close()


def share(
    file: int,
    fingerprint: bytes = FINGERPRINT,
    *,
    must_share: bool = True,
    on_growth: Callable[[int], None] = lambda size: None,
) -> AbstractContextManager[WeightArena]:
    return shared_weights.shared_weights(
        file, fingerprint, None, must_share=must_share, on_growth=on_growth
    )


@contextmanager
def writer(file: int) -> Iterator["subprocess.Popen[str]"]:
    """Another worker, which has written its weight and not sealed the file."""
    program = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=[file],
    )
    try:
        assert program.stdout is not None
        assert program.stdout.readline() == "False\n"
        yield program
    finally:
        program.kill()
        program.communicate()


def send_line(program: "subprocess.Popen[str]") -> None:
    assert program.stdin is not None
    program.stdin.write("\n")
    program.stdin.flush()


def is_sealed(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE)


# ---- The file ----


def test_a_worker_waits_for_the_one_that_writes(file: int) -> None:
    growth: list[int] = []
    with writer(file) as program:

        def on_growth(size: int) -> None:
            growth.append(size)
            send_line(program)

        with share(file, on_growth=on_growth) as memory:
            found, is_filled = memory.place("a weight", SIZE)
        assert growth[0] >= SIZE
        assert is_filled
        assert memory.is_shared
        assert (found == 7).all()
        assert is_sealed(file)
    assert (found == 7).all(), "the file outlives the worker that has written it"


def test_what_a_killed_worker_left_is_discarded(file: int) -> None:
    with writer(file) as program, share(file, on_growth=lambda size: program.kill()) as memory:
        found, is_filled = memory.place("a weight", SIZE)
        assert not is_filled
        assert not found.any()
        found.fill_(8)
    with share(file) as memory:
        again, is_filled = memory.place("a weight", SIZE)
    assert is_filled
    assert (again == 8).all()


def test_a_failed_load_leaves_a_file_that_is_not_whole(file: int) -> None:
    def load_and_fail() -> None:
        with share(file) as memory:
            memory.place("a weight", SIZE)[0].fill_(7)
            raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        load_and_fail()
    assert not is_sealed(file)
    with share(file) as memory:
        found, is_filled = memory.place("a weight", SIZE)
        assert not is_filled
        assert not found.any()


def test_weights_of_all_sizes_are_found_again(file: int) -> None:
    sizes = [1, 63, 64, 65, 3 << 20, 70 << 20, 4097, 64 << 20, 20 << 20, 50 << 20]
    with share(file) as memory:
        written = [memory.place(f"weight {size}", size)[0] for size in sizes]
        for number, part in enumerate(written, 1):
            assert not part.any()
            part.fill_(number)
        unnamed, _ = memory.place("", 100)
        unnamed.fill_(200)
    with share(file) as memory:
        found = [memory.place(f"weight {size}", size) for size in sizes]
        other = memory.place("another", 100)
        unnamed_later = memory.place("", 100)
    for number, (size, part, (later, is_filled)) in enumerate(
        zip(sizes, written, found, strict=True), 1
    ):
        assert is_filled
        assert later.data_ptr() % 64 == 0
        assert later.nbytes == part.nbytes == size
        assert (part == number).all()
        assert (later == number).all()
    assert (unnamed == 200).all()
    for part, is_filled in (other, unnamed_later):
        assert not is_filled
        assert not part.any()


def test_a_write_is_seen_by_no_other_worker(file: int) -> None:
    with share(file) as memory:
        first, _ = memory.place("a weight", SIZE)
        first.fill_(7)
    with share(file) as memory:
        second, _ = memory.place("a weight", SIZE)
    first[: SIZE // 2] = 1
    second[SIZE // 2 :] = 2
    assert (first[SIZE // 2 :] == 7).all()
    assert (second[: SIZE // 2] == 7).all()
    with share(file) as memory:
        assert (memory.place("a weight", SIZE)[0] == 7).all()
    for change in (
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.ftruncate(file, 0),
        lambda: fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ):
        with pytest.raises(PermissionError):
            change()


def whole_file() -> bytes:
    """Return the bytes of a sealed file with one weight."""
    files = WeightFiles()
    descriptor = files.descriptor(1, 0, None)
    with share(descriptor) as memory:
        memory.place("a weight", 100)[0].fill_(7)
    content = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    files.close()
    return content


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content[1:],
        lambda content: content[:-16] + b"tokendW0" + content[-8:],
        lambda content: content[:-8] + (1 << 60).to_bytes(8, "little"),
        lambda content: content[:-8] + bytes(8),
        lambda content: content.replace(b"a weight", b"a\xffweight"),
        lambda content: content.replace(b"fingerprint", b"fongerprint"),
        lambda content: bytes(LARGE_PAGE) + content,
        lambda content: content[LARGE_PAGE:],
        lambda content: content.replace(FINGERPRINT, b"g" * 32),
    ],
)
def test_a_sealed_file_that_is_not_that_of_the_model_is_not_used(
    damage: Callable[[bytes], bytes], file: int, caplog: pytest.LogCaptureFixture
) -> None:
    content = whole_file()
    damaged = damage(content)
    assert damaged != content
    os.pwrite(file, damaged, 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    with share(file) as memory:
        part, is_filled = memory.place("a weight", 100)
    assert not memory.is_shared
    assert not is_filled
    assert not part.any()
    assert "are not those of the model's files now" in caplog.text


def test_a_file_that_is_not_sealed_is_not_used(file: int) -> None:
    os.pwrite(file, whole_file(), 0)
    with share(file) as memory:
        part, is_filled = memory.place("a weight", 100)
        assert not is_filled
        assert not part.any()
    assert is_sealed(file)


def test_memory_in_small_pages_is_shared_only_by_several_engines(
    file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_weights, "_enlarge_pages", lambda part: False)
    with share(file, must_share=False) as memory:
        memory.place("a weight", SIZE)[0].fill_(7)
    assert not memory.is_shared
    assert not is_sealed(file)
    assert shared_weights.bytes_in_memory(file) == 0
    with writer(file) as program:  # it has the lock
        send_line(program)
        with share(file) as memory:
            assert memory.place("a weight", SIZE)[1]


def test_shared_weights_are_in_large_pages_where_the_system_has_them(file: int) -> None:
    if not shared_weights._empty_for_large_pages(file):
        pytest.skip("this system makes no large pages for memory in files")
    with share(file, must_share=False) as memory:
        parts = [memory.place("a weight", 9 << 20)[0].fill_(7)]
    assert memory.is_shared
    with share(file, must_share=False) as memory:
        parts.append(memory.place("a weight", 9 << 20)[0])
    for part in parts:
        assert (part == 7).all()
        assert figures_of(part.data_ptr() + (4 << 20))["ShmemPmdMapped"] >= 8 << 10


def figures_of(address: int) -> dict[str, int]:
    """Return the inode of the map at an address of this process, and its figures of smaps in kB."""
    figures: dict[str, int] = {}
    is_wanted = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)", line):
            begin, end = (int(each, 16) for each in head.groups()[:2])
            is_wanted = begin <= address < end
            if is_wanted:
                figures["inode"] = int(head[4])
        elif is_wanted and (figure := re.match(r"(\w+): +(\d+) kB", line)):
            figures[figure[1]] = int(figure[2])
    return figures


# ---- Models ----


def config_of(*words: str) -> ServeConfig:
    return flags.build(flags.parse(["--data-parallel-size", "2", *words]))


def load_rank(
    config: ServeConfig,
    prepared: PreparedModel,
    weights_fd: int | None,
    rank: int = 0,
    reports: list[Progress | Notice] | None = None,
) -> LoadedModel:
    size = config.parallel.tensor_parallel_size
    ignored: list[Progress | Notice] = []
    return load(
        config,
        prepared,
        CpuDevice(config.device, parallel=config.parallel),
        RankGroup(rank, size),
        (ignored if reports is None else reports).append,
        weights_fd=weights_fd,
    )


def kernel_weights(loaded: LoadedModel) -> list[KernelWeight]:
    assert isinstance(loaded.weight_format, OwnFormat)
    return loaded.weight_format.kernel_weights


def assert_equal_weights(loaded: LoadedModel, expected: LoadedModel) -> None:
    pairs = zip(kernel_weights(loaded), kernel_weights(expected), strict=True)
    assert all(torch.equal(one._packed, other._packed) for one, other in pairs)
    assert loaded.weight_format.memory == expected.weight_format.memory
    assert loaded.fingerprint(16) == expected.fingerprint(16)


def refuse_to_lay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a weight is laid out again")

    for kind, names in {
        PackedWeight: ("put_blocks", "put_dense"),
        RotatedWeight: ("put_dense",),
        Bf16Weight: ("put_rows",),
        Fp8Weight: ("put_rows",),
    }.items():
        for name in names:
            monkeypatch.setattr(kind, name, refuse)


def model_of(kind: str, folder: Path) -> PreparedModel:
    if kind == "gguf":
        return prepared_gguf(folder / "gguf", "Q4_0", kinds={"v_proj": "Q8_0", "down_proj": "F16"})
    save_tiny(kind, folder)
    return prepare_checkpoint(folder, folder / "prepared")


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        *(("gguf", weights) for weights in ("auto", "bf16", "int8", "packed+int8")),
        *((kind, "int8") for kind in ("llama", "llama-tied", "mixtral")),
        *((kind, "bf16") for kind in ("llama", "llama-tied", "mixtral")),
    ],
)
def test_the_second_worker_finds_the_weights_of_the_first(
    kind: str,
    weights: str,
    kernels: Kernels,
    file: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = model_of(kind, tmp_path)
    config = config_of("--cpu-weights", weights)
    own = load_rank(config, prepared, None)
    first = load_rank(config, prepared, file)
    size = shared_weights.bytes_in_memory(file)
    with monkeypatch.context() as patched:
        refuse_to_lay_out(patched)
        second = load_rank(config, prepared, file)
    assert shared_weights.bytes_in_memory(file) == size
    assert not any(each.is_filled for each in kernel_weights(first))
    assert all(each.is_filled for each in kernel_weights(second))
    assert_equal_weights(first, own)
    assert_equal_weights(second, own)
    inode = os.fstat(file).st_ino
    for loaded in (first, second):
        assert loaded.shares_weights
        assert {part.form for part in loaded.weights if not part.is_shared} <= {"f32"}
        assert any(part.is_shared for part in loaded.weights)
        found = {figures_of(each._packed.data_ptr())["inode"] for each in kernel_weights(loaded)}
        assert found == {inode}
    assert not own.shares_weights
    assert not any(part.is_shared for part in own.weights)


def test_ranks_have_files_of_their_own(kernels: Kernels, tmp_path: Path) -> None:
    prepared = model_of("llama", tmp_path)
    config = config_of("--cpu-weights", "int8", "--tensor-parallel-size", "2")
    files = WeightFiles()
    for rank in range(2):
        descriptor = files.descriptor(1, rank, None)
        own = load_rank(config, prepared, None, rank)
        for _ in range(2):
            found = load_rank(config, prepared, descriptor, rank)
            assert_equal_weights(found, own)
        assert all(each.is_filled for each in kernel_weights(found))
    first = load_rank(config, prepared, files.descriptor(1, 1, None), 0)
    assert not first.shares_weights, "rank 1's are not those of rank 0"
    files.close()


def test_new_weights_of_one_engine_do_not_change_another(
    kernels: Kernels, file: int, tmp_path: Path
) -> None:
    prepared = model_of("llama", tmp_path)
    config = config_of("--cpu-weights", "int8")
    own, first, second = (load_rank(config, prepared, each) for each in (None, file, file))
    for changed in (first, second):
        weight = next(each for each in kernel_weights(changed) if isinstance(each, RotatedWeight))
        weight.put_dense(torch.ones(weight.out_features, weight.in_features))
        assert not torch.equal(weight._packed, kernel_weights(own)[0]._packed)
        assert_equal_weights(load_rank(config, prepared, file), own)
    for weight in kernel_weights(first):
        weight._packed.zero_()
    assert any(each._packed.any() for each in kernel_weights(second))


def test_changed_files_are_not_mixed_with_weights_in_memory(
    kernels: Kernels, file: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = model_of("llama", tmp_path)
    config = config_of("--cpu-weights", "int8")
    load_rank(config, prepared, file)
    (path,) = tmp_path.glob("*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-64] + bytes(64))
    found = load_rank(config, prepared, file)
    assert not found.shares_weights
    assert "are not those of the model's files now" in caplog.text
    assert_equal_weights(found, load_rank(config, prepared, None))
    assert not load_rank(config_of("--cpu-weights", "bf16"), prepared, file).shares_weights


@pytest.mark.parametrize("words", [("--cpu-weights", "f32"), ("--model-impl", "transformers")])
def test_weights_without_a_layout_of_the_kernels_are_not_shared(
    words: tuple[str, ...], kernels: Kernels, file: int, tmp_path: Path
) -> None:
    prepared = model_of("llama", tmp_path)
    config = config_of(*words)
    found = load_rank(config, prepared, file)
    assert not found.shares_weights
    assert not is_sealed(file)
    assert found.plan.elsewhere == 0


def test_a_worker_that_waits_reports_progress(
    kernels: Kernels, file: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = model_of("llama", tmp_path)
    reports: list[Progress | Notice] = []
    with writer(file) as program:

        class Reports(list[Progress | Notice]):
            def append(self, message: Progress | Notice) -> None:
                reports.append(message)
                if message == Progress("loading weights", 1.0):
                    send_line(program)

        with caplog.at_level(logging.INFO):
            found = load_rank(config_of("--cpu-weights", "int8"), prepared, file, 0, Reports())
    assert Progress("loading weights", 1.0) in reports[:-1]
    assert not found.shares_weights, "the other worker has another model"
