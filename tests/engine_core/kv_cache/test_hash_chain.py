"""Chained SHA-256: hashlib, and the compiled function with and without CPU instructions."""

import ctypes
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_core import block_hashing as hashing
from engine_core import build_native
from engine_core.block_hashing import (
    BlockHasher,
    HashChain,
    HashlibChain,
    NativeChain,
    load_hash_chain,
)
from engine_core.build_native import NativeBuildError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library; compiling it takes less than a second."""
    folder = tmp_path_factory.mktemp("csrc")
    try:
        build_native.build(folder)
    except NativeBuildError as reason:
        pytest.skip(str(reason))
    return folder


@pytest.fixture(params=["hashlib", "portable", "instructions"])
def make_chain(request: pytest.FixtureRequest) -> Callable[[int], HashChain]:
    """Makes a chain for blocks of a size in bytes."""
    if request.param == "hashlib":
        return HashlibChain
    folder = request.getfixturevalue("folder")
    library = ctypes.PyDLL(str(build_native.library(build_native.BLOCK_HASH, folder)))
    with_instructions = request.param == "instructions"
    if with_instructions and not library.tokend_has_sha_instructions():
        pytest.skip("this CPU has no SHA-256 instructions")
    return lambda block_bytes: NativeChain(block_bytes, library, with_instructions)


def expected(parent: bytes, blocks: list[bytes]) -> list[bytes]:
    digests = []
    for block in blocks:
        parent = hashlib.sha256(parent + block).digest()
        digests.append(parent)
    return digests


def test_a_known_message(make_chain):
    """The two-chunk example of FIPS 180-2, appendix B.2; after it seven other blocks."""
    message = b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"
    parent, block = message[:32], message[32:]
    digest = bytes.fromhex("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1")
    first, *_ = make_chain(24).digests(parent, block + bytes(24 * 7))
    assert first == digest


def test_messages_of_every_length_around_the_ends_of_chunks(make_chain):
    """The padding takes 9 bytes of the last chunk, or a chunk more."""
    rng = random.Random(1)
    for block_bytes in range(1, 170):
        parent, blocks = rng.randbytes(32), [rng.randbytes(block_bytes) for _ in range(6)]
        found = make_chain(block_bytes).digests(parent, b"".join(blocks))
        assert list(found) == expected(parent, blocks)


def test_random_runs(make_chain):
    rng = random.Random(2)
    for _ in range(50):
        block_bytes, num_blocks = rng.randint(1, 1_000), rng.randint(0, 40)
        parent = rng.randbytes(32)
        blocks = [rng.randbytes(block_bytes) for _ in range(num_blocks)]
        found = make_chain(block_bytes).digests(parent, b"".join(blocks))
        assert list(found) == expected(parent, blocks)


def test_block_hashes_are_the_same_in_cpp_and_python(folder, monkeypatch):
    """Chains of many blocks, extended in steps of every size."""
    chains = {}
    for make in (HashlibChain, lambda block_bytes: load_hash_chain(block_bytes, folder)):
        monkeypatch.setattr(hashing, "load_hash_chain", make)
        hasher, rng, chain = BlockHasher(16, b"model"), random.Random(3), []
        tokens: list[int] = []
        for _ in range(30):
            tokens += rng.choices(range(2**32), k=rng.randint(0, 200))
            hasher.extend(chain, tokens)
        chains[make] = chain
    one, other = chains.values()
    assert len(one) > 150
    assert one == other


def test_the_built_library_is_loaded(folder):
    assert isinstance(load_hash_chain(64, folder), NativeChain)


def test_hashlib_is_the_fallback_without_a_library(tmp_path):
    assert isinstance(load_hash_chain(64, tmp_path), HashlibChain)


def test_a_library_that_fails_to_load_is_not_used(tmp_path):
    build_native.library(build_native.BLOCK_HASH, tmp_path).write_text("not a library")
    assert isinstance(load_hash_chain(64, tmp_path), HashlibChain)


def test_it_is_built_once_and_older_ones_are_removed(folder):
    stale = folder / "libtokend_block_hash_00000000.so"
    stale.write_text("old")
    built = build_native.build(folder)
    written = [path.stat().st_mtime_ns for path in built]
    assert not stale.exists()
    assert build_native.build(folder) == built
    assert [path.stat().st_mtime_ns for path in built] == written


def test_changed_sources_change_the_name(tmp_path):
    source, names = tmp_path / "block_hash.c", set()
    for content in ("int a;", "int b;"):
        source.write_text(content)
        names.add(build_native.library(source, tmp_path))
    assert len(names) == 2


def test_no_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeBuildError, match="neither cc nor gcc"):
        build_native.build(tmp_path / "out")


def test_a_compiler_that_refuses_says_why(tmp_path, monkeypatch):
    fake = tmp_path / "cc"
    fake.write_text("#!/bin/sh\necho unknown flag >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/bin", "/usr/bin"]))
    with pytest.raises(NativeBuildError, match="cc failed: unknown flag"):
        build_native.build(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
