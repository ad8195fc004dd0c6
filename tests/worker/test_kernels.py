"""Building and loading the kernels."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

import pytest

from proto.errors import ConfigError
from proto.settings.config import CpuKernels
from tests.worker.kernel_variants import each_variant, load_variant
from worker.cpu import build_kernels
from worker.cpu import kernels as kernels_module
from worker.cpu.build_kernels import (
    SOURCE_DIR,
    X86_VARIANTS,
    KernelBuildError,
    KernelVariant,
    build,
    build_here,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.cpu.kernels import (
    KernelsUnavailableError,
    candidate_kernels,
    limit_kernels,
    load_kernels,
    runnable_variants,
)

FAKE_COMPILER = """#!/bin/sh
case "$*" in *{refused}*) echo "unknown flag {refused}" >&2; exit 1 ;; esac
while [ "$1" != "-o" ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a g++ on an otherwise empty PATH that rejects flags containing `refused`."""

    def install(refused: str) -> None:
        fake = tmp_path / "bin" / "g++"
        fake.parent.mkdir()
        fake.write_text(FAKE_COMPILER.format(refused=refused))
        fake.chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join([str(fake.parent), "/bin", "/usr/bin"]))

    return install


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The commands that the compiler is started with, each without the name of its output."""
    recorded: list[tuple[str, ...]] = []
    run = build_kernels._run

    def record(command: list[str]) -> None:
        recorded.append(tuple(command[:-1]))
        run(command)

    monkeypatch.setattr(build_kernels, "_run", record)
    return recorded


def test_every_variant_is_built_once(tmp_path: Path, compiler) -> None:
    compiler(refused="nothing-at-all")
    output = tmp_path / "out"
    built = build(output)
    assert built == [each.library(output) for each in machine_variants()]
    built[0].write_text("kept")
    assert build(output) == built
    assert built[0].read_text() == "kept"


def test_building_for_this_machine_builds_the_variants_it_compares(
    tmp_path: Path, compiler
) -> None:
    compiler(refused="nothing-at-all")
    stale = tmp_path / "libtokend_amx_00000000.so"
    stale.touch()
    built = build_here(tmp_path)
    usable = usable_variants(machine_variants(), cpu_flags())
    compared = usable[:-1] or usable
    assert built == [each.library(tmp_path) for each in compared]
    assert set(tmp_path.glob("*.so")) == set(built)
    assert set(build(tmp_path)) >= set(built)
    assert build_here(tmp_path) == built
    assert len(set(tmp_path.glob("*.so"))) == len(machine_variants()), "other variants are kept"


def test_two_builds_at_once_compile_once(tmp_path: Path, compiler, commands) -> None:
    compiler(refused="nothing-at-all")
    output = tmp_path / "out"
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(build, output, machine_variants()[-1:]) for _ in range(2)]
    assert first.result() == second.result()
    assert len(commands) == len(list(SOURCE_DIR.rglob("*.cpp"))) + 1, "each source, and the link"


def test_a_variant_rejected_by_the_compiler_is_skipped(tmp_path: Path, compiler) -> None:
    best = machine_variants()[0]
    flags = best.all_flags
    if not flags:
        pytest.skip("the only variant of this machine has no flags of its own")
    compiler(refused=flags[-1])
    built = build(tmp_path / "out")
    understood = [each for each in machine_variants() if flags[-1] not in each.all_flags]
    assert built == [each.library(tmp_path / "out") for each in understood]
    assert best not in understood


def test_variants_share_equal_object_files(tmp_path: Path, compiler, commands) -> None:
    compiler(refused="nothing-at-all")
    built = build(tmp_path / "out")
    compiled = [each for each in commands if "-c" in each]
    assert len(compiled) == len(set(compiled))
    assert len([each for each in commands if "-shared" in each]) == len(built)


def test_libraries_of_other_sources_are_removed(tmp_path: Path, compiler) -> None:
    compiler(refused="nothing-at-all")
    output = tmp_path / "out"
    output.mkdir()
    stale = output / "libtokend_baseline_00000000.so"
    stale.write_text("old")
    build(output)
    assert not stale.exists()


def test_a_failing_compiler_is_reported_with_its_error(tmp_path: Path, compiler) -> None:
    compiler(refused="-fPIC")
    with pytest.raises(KernelBuildError, match="unknown flag -fPIC"):
        build(tmp_path / "out")


def test_each_kernel_has_a_line_while_they_compile(tmp_path: Path, compiler, capsys) -> None:
    compiler(refused="nothing-at-all")
    build(tmp_path / "out", machine_variants()[-1:])
    lines = capsys.readouterr().err.splitlines()
    number = len(list(SOURCE_DIR.rglob("*.cpp")))
    assert len(lines) == number
    for index, line in enumerate(lines, 1):
        assert re.fullmatch(rf"kernel {index} of {number}, \d+ s: \w+ \(\w+\)", line), line
    build(tmp_path / "out", machine_variants()[-1:])
    assert capsys.readouterr().err == "", "nothing is compiled again"


def test_kernels_with_other_flags_have_other_names(tmp_path: Path, compiler, capsys) -> None:
    compiler(refused="nothing-at-all")
    build(tmp_path / "out")
    names = [line.partition(": ")[2] for line in capsys.readouterr().err.splitlines()]
    assert len(names) == len(set(names))


