"""Texts a second of an encoder, and of sentence-transformers.

A model in the shape of MiniLM-L6 with random weights, or that of --model, embeds random texts: by
the daemon with its defaults, by the daemon in float32, and by sentence-transformers on the CPU in
float32, in turn, round by round. The daemon gets all texts in one request of /v1/embeddings, and
its time is that of the client, with the decoding of the answer. sentence-transformers gets them in
a process that has loaded the model. The table has the least cosine of an
embedding of each daemon to that of sentence-transformers.
"""

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from base64 import b64decode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, writable, write
from deploy.bench.servers import OwnedProcess, StartedServer, signals_deferred, tokend
from proto.errors import ConfigError, TokendError
from tests.benchmarks.command import run

Vectors = Any
"""A numpy array of float32, [texts, size]; numpy is imported in functions only."""
_PEER: Final = "sentence-transformers"
_REQUEST_SECONDS: Final = 3600.0
_WARM_UP_TEXTS: Final = 64
_HIDDEN: Final = 384
_LAYERS: Final = 6
_HEADS: Final = 12
_INNER: Final = 1536
_VOCAB: Final = 30_522
_POSITIONS: Final = 512
_SPECIAL_TOKENS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_PLAIN_TOKEN: Final = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
}


class Embedder(Protocol):
    """What is measured."""

    def embed(self, texts: Sequence[str]) -> tuple[float, Vectors]:
        """Return the seconds that the texts took, and their embeddings [texts, size]."""
        ...


@dataclass
class Measurement:
    """The rounds of one embedder. seconds: of each round. cosine: the least, to the peer."""

    seconds: list[float] = field(default_factory=list)
    cosine: float | None = None

    def to_dict(self, num_texts: int, peer: "Measurement | None") -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "texts_per_second_median": num_texts / statistics.median(self.seconds),
            "times_as_fast": None if peer is None else self.times_as_fast(peer),
            "least_cosine": self.cosine,
        }

    def times_as_fast(self, peer: "Measurement") -> float:
        """Return the median over the rounds of how many times as fast as the peer this is."""
        pairs = zip(peer.seconds, self.seconds, strict=True)
        return statistics.median(theirs / ours for theirs, ours in pairs)


def main(words: Sequence[str]) -> None:
    """Measure, print the table, and write the figures where --json says so."""
    options = _parse(words)
    with writable("--json", options.json) as files, ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokend-bench-")))
        folder = options.model
        if folder is None:
            folder = str(scratch / "minilm-l6")
            write_model(Path(folder))
        least, most = options.tokens
        texts = random_texts(options.texts, least, most, options.seed)
        embedders: dict[str, Embedder] = {}
        if options.peer_python:
            embedders[_PEER] = stack.enter_context(_PeerProcess(options, folder, scratch))
        threads = ["--cpu-threads", str(options.threads)]
        for name, flags in (("tokend", []), ("tokend float32", ["--dtype", "float32"])):
            spec = tokend(name, [folder, *threads, *flags, *options.serve_flags])
            embedders[name] = _Daemon(stack.enter_context(StartedServer(spec)).url)
        measured = _measure(embedders, texts, options.rounds)
        peer = measured.get(_PEER)
        Console(width=100).print(_table(measured, len(texts)))
        document = {
            "command": "python -m tests.benchmarks.embeddings",
            "texts": len(texts),
            "tokens": options.tokens,
            "threads": options.threads,
            "batch_size": options.batch_size,
            "embedders": {name: each.to_dict(len(texts), peer) for name, each in measured.items()},
        }
        write(files, json.dumps(document, indent=2) + "\n")


def _measure(
    embedders: dict[str, Embedder], texts: Sequence[str], rounds: int
) -> dict[str, Measurement]:
    for embedder in embedders.values():
        embedder.embed(texts[:_WARM_UP_TEXTS])
    measured = {name: Measurement() for name in embedders}
    expected: Vectors | None = None
    for _ in range(rounds):
        for name, embedder in embedders.items():
            seconds, vectors = embedder.embed(texts)
            measured[name].seconds.append(seconds)
            if name == _PEER:
                expected = _normalised(vectors)
            elif expected is not None:
                least = float((_normalised(vectors) * expected).sum(1).min())
                measured[name].cosine = min(least, measured[name].cosine or 1.0)
            print(f"{name}: {seconds:.2f} s", file=sys.stderr)
    return measured


