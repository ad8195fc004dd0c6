"""When two generations fit the memory, with a fake /proc."""

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from deploy.supervisor.epochs import ServedModels
from deploy.supervisor.reload.actions import ReloadActions
from proto.errors import ModelError
from proto.runtime.host_resources import resident_memory
from proto.runtime.sockets import Poller
from proto.settings.config import (
    GIB,
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    ServeConfig,
)
from tests.fakes import lifecycle_messages
from tests.fakes.kv_events import events_config

POOL = 4 * GIB
RESIDENT = 1 * GIB
MODEL = lifecycle_messages.model()


@dataclass
class Worker:
    pid: int
    role: str = "worker"
    generation: int = 1


def machine(root: Path, free: int) -> Path:
    """Return actions with this many bytes free and a worker of 1 GiB whose process id is 7."""
    (root / "proc" / "7").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemAvailable: {free // 1024} kB\n")
    pages = RESIDENT // os.sysconf("SC_PAGE_SIZE")
    (root / "proc" / "7" / "statm").write_text(f"99 {pages} 1 1 0 1 0")
    return root


def actions(root: Path, config: ServeConfig) -> ReloadActions:
    engine = lifecycle_messages.engine_ready(kv_cache_bytes=POOL)
    workers = [Worker(7)] * config.parallel.data_parallel_size
    children = SimpleNamespace(running=[*workers, Worker(8, "api_server")])
    launch, readiness = SimpleNamespace(config=config), SimpleNamespace(engine=engine)
    return ReloadActions(launch, children, Poller(), readiness, root)


@pytest.mark.parametrize("num_engines", [1, 3])
@pytest.mark.parametrize(
    ("cache", "needed"),
    [
        (CacheConfig(kv_cache_memory=POOL), RESIDENT + POOL),
        (CacheConfig(num_gpu_blocks_override=9), RESIDENT + POOL),
        (CacheConfig(), RESIDENT + POOL * 2 // 3),
    ],
)
def test_two_generations_fit_if_as_much_memory_is_free_as_used(
    tmp_path: Path, cache: CacheConfig, needed: int, num_engines: int
) -> None:
    """Three quarters of the free memory must be half of a pool whose size is not set.

    Of several engines one at a time is replaced.
    """
    config = ServeConfig(cache=cache, parallel=ParallelConfig(data_parallel_size=num_engines))
    assert actions(machine(tmp_path / "enough", needed + 1024), config).two_generations_fit(
        MODEL, MODEL
    )
    assert not actions(machine(tmp_path / "less", needed - (1 << 20)), config).two_generations_fit(
        MODEL, MODEL
    )


def test_a_larger_model_needs_more(tmp_path: Path) -> None:
    """Workers need as much more as its files are larger; those of a smaller one no less."""
    (tmp_path / "small.gguf").write_bytes(bytes(1000))
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "model.safetensors").write_bytes(bytes(3000))
    (tmp_path / "large" / "tokenizer.json").write_bytes(bytes(9000))
    small, large = (
        structs.replace(MODEL, source=str(tmp_path / name)) for name in ("small.gguf", "large")
    )
    config = ServeConfig(cache=CacheConfig(kv_cache_memory=POOL))
    needed = POOL + 3 * RESIDENT
    assert actions(machine(tmp_path / "enough", needed + 1024), config).two_generations_fit(
        small, large
    )
    less = actions(machine(tmp_path / "less", needed - (1 << 20)), config)
    assert not less.two_generations_fit(small, large)
    assert less.two_generations_fit(large, small)


@pytest.mark.parametrize("flag", ["tokenizer", "chat_template"])
def test_flags_of_a_model_do_not_go_with_another(flag: str, tmp_path: Path) -> None:
    other = structs.replace(MODEL, source="/other", name="other")
    bound = actions(tmp_path, ServeConfig(model=ModelConfig(**{flag: "/mine"})))
    bound.check_model(MODEL, MODEL)
    with pytest.raises(ModelError, match=f"--{flag.replace('_', '-')} /mine belongs to"):
        bound.check_model(MODEL, other)
    long = actions(tmp_path, ServeConfig(model=ModelConfig(max_model_len=MODEL.max_position + 1)))
    with pytest.raises(ModelError, match="--max-model-len"):
        long.check_model(MODEL, other)
    actions(tmp_path, ServeConfig()).check_model(MODEL, other)


def test_a_model_is_unchanged_if_its_folder_and_that_of_its_draft_model_are(tmp_path: Path) -> None:
    """Every change of a file brings another prepared folder, except of files of flags."""
    changed = structs.replace(MODEL, folder="/changed")
    found = actions(tmp_path, ServeConfig())
    assert found.is_unchanged(ServedModels(MODEL, MODEL), ServedModels(MODEL, MODEL))
    assert not found.is_unchanged(ServedModels(MODEL), ServedModels(changed))
    assert not found.is_unchanged(ServedModels(MODEL, MODEL), ServedModels(MODEL, changed))
    for flag in ("tokenizer", "chat_template"):
        bound = actions(tmp_path, ServeConfig(model=ModelConfig(**{flag: "/mine"})))
        assert not bound.is_unchanged(ServedModels(MODEL), ServedModels(MODEL))


def test_free_memory_of_a_gpu_is_unknown(tmp_path: Path) -> None:
    config = ServeConfig(device=DeviceConfig(device="cuda"))
    assert not actions(machine(tmp_path, 1 << 50), config).two_generations_fit(MODEL, MODEL)


def test_two_engines_cannot_publish_at_one_endpoint(tmp_path: Path) -> None:
    root = machine(tmp_path, 1 << 50)
    assert actions(
        root, ServeConfig(cache=CacheConfig(kv_events_config=events_config()))
    ).two_generations_fit(MODEL, MODEL)
    fixed = CacheConfig(kv_events_config=events_config(endpoint="tcp://127.0.0.1:5557"))
    assert not actions(root, ServeConfig(cache=fixed)).two_generations_fit(MODEL, MODEL)


def test_a_dead_process_holds_no_memory(tmp_path: Path) -> None:
    assert resident_memory(8, machine(tmp_path, 0)) == 0
    assert resident_memory(os.getpid()) > 1 << 20
