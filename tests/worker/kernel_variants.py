"""The kernel variants that this machine can run, and helpers to test all of them."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import pytest

from worker import kernels
from worker.build_kernels import (
    SOURCE_DIR,
    KernelVariant,
    cpu_flags,
    machine_variants,
    usable_variants,
)
from worker.kernels import Kernels

LOADABLE = [
    each
    for each in usable_variants(machine_variants(), cpu_flags())
    if each.library(SOURCE_DIR).exists()
]
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
    return kernels.load_variant(variant)