def _normalised(vectors: Vectors) -> Vectors:
    import numpy as np

    result: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


class _Daemon:
    """A running daemon."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=_REQUEST_SECONDS)

    def embed(self, texts: Sequence[str]) -> tuple[float, Vectors]:
        import numpy as np

        started = time.perf_counter()
        body = {"input": list(texts), "encoding_format": "base64", "truncate_prompt_tokens": -1}
        response = self._client.post("/v1/embeddings", json=body)
        if response.status_code != httpx.codes.OK:
            raise TokendError(f"status {response.status_code}: {response.text[:500]}")
        encoded = [item["embedding"] for item in response.json()["data"]]
        vectors = np.frombuffer(b"".join(map(b64decode, encoded)), "<f4").reshape(len(texts), -1)
        return time.perf_counter() - started, vectors


class _PeerProcess(OwnedProcess):
    """sentence-transformers in a process of its own (sentence_transformers_program.py)."""

    def __init__(self, options: argparse.Namespace, folder: str, scratch: Path) -> None:
        program = Path(__file__).parent / "peers" / "sentence_transformers_program.py"
        words = [options.peer_python, "-P", str(program), folder]
        words += [str(options.threads), str(options.batch_size)]
        self._texts, self._vectors = scratch / "texts.json", scratch / "vectors"
        with signals_deferred():
            environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            super().__init__(process)
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._answer()  # its version, when it has loaded the model

    def embed(self, texts: Sequence[str]) -> tuple[float, Vectors]:
        import numpy as np

        self._texts.write_text(json.dumps(texts), encoding="utf-8")
        line = json.dumps([str(self._texts), str(self._vectors)])
        self._stdin.write(line.encode() + b"\n")
        self._stdin.flush()
        seconds = float(self._answer())
        vectors = np.fromfile(self._vectors, "<f4").reshape(len(texts), -1)
        return seconds, vectors

    def _answer(self) -> Any:
        line = self._stdout.readline()
        if not line:
            raise TokendError(f"{_PEER} ended; its output is above (--no-peer leaves it out)")
        return json.loads(line)


def random_texts(number: int, least: int, most: int, seed: int) -> list[str]:
    """Return texts of `least` to `most` tokens of `write_model`'s tokenizer, evenly distributed."""
    draw = random.Random(seed)
    first = len(_SPECIAL_TOKENS)
    return [
        " ".join(f"w{draw.randrange(first, _VOCAB)}" for _ in range(draw.randint(least, most) - 2))
        for _ in range(number)
    ]


