"""The kernel variants that this machine can run, and helpers to test all of them.

With TOKEND_TEST_SOFTWARE_TILES=1 the only one is the variant for Intel AMX, built with the tile
unit in software (csrc/software_tiles.h), which tests its kernels on a CPU without tiles, too.
"""

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch

from worker.cpu import kernels
from worker.cpu.build_kernels import (
    SOURCE_DIR,
    X86_VARIANTS,
    KernelVariant,
    build,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.cpu.kernels import Kernels

SOFTWARE_TILES = os.environ.get("TOKEND_TEST_SOFTWARE_TILES") == "1"
TILES_HEADER = Path(__file__).parent / "csrc" / "software_tiles.h"


@cache
def software_build() -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the library of the AMX variant on software tiles."""
    folder = tempfile.TemporaryDirectory(prefix="tokend-software-tiles-")
    build(Path(folder.name), software_variants())
    return folder


def software_variants() -> list[KernelVariant]:
    """Return the AMX variant on software tiles, if this CPU has what it needs besides tiles."""
    amx, without_tiles = X86_VARIANTS[:2]
    flags = (*amx.tile_flags, "-include", str(TILES_HEADER))
    on_software = replace(amx, cpu_flags=without_tiles.cpu_flags, tile_flags=flags)
    return usable_variants([on_software], cpu_flags())


LOADABLE = (
    software_variants()
    if SOFTWARE_TILES
    else [
        each
        for each in usable_variants(machine_variants(), cpu_flags())
        if each.library(SOURCE_DIR).exists()
    ]
)
Test = Callable[..., None]


def with_each(variants: Sequence[Any]) -> Callable[[Test], Test]:
    """Decorator: run the body of a test with every variant as its argument `variant`.

    The variants are one test instead of many. A failure carries a note with the variant's name.
    """

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run_all(**fixtures: Any) -> None:
            if not variants:
                pytest.skip("no compiled kernels on this machine")
            for variant in variants:
                try:
                    test(variant=variant, **fixtures)
                except Exception as error:
                    error.add_note(f"variant: {getattr(variant, 'name', variant)}")
                    raise

        signature = inspect.signature(test)
        others = [each for each in signature.parameters.values() if each.name != "variant"]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return run_all

    return decorate


each_variant = with_each(LOADABLE)


@cache
def load_variant(variant: KernelVariant) -> Kernels:
    """Load the library of a variant once: its file name has a digest of all its sources."""
    folder = Path(software_build().name) if SOFTWARE_TILES else SOURCE_DIR
    return kernels.load_variant(variant, folder)


THREADS = (1, 3, 8, 16)
"""Sizes of teams that must give the same bits. On few cores threads of the large ones take turns,
and must not wait for each other forever."""


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Set the number of threads of the OpenMP regions that this thread opens."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
