"""Target: a GGUF file, from its header to tensors in torch.

Reading and preparing it raise only ModelError, also for false lengths; a prepared file is loaded or
refused by name.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import strategies as st

from deploy.models import gguf_file, gguf_header
from deploy.models import prepared_folder as folder
from proto.errors import ModelError
from proto.messages.prepared_model import TensorIndex
from tests.fakes.gguf_headers import small_file
from tests.fakes.tiny_model_files import write_gguf
from tests.fuzz.mutation import Edit, mutate_bytes, mutated, mutated_bytes
from tests.fuzz.prepared import load
from worker.loader.files import TensorFiles


class GgufFiles:
    name = "gguf"

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="tokend-fuzz-")
        self._path = Path(self._place.name, "model.gguf")

    def seeds(self) -> list[bytes]:
        write_gguf(self._path)
        assert self._convert() == "loaded"
        return [small_file(), small_file(tensors=0), self._path.read_bytes()]

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        def mutate_header(data: bytes, edits: Sequence[Edit]) -> bytes:
            return mutate_bytes(data[:3000], edits, known) + data[3000:]

        return mutated(known, mutate_header) | mutated_bytes(known)

    def run(self, data: bytes) -> str:
        self._path.write_bytes(data)
        try:
            header = gguf_header.read(str(self._path))
        except ModelError as error:
            return f"header: {error}"
        files = TensorFiles(TensorIndex("gguf", (str(self._path),), header.tensors))
        outcomes = set()
        for entry in header.tensors:
            try:
                files.read(entry)
                outcomes.add(entry.type)
            except ModelError as error:
                outcomes.add(str(error))
        return f"{self._convert()}, tensors: {sorted(outcomes)}"

    def _convert(self) -> str:
        with tempfile.TemporaryDirectory(dir=self._place.name) as target:
            try:
                contents = gguf_file.read(str(self._path), _ignore_progress)
                prepared = folder.write(
                    contents,
                    name="fuzz",
                    source=str(self._path),
                    target=target,
                    final=target,
                )
                return load(prepared)
            except ModelError as error:
                return f"prepare: {error}"

    def close(self) -> None:
        self._place.cleanup()


def _ignore_progress(what: str) -> None:
    """Ignore progress."""
