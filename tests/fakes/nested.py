"""Tensors inside nested arguments."""

from collections.abc import Iterator
from typing import Any

import torch


def nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors inside tuples, lists and values of dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from nested_tensors(each)
    elif isinstance(value, dict):
        yield from nested_tensors(list(value.values()))
