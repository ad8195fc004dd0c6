"""Compiles the C++ kernels: one shared library for each instruction set.

Runs at installation (setup.py) and by hand: `python -m worker.cpu.build_kernels` makes them for
every CPU of this kind, with `--here` for this machine alone. Imports nothing but the standard
library, so that it works before the package is installed.

Ctrl-C ends the compilers. The objects that they have finished stay, and the next build links them.

The libraries are compiled with OpenMP but not linked to an OpenMP runtime: torch
has one, and a second would compete with it for the cores. They are loaded after
torch and use its runtime.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final

SOURCE_DIR: Final = Path(__file__).resolve().parents[1] / "csrc"
PRODUCT_SOURCES: Final = ("few_rows_int8.cpp", "packed_product.cpp", "rotated_product.cpp")
"""Sources of the products of bytes, for which CPUs have the most kinds of instructions."""
TILE_SOURCES: Final = (
    *("many_rows_bf16.cpp", "few_rows_bf16.cpp", "packed_product.cpp"),
    *("rotated_product.cpp", "bf16_product.cpp", "fp8_product.cpp", "adapters.cpp"),
)
"""Sources that multiply bfloat16, or use the tile unit, where a variant can. All others are the
same for every CPU with AVX-512."""

_COMPILE_FLAGS: Final = (
    *("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Contracting a * b + c is welcome, reordering sums is not: results are repeatable.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)


_Part = tuple[Path, tuple[str, ...]]
"""A source and the flags it is compiled with: one object, which variants may share."""


class KernelBuildError(Exception):
    """The compiler is missing or failed; the message says which and why."""


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """One library.

    flags: for the compiler. cpu_flags: what /proc/cpuinfo must list to run it, everything that the
    compiler may use with these flags.
    product_flags, tile_flags: added for PRODUCT_SOURCES and TILE_SOURCES only, so that
    variants that differ in these share the other objects.
    """

    name: str
    flags: tuple[str, ...]
    cpu_flags: frozenset[str]
    product_flags: tuple[str, ...] = ()
    tile_flags: tuple[str, ...] = ()

    @property
    def is_baseline(self) -> bool:
        """Whether every CPU of this kind runs it: the loops of the others over shorter vectors."""
        return self.name == "baseline"

    @property
    def all_flags(self) -> tuple[str, ...]:
        """Flags that any of its sources is compiled with, besides the common ones."""
        return (*self.flags, *self.product_flags, *self.tile_flags)

    def flags_of(self, source: Path) -> tuple[str, ...]:
        products = self.product_flags if source.name in PRODUCT_SOURCES else ()
        tiles = self.tile_flags if source.name in TILE_SOURCES else ()
        return (*_COMPILE_FLAGS, *self.flags, *products, *tiles)

    def library(self, folder: Path) -> Path:
        """Return the path of its library.

        The name has a digest of sources and flags, so a library of older sources, with other
        structures, is never loaded.
        """
        return folder / f"libtokend_{self.name}_{source_digest(self.all_flags)}.so"


_V2: Final = frozenset({"cx16", "popcnt", "sse4_2", "ssse3"})
_AVX2: Final = _V2 | {"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_AVX512: Final = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512cd"}
_AVX512_BF16: Final = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_WIDE: Final = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_BF16: Final = ("-mavx512bf16",)
_VNNI: Final = ("-mavx512vnni",)
_AMX: Final = (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

X86_VARIANTS: Final = (
    KernelVariant("amx", _WIDE, _AVX512_BF16 | {"amx_tile", "amx_int8", "amx_bf16"}, _VNNI, _AMX),
    KernelVariant("avx512_bf16", _WIDE, _AVX512_BF16, _VNNI, _BF16),
    KernelVariant("avx512_vnni", _WIDE, _AVX512 | {"avx512_vnni"}, _VNNI),
    KernelVariant("avx512", _WIDE, _AVX512),
    KernelVariant("avx2_vnni", ("-march=x86-64-v3",), _AVX2 | {"avx_vnni"}, ("-mavxvnni",)),
    KernelVariant("avx2", ("-march=x86-64-v3",), _AVX2),
    KernelVariant("baseline", ("-march=x86-64-v2",), _V2),
)
"""Best first. Whether the system lets a process use tiles is found out by the kernels
themselves (csrc/common/amx.h): without them this variant does what the next one does."""

OTHER_VARIANTS: Final = (KernelVariant("baseline", (), frozenset()),)
"""Machines that are not x86-64: vectors as wide as the compiler's default target has them."""


