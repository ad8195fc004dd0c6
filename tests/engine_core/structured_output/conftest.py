"""The toy vocabulary as a tokenizer folder, and a backend for it."""

from pathlib import Path

import pytest

from engine_core.structured_output.backend import LLGuidanceBackend
from tests.fakes.toy_vocabulary import EOS, SIZE, write_toy_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    write_toy_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def backend(tokenizer_folder: Path) -> LLGuidanceBackend:
    return LLGuidanceBackend(tokenizer_folder / "tokenizer.json", SIZE, (EOS,))