def write_model(folder: Path) -> None:
    """Write a BERT in the shape of MiniLM-L6 with random weights, as sentence-transformers does."""
    (folder / "1_Pooling").mkdir(parents=True)
    vocab = {token: number for number, token in enumerate(_SPECIAL_TOKENS)}
    vocab |= {f"w{number}": number for number in range(len(vocab), _VOCAB)}
    ids = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in vocab}
    template = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}]
    template += [{"Sequence": {"id": "A", "type_id": 0}}]
    template += [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[token], "content": token, "special": True} | _PLAIN_TOKEN
            for token in _SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": template,
            "pair": template,
            "special_tokens": {token: ids[token] for token in ("[CLS]", "[SEP]")},
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }
    modules = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    documents: dict[str, Any] = {
        "config.json": {
            "architectures": ["BertModel"],
            "model_type": "bert",
            "vocab_size": _VOCAB,
            "hidden_size": _HIDDEN,
            "num_hidden_layers": _LAYERS,
            "num_attention_heads": _HEADS,
            "intermediate_size": _INNER,
            "max_position_embeddings": _POSITIONS,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "torch_dtype": "float32",
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "[PAD]",
            "model_max_length": _POSITIONS,
        },
        "sentence_bert_config.json": {"max_seq_length": _POSITIONS, "do_lower_case": False},
        "1_Pooling/config.json": {
            "word_embedding_dimension": _HIDDEN,
            "pooling_mode_mean_tokens": True,
        },
        "modules.json": [
            {
                "idx": number,
                "name": str(number),
                "path": path,
                "type": f"sentence_transformers.models.{kind}",
            }
            for number, (kind, path) in enumerate(modules)
        ],
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    _write_weights(folder / "model.safetensors")


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights of the model, by name."""
    layers = {
        "attention.self.query": (_HIDDEN, _HIDDEN),
        "attention.self.key": (_HIDDEN, _HIDDEN),
        "attention.self.value": (_HIDDEN, _HIDDEN),
        "attention.output.dense": (_HIDDEN, _HIDDEN),
        "attention.output.LayerNorm": (_HIDDEN,),
        "intermediate.dense": (_INNER, _HIDDEN),
        "output.dense": (_HIDDEN, _INNER),
        "output.LayerNorm": (_HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (_VOCAB, _HIDDEN),
        "embeddings.position_embeddings.weight": (_POSITIONS, _HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, _HIDDEN),
    }
    modules: dict[str, tuple[int, ...]] = {
        "embeddings.LayerNorm": (_HIDDEN,),
        "pooler.dense": (_HIDDEN, _HIDDEN),
    }
    modules |= {
        f"encoder.layer.{layer}.{name}": shape
        for layer in range(_LAYERS)
        for name, shape in layers.items()
    }
    for name, shape in modules.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def _write_weights(path: Path) -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts, end = [], 0
    for name, shape in _shapes().items():
        numbers = draw.standard_normal(shape, np.float32)
        if name.endswith("bias"):
            numbers *= 0.1
        elif len(shape) == 1:
            numbers = 1 + numbers * 0.1
        else:
            numbers *= shape[-1] ** -0.5
        part = numbers.astype("<f4").tobytes()
        begin, end = end, end + len(part)
        parts.append(part)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for part in parts:
            file.write(part)


def _table(measured: dict[str, Measurement], num_texts: int) -> Table:
    table = Table(title=f"{num_texts} texts: median of the rounds (minimum to maximum)")
    for column in ("", "seconds", "texts/s", "times as fast", "least cosine"):
        table.add_column(column, justify="right" if column else "left")
    peer = measured.get(_PEER)
    for name, each in measured.items():
        median, low, high = statistics.median(each.seconds), min(each.seconds), max(each.seconds)
        table.add_row(
            name,
            f"{median:.2f} ({low:.2f} to {high:.2f})",
            f"{num_texts / median:.0f}",
            "" if peer is None or each is peer else f"{each.times_as_fast(peer):.2f}",
            "" if each.cosine is None else f"{each.cosine:.6f}",
        )
    return table


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.embeddings", description=__doc__)
    parser.add_argument(
        "--model", metavar="FOLDER", help="an encoder's folder instead of random weights"
    )
    parser.add_argument("--texts", type=at_least_one, default=1024, help="number of texts (1024)")
    parser.add_argument(
        "--tokens",
        type=at_least_one,
        nargs=2,
        default=[16, 256],
        metavar=("LEAST", "MOST"),
        help="tokens of a text, with the two special ones (16 256)",
    )
    parser.add_argument("--rounds", type=at_least_one, default=3, help="rounds (3)")
    parser.add_argument("--seed", type=int, default=0, help="of the texts (0)")
    parser.add_argument(
        "--threads",
        type=at_least_one,
        default=len(os.sched_getaffinity(0)),
        help="threads of each embedder (all cores)",
    )
    parser.add_argument(
        "--batch-size",
        type=at_least_one,
        default=32,
        help="texts of a batch of sentence-transformers (32, its default)",
    )
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        metavar="PYTHON",
        help="an interpreter that has sentence-transformers (this one)",
    )
    parser.add_argument(
        "--no-peer",
        dest="peer_python",
        action="store_const",
        const="",
        help="measure the daemon alone",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of tokend serve")
    options = parser.parse_args(words)
    least, most = options.tokens
    if not 3 <= least <= most <= _POSITIONS:
        raise ConfigError(f"--tokens {least} {most}: must rise, and be 3 to {_POSITIONS}")
    return options


if __name__ == "__main__":
    sys.exit(run(main))