SLOW_COMPILER = """#!/bin/sh
while [ "$1" != "-o" ]; do shift; done
case "$2" in *packed_product*) echo > "{started}"; sleep 600 & wait; esac
echo object > "$2"
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_ends_at_once_and_its_objects_are_used(
    tmp_path: Path, compiler, commands, capsys, number: int
) -> None:
    compiler(refused="nothing-at-all")
    fake, started, output = tmp_path / "bin" / "g++", tmp_path / "started", tmp_path / "out"
    quick = fake.read_text()
    fake.write_text(SLOW_COMPILER.format(started=started))
    program = (
        "import os, sys; from pathlib import Path; from worker.cpu import build_kernels as it; "
        "os.cpu_count, make = lambda: 1, it.build; "
        "it.build = lambda _: make(Path(sys.argv[1]), it.machine_variants()[-1:]); "
        "sys.exit(it.main([]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(output)], stderr=subprocess.PIPE, text=True
    )
    while not started.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    *lines, last = errors.splitlines()
    assert last == "stopped; make serve goes on from here"
    assert all(line.startswith("kernel ") for line in lines)
    finished = len(list((output / "objects").glob("*.o")))
    assert finished >= max(1, len(lines))
    fake.write_text(quick)
    build(output, machine_variants()[-1:])
    total = len(list(SOURCE_DIR.rglob("*.cpp")))
    again = capsys.readouterr().err.splitlines()
    assert again[0].startswith(f"kernel {finished + 1} of {total}, ")
    assert len([each for each in commands if "-c" in each]) == len(again) == total - finished
    assert not (output / "objects").exists()


def test_objects_of_other_sources_are_not_used(tmp_path: Path, compiler, commands) -> None:
    compiler(refused="nothing-at-all")
    objects = tmp_path / "objects"
    objects.mkdir()
    for name in ("attention_0000000000000000.o", "attention_0.partial"):
        (objects / name).touch()
    build(tmp_path, machine_variants()[-1:])
    assert len([each for each in commands if "-c" in each]) == len(list(SOURCE_DIR.rglob("*.cpp")))
    assert not objects.exists()


def test_a_build_that_waits_for_another_says_so(tmp_path: Path, compiler, capsys) -> None:
    compiler(refused="nothing-at-all")
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(build, tmp_path, machine_variants()[-1:])
        told = ""
        while "\n" not in told:
            told += capsys.readouterr().err
            assert not waiting.done()
        os.close(holder)
        assert waiting.result()
    assert told == f"waiting for another build in {tmp_path}\n"


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelBuildError, match=r"g\+\+ is not on the PATH\. Debian"):
        build(tmp_path / "out")


def test_changed_sources_change_the_library_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_kernels, "SOURCE_DIR", tmp_path)
    variant, names = machine_variants()[-1], set()
    for text in ("int a;", "int b;"):
        (tmp_path / "one.cpp").write_text(text)
        names.add(variant.library(tmp_path))
    assert len(names) == 2


def test_the_error_without_libraries_names_the_build_command(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailableError, match=r"python -m worker\.cpu\.build_kernels"):
        load_kernels(tmp_path)


def test_a_broken_library_is_reported(tmp_path: Path) -> None:
    for variant in machine_variants():
        variant.library(tmp_path).write_text("not a library")
    with pytest.raises(KernelsUnavailableError, match="do not load"):
        load_kernels(tmp_path)


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the limit that a test sets."""
    monkeypatch.setattr(kernels_module, "_allowed", None)
    candidate_kernels.cache_clear()
    yield
    candidate_kernels.cache_clear()


def test_kernels_are_held_to_a_variant_and_lesser_ones(no_limit: None) -> None:
    found = [variant.name for variant in runnable_variants()]
    if not found:
        pytest.skip("no compiled kernels on this machine")
    limit_kernels("auto")
    assert load_kernels().variant == found[0]
    for name in found:
        kernels_module._allowed = None
        limit_kernels(name)
        candidate_kernels.cache_clear()
        assert load_kernels().variant == name
        candidates = [kernels.variant for kernels in candidate_kernels()]
        assert candidates[0] == name
        assert set(candidates) <= set(found[found.index(name) :])


def test_a_variant_that_cannot_run_here_is_refused_with_those_that_can(
    no_limit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    avx2 = next(variant for variant in X86_VARIANTS if variant.name == "avx2")
    flags = avx2.cpu_flags
    monkeypatch.setattr(kernels_module, "cpu_flags", lambda: flags)
    monkeypatch.setattr(kernels_module, "machine_variants", lambda: X86_VARIANTS)
    monkeypatch.setattr(KernelVariant, "library", lambda variant, folder: Path(__file__))
    with pytest.raises(ConfigError, match=r"possible: auto, avx2, baseline$") as raised:
        limit_kernels("avx512")
    assert raised.value.param == "cpu_kernels"


def test_every_variant_is_a_value_of_the_setting() -> None:
    assert get_args(CpuKernels) == ("auto", *(variant.name for variant in X86_VARIANTS))


@each_variant
def test_kernels_share_the_openmp_runtime_of_torch(variant) -> None:
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no /proc on this system")
    load_variant(variant)
    libraries = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    runtimes = {each for each in libraries if "gomp" in each or "iomp" in each}
    assert len(runtimes) == 1
    assert "torch" in runtimes.pop()