def machine_variants() -> tuple[KernelVariant, ...]:
    """Return the variants for this kind of machine, best first."""
    return X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else OTHER_VARIANTS


def usable_variants(
    variants: Iterable[KernelVariant], flags: frozenset[str]
) -> list[KernelVariant]:
    """Return the variants that a CPU with these flags runs, in order."""
    return [variant for variant in variants if variant.cpu_flags <= flags]


def cpu_flags() -> frozenset[str]:
    """Return the instruction set flags of the first CPU; empty if the system does not list them."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def source_digest(flags: tuple[str, ...]) -> str:
    """Return eight hex digits over all sources and the flags."""
    digest = hashlib.sha256(" ".join((*_COMPILE_FLAGS, *flags)).encode())
    for path in sorted(SOURCE_DIR.rglob("*.cpp")) + sorted(SOURCE_DIR.rglob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def build_here(output_dir: Path) -> list[Path]:
    """Compile what this machine can run; raises KernelBuildError.

    The baseline only where it is the best: no start compares it with the others.
    """
    usable = usable_variants(machine_variants(), cpu_flags())
    return build(output_dir, [each for each in usable if not each.is_baseline] or usable)


def build(output_dir: Path, variants: Sequence[KernelVariant] | None = None) -> list[Path]:
    """Compile variants into output_dir and return the libraries; None: all of this kind of machine.

    Libraries of the same sources are kept, those of others removed. A variant that the compiler
    does not know is left out; raises KernelBuildError if none is left. Of two processes that build
    at once the second says that it waits, and finds the libraries of the first.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(output_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {output_dir}", file=sys.stderr, flush=True)
            fcntl.flock(folder, fcntl.LOCK_EX)
        return _build_missing(output_dir, machine_variants() if variants is None else variants)
    finally:
        os.close(folder)


def _build_missing(output_dir: Path, variants: Sequence[KernelVariant]) -> list[Path]:
    for stale in set(output_dir.glob("libtokend_*.so")) - {
        variant.library(output_dir) for variant in machine_variants()
    }:
        stale.unlink()
    wanted = [variant.library(output_dir) for variant in variants]
    missing = [variant for variant in variants if not variant.library(output_dir).exists()]
    if missing:
        refusals = _build(missing, output_dir)
        if not any(path.exists() for path in wanted):
            raise KernelBuildError("; ".join(refusals))
    return [path for path in wanted if path.exists()]


def _build(variants: Sequence[KernelVariant], output_dir: Path) -> list[str]:
    """Compile these variants side by side; return what the compiler refused."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise KernelBuildError(
            "no C++ compiler: g++ is not on the PATH. Debian and Ubuntu have it in the package "
            "g++, Fedora and RHEL in gcc-c++, Arch in gcc, openSUSE in gcc-c++"
        )
    refusals: list[str] = []
    objects_dir = output_dir / "objects"
    objects_dir.mkdir(exist_ok=True)
    with _ended_by_signals(), ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = _compile(pool, compiler, variants, objects_dir)
        for variant in variants:
            try:
                parts = [objects[part].result() for part in _parts(variant)]
                pool.submit(_link, compiler, parts, variant.library(output_dir)).result()
            except KernelBuildError as refusal:
                refusals.append(f"{variant.name}: {refusal}")
    if len(refusals) < len(variants):
        shutil.rmtree(objects_dir)
    return refusals


def _parts(variant: KernelVariant) -> list[_Part]:
    return [(source, variant.flags_of(source)) for source in sorted(SOURCE_DIR.rglob("*.cpp"))]


def _compile(
    pool: ThreadPoolExecutor, compiler: str, variants: Sequence[KernelVariant], folder: Path
) -> dict[_Part, Future[Path]]:
    """Compile every source with every set of flags of these variants once, and wait for all.

    Objects of the same sources and flags that a build left in the folder are taken, others removed.
    """
    users = {part: variant.name for variant in variants for part in _parts(variant)}
    targets = {part: folder / _object_name(part) for part in users}
    for stale in set(folder.iterdir()) - set(targets.values()):
        stale.unlink()
    kept = {target for target in targets.values() if target.exists()}
    objects = {
        part: pool.submit(_compile_part, compiler, part, target) for part, target in targets.items()
    }
    _show_progress(
        {
            objects[part]: f"{part[0].stem} ({user})"
            for part, user in users.items()
            if targets[part] not in kept
        },
        len(kept),
    )
    return objects


def _object_name(part: _Part) -> str:
    """Return the name of an object, with a digest of its source, all headers and its flags."""
    source, flags = part
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in (source, *sorted(SOURCE_DIR.rglob("*.h"))):
        digest.update(path.read_bytes())
    return f"{source.stem}_{digest.hexdigest()[:16]}.o"


def _show_progress(names: Mapping[Future[Path], str], num_done: int) -> None:
    """Print a line on stderr for each kernel that is compiled, until all are or the build is ended.

    A kernel is a source with a set of flags; its name has the least variant with these flags.
    num_done: kernels that an earlier build left. On a terminal the lines replace each other.
    """
    started = time.monotonic()
    on_terminal = sys.stderr.isatty()
    total = num_done + len(names)
    for number, future in enumerate(as_completed(names), num_done + 1):
        if _compilers.are_stopped:
            return
        seconds = time.monotonic() - started
        name = "" if future.exception() else f": {names[future]}"
        line = f"kernel {number} of {total}, {seconds:.0f} s{name}"
        print(
            f"\r\033[K{line}" if on_terminal else line,
            end="" if on_terminal and number < total else "\n",
            file=sys.stderr,
            flush=True,
        )


def _compile_part(compiler: str, part: _Part, target: Path) -> Path:
    source, flags = part
    if not target.exists():
        partial = target.with_suffix(".partial")
        _run([compiler, *flags, "-I", str(SOURCE_DIR), "-c", str(source), "-o", str(partial)])
        partial.replace(target)
    return target


def _link(compiler: str, objects: list[Path], target: Path) -> None:
    """Link beside the target and move it there, so that running processes keep their library."""
    partial = target.with_suffix(".partial")
    _run([compiler, "-shared", "-o", str(partial), *map(str, objects)])
    partial.replace(target)


def _run(command: list[str]) -> None:
    with _compilers.lock:
        if _compilers.are_stopped:
            raise KernelBuildError("stopped")
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # g++ does not end the compiler that it starts
        )
        _compilers.running.add(process)
    _, errors = process.communicate()
    _compilers.running.discard(process)
    if process.returncode != 0:
        first = (errors.strip().splitlines() or ["no message"])[0]
        raise KernelBuildError(f"{Path(command[0]).name} failed: {first}")


class _Compilers:
    """Processes of the compiler.

    lock: held while one starts, so that none starts after the stop; not by the main thread, whose
    signal handler waits for it.
    are_stopped: whether the build was interrupted.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: set[subprocess.Popen[str]] = set()
        self.are_stopped = False

    def stop(self) -> None:
        with self.lock:
            self.are_stopped = True
            for process in list(self.running):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)


_compilers: Final = _Compilers()


class BuildInterrupted(KeyboardInterrupt):
    """A signal has ended the build. number: of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End the compilers at a signal, and raise BuildInterrupted at the end of the block.

    The handler itself raises nothing: an exception between any two instructions of this thread
    would leave locked what the threads of the pool wait for. Further signals do nothing. In another
    thread than the main one, signals are left as they are.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not received:
            received.append(number)
            _compilers.stop()

    before = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in _ENDING}
        # nohup has SIGHUP ignored, a shell SIGINT for what it runs in the background
        before = {number: old for number, old in handlers.items() if old is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            _compilers.are_stopped = False
            raise BuildInterrupted(received[0])


_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Build, and return the exit status: 128 and the number of the signal that stopped it."""
    try:
        print(*(build_here if list(arguments) == ["--here"] else build)(SOURCE_DIR), sep="\n")
    except KernelBuildError as reason:
        print(f"kernels not built: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        line = "\n" if sys.stderr.isatty() else ""
        print(f"{line}stopped; make serve goes on from here", file=sys.stderr)
        return 128 + getattr(interrupt, "number", signal.SIGINT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
