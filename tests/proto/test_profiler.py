"""--profiler-config, and the stacks that are sampled of a thread."""

import json
import re
from pathlib import Path

import pytest

from proto.errors import ConfigError
from proto.runtime.stack_sampler import StackSampler
from proto.settings.config import ServeConfig, TraceConfig
from proto.settings.config_checks import validate
from proto.settings.profiler_config import ProfilerConfig, parse_profiler_config
from tests.fakes.lifecycle_messages import profiler_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "takes JSON"),
        ("[]", "takes a JSON object"),
        ('{"profiler": "torch"}', "missing required field `torch_profiler_dir`"),
        ('{"torch_profiler_dir": "/p"}', "missing required field `profiler`"),
        ('{"profiler": "cuda", "torch_profiler_dir": "/p"}', "'cuda'.*`$.profiler`"),
        (profiler_config("/p", use_gzip=True), "has no use_gzip; it has profiler, torch_"),
        (profiler_config("/p", max_iterations="7"), "Expected `int`.*max_iterations"),
        (profiler_config("/p", max_iterations=0), r"max_iterations must be in \[1, 10000\], got 0"),
        (profiler_config("/p", delay_iterations=-1), "delay_iterations must be in"),
        (profiler_config("/p", max_seconds=1e9), r"max_seconds must be in \[1, 600\]"),
        (profiler_config(""), "torch_profiler_dir takes the path"),
        (profiler_config("gs://bucket"), "torch_profiler_dir takes the path"),
    ],
)
def test_wrong_settings_are_named(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=r"^--profiler-config") as raised:
        validate(ServeConfig(trace=TraceConfig(profiler_config=text)))
    assert re.search(expected.replace("$", r"\$"), str(raised.value))
    assert raised.value.param == "profiler_config"


def test_the_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_profiler_config(profiler_config("here", max_iterations=7))
    assert config is not None
    assert (config.torch_profiler_dir, config.max_iterations) == (str(tmp_path / "here"), 7)
    assert parse_profiler_config(None) is None


def earlier(sampler: StackSampler) -> None:
    spin(sampler)


def spin(sampler: StackSampler) -> None:
    """Work until a sample has seen it."""
    while not any(f"{__name__}:spin" in stack for stack in list(sampler._counts)):
        json.dumps(list(range(100)))


def test_the_stacks_of_the_thread_are_written(tmp_path: Path) -> None:
    sampler = StackSampler(ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path)), "me")
    assert sampler.stop() == []
    sampler.start()
    earlier(sampler)
    sampler.start()  # what was sampled before is dropped
    spin(sampler)
    stacks, summary = map(Path, sampler.stop())
    assert sampler.stop() == []
    assert {stacks.parent, summary.parent} == {tmp_path}
    assert re.fullmatch(r"me\.\d+\.\d+\.stacks\.txt", stacks.name)
    lines = stacks.read_text().splitlines()
    assert all(re.fullmatch(r"\S+ [1-9]\d*", line) for line in lines)
    assert any(f";{__name__}:spin" in line for line in lines)
    assert f"{__name__}:earlier" not in stacks.read_text()
    first, _, *rows = summary.read_text().splitlines()
    assert re.fullmatch(r"\d+ samples", first)
    assert any(row.endswith(f"{__name__}:spin") for row in rows)


def test_sampling_ends_by_itself(tmp_path: Path) -> None:
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path), max_seconds=0.0)
    sampler = StackSampler(config, "me")
    sampler.start()
    assert sampler._thread is not None
    sampler._thread.join()
    assert [Path(path).name.endswith(".txt") for path in sampler.stop()] == [True, True]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = str(tmp_path / "file" / "profiles")
    sampler = StackSampler(ProfilerConfig(profiler="torch", torch_profiler_dir=folder), "me")
    with pytest.raises(NotADirectoryError):
        sampler.start()
    assert sampler.stop() == []
