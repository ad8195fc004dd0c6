"""The tensor index of a prepared model: which bytes of which file are which tensor.

Knows nothing of types and names; only that ranges lie inside their files.
"""

import os
from collections.abc import Mapping

from proto.codec import MessageDecoder
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import PreparedModel, TensorEntry, TensorIndex

INDEX_FILE = "tensors.msgpack"


def read_index(prepared: PreparedModel) -> TensorIndex:
    """The index in the prepared folder.

    Raises ModelError for an index that is missing, undecodable or names one tensor
    twice, and for a tensor outside its file, which tells of a truncated download.
    """
    path = os.path.join(prepared.folder, INDEX_FILE)
    decoder: MessageDecoder[TensorIndex] = MessageDecoder(TensorIndex)
    try:
        with open(path, "rb") as file:
            index = decoder.decode(file.read())
        sizes = [os.path.getsize(each) for each in index.files]
    except (OSError, ProtocolError) as error:
        raise ModelError(f"{path}: {error}") from None
    for entry in index.tensors:
        if not 0 <= entry.file < len(sizes):
            raise ModelError(f"{path}: tensor {entry.name} is in file {entry.file}, which is none")
        end = entry.offset + entry.num_bytes
        if entry.offset < 0 or entry.num_bytes < 0 or end > sizes[entry.file]:
            raise ModelError(
                f"{index.files[entry.file]}: tensor {entry.name} ends at byte {end} of "
                f"{sizes[entry.file]}: the file is truncated or has changed since it was prepared"
            )
    return index


def entries_by_name(index: TensorIndex) -> Mapping[str, TensorEntry]:
    """Every entry under its name in the file; raises ModelError for a name given twice."""
    entries: dict[str, TensorEntry] = {}
    for entry in index.tensors:
        if entry.name in entries:
            raise ModelError(f"tensor {entry.name} is twice in the model")
        entries[entry.name] = entry
    return entries
