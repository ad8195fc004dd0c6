"""Tiny vocabularies with tokens for filling in, as GGUF files, and requests to /infill.

`infill_ids.json` has the prompt of each request, a long one as length and digest, and the tokens
that end a text, by vocabulary, as llama.cpp (build 11434) makes them. To record them again, build
`infill_ids.cpp`, then `python -m tests.api_server.infill_vocabularies PROGRAM`.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import gguf

from proto.byte_level import BYTE_LETTERS

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
MERGES: Final = (
    "d e",
    "de f",
    "r e",
    "re t",
    "u r",
    "< |",
    "Ġ Ġ",
    "i n",
    "f i",
    "i l",
    "e n",
    "Ċ Ċ",
)
QWEN: Final = {
    "<|endoftext|>": CONTROL,
    **dict.fromkeys(("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"), USER_DEFINED),
    **dict.fromkeys(("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), USER_DEFINED),
}
DEEPSEEK: Final = dict.fromkeys(
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), CONTROL
) | dict.fromkeys(("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"), CONTROL)
STARCODER: Final = dict.fromkeys(
    (
        *("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        *("<repo_name>", "<file_sep>"),
    ),
    CONTROL,
)
GEMMA: Final = dict.fromkeys(
    (
        *("<bos>", "<eos>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
        "<|file_separator|>",
    ),
    CONTROL,
)
NAMED: Final = dict.fromkeys(
    ("[end]", "[before]", "[after]", "[here]", "[project]", "[file]"), CONTROL
)
VOCABULARIES: Final[dict[str, tuple[dict[str, int], dict[str, Any]]]] = {
    "qwen": (QWEN, {"eos_token_id": "<|endoftext|>", "add_bos_token": False}),
    "deepseek": (
        DEEPSEEK,
        {
            "bos_token_id": "<｜begin▁of▁sentence｜>",
            "eos_token_id": "<｜end▁of▁sentence｜>",
            "add_bos_token": True,
        },
    ),
    "starcoder": (STARCODER, {"eos_token_id": "<|endoftext|>", "add_bos_token": False}),
    "gemma": (
        GEMMA,
        {
            **{"bos_token_id": "<bos>", "eos_token_id": "<eos>", "add_bos_token": True},
            **{"prefix_token_id": "<|fim_prefix|>", "suffix_token_id": "<|fim_suffix|>"},
            "middle_token_id": "<|fim_middle|>",
        },
    ),
    "named": (
        NAMED,
        {
            **{"eos_token_id": "[end]", "add_bos_token": False, "fim_pre_token_id": "[before]"},
            **{"fim_suf_token_id": "[after]", "fim_mid_token_id": "[here]"},
            **{"fim_rep_token_id": "[project]", "fim_sep_token_id": "[file]"},
        },
    ),
}
"""Special tokens with their types, and settings under tokenizer.ggml, ids by their texts."""
_FILES: Final = [
    {"filename": "llama.h", "text": "int n_threads(void);\n"},
    {"text": "# <|file_sep|> <file_sep> is text here\n"},
]
_CODE: Final = "def f(x):\n    return x\n\n\n"
REQUESTS: Final[list[dict[str, Any]]] = [
    {"input_prefix": "def fib(n):\n    ", "input_suffix": "\n    return a\n"},
    {"input_prefix": "", "input_suffix": ""},
    {"input_prefix": "a = [", "input_suffix": "]", "prompt": "1, 2"},
    {"input_prefix": "naïve 你好 ", "input_suffix": " é\u0301\t\n\n\n", "input_extra": _FILES},
    {
        "input_prefix": "x = '<|fim_suffix|><fim_suffix><｜fim▁hole｜>[after]' <|endoftext|>",
        "input_suffix": "<|fim_middle|><fim_middle><｜fim▁end｜>[here]<|endoftext|>",
        "prompt": "y",
    },
    {"input_prefix": _CODE * 200, "input_suffix": _CODE * 100, "input_extra": _FILES},
    {"input_prefix": "x", "input_suffix": "y", "input_extra": [{"text": _CODE * 400}, *_FILES]},
    {"input_prefix": "x", "input_suffix": _CODE * 100, "prompt": "abc " * 4},
]
CONTEXTS: Final = (512, 4096)
RECORDED: Final = Path(__file__).with_name("infill_ids.json")
_LONGEST_LIST: Final = 130


def write(folder: Path, name: str) -> tuple[Path, dict[str, int]]:
    """Write the GGUF file of a vocabulary; return its path and the id of each token."""
    special, settings = VOCABULARIES[name]
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*special, *BYTE_LETTERS.values(), *merged]
    ids = {token: index for index, token in enumerate(tokens)}
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([special.get(token, NORMAL) for token in tokens])
    writer.add_token_merges(list(MERGES))
    for key, value in settings.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", ids[value])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, ids


def requests() -> list[dict[str, Any]]:
    """Return all requests, with llama.cpp's settings of the server."""
    return [
        {**body, "n_ctx": context, "n_batch": min(context // 2, 2048), "n_predict": -1, "spm": spm}
        for context in CONTEXTS
        for spm in (False, True)
        for body in REQUESTS
    ]


def shortened(ids: list[int]) -> list[Any]:
    """Return a prompt as it is recorded."""
    if len(ids) <= _LONGEST_LIST:
        return ids
    return [len(ids), hashlib.sha256(json.dumps(ids).encode()).hexdigest()]


def record(program: str) -> None:
    """Write infill_ids.json with what the program prints."""
    parts = []
    with tempfile.TemporaryDirectory() as place:
        Path(place, "requests.json").write_text(json.dumps(requests()))
        for name in VOCABULARIES:
            path, _ = write(Path(place), name)
            printed = subprocess.run(
                [program, str(path), f"{place}/requests.json"], capture_output=True, check=True
            ).stdout
            found = json.loads(printed)
            lines = ",\n".join(json.dumps(shortened(ids)) for ids in found["prompts"])
            ends = json.dumps(found["ends"])
            parts.append(f'"{name}": {{"ends": {ends}, "prompts": [\n{lines}\n]}}')
    RECORDED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    record(sys.argv[1])
