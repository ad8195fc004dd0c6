"""Prompts given as embeddings: reading the file, and what is refused."""

import base64

import pytest
import safetensors.torch
import torch

from api_server.text.prompts import prompt_embeds
from proto.errors import InvalidRequestError

ROWS = torch.tensor([[1.0, -2.5, 0.125], [0.0, 3.0, -0.5]])


def packed(**tensors: torch.Tensor) -> str:
    return base64.b64encode(safetensors.torch.save(tensors)).decode()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_any_width_become_float32(dtype: torch.dtype) -> None:
    found = prompt_embeds(packed(any_name=ROWS.to(dtype)), 3)
    assert torch.frombuffer(bytearray(found), dtype=torch.float32).tolist() == ROWS.ravel().tolist()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no base64!", "base64"),
        (base64.b64encode(b"\x80\x04K\x01.").decode(), "safetensors"),
        (base64.b64encode(b"\xff" * 100).decode(), "safetensors"),
        (packed(a=ROWS, b=ROWS.clone()), "2 tensors"),
        (packed(a=ROWS[:, :2].clone()), "[tokens, 3], got [2, 2]"),
        (packed(a=ROWS[:0]), "[tokens, 3], got [0, 3]"),
        (packed(a=ROWS[0].clone()), "[tokens, 3], got [3]"),
        (packed(a=ROWS.double()), "F64"),
        (packed(a=ROWS / 0), "not finite"),
        (packed(a=(ROWS * 1e30).half()), "not finite"),
    ],
)
def test_other_files_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        prompt_embeds(text, 3)
    assert error.value.param == "prompt_embeds"
    assert words in str(error.value)
