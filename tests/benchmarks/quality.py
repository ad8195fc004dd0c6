"""Measure the quality loss of weight formats and KV cache dtypes.

Starts a daemon with exact arithmetic (float32 on the dequantised weights) and then one for each
setting, sends the same texts to all and compares the log-probabilities of the tokens. Log-
probabilities of a prompt come from its prefill, where a step has many rows: a setting whose
arithmetic depends on the number of rows is measured with small steps as well (--max-num-batched-
tokens). Exit status 1 when a setting's perplexity is out of its bound.
"""

import argparse
import hashlib
import json
import math
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser
from deploy.bench.servers import MeasuredDaemon
from proto.errors import ConfigError, TokendError
from proto.messages.sampling_params import MAX_LOGPROBS
from tests.benchmarks.command import run

# Two settings' log-probabilities of the same tokens, and what lies between them.
#
#     perplexity      exp of the mean negative log-probability of the tokens that are there
#     KL divergence   of the exact distribution to the other one, mean over the tokens. Of each,
#                     only the likeliest tokens are known: those that both name count singly and
#                     all others as one, which can only make the divergence smaller.
#
# Knows nothing of daemons.


@dataclass(frozen=True)
class Prediction:
    """Predicted log-probabilities of one token. top: those of likely ids and of this one."""

    token_id: int
    logprob: float
    top: dict[int, float]


def perplexity(predictions: Sequence[Prediction]) -> float:
    """Return the perplexity of at least one token."""
    return math.exp(-math.fsum(each.logprob for each in predictions) / len(predictions))


def mean_divergence(exact: Sequence[Prediction], other: Sequence[Prediction]) -> float:
    """Return the mean divergence in nats per token, over the same tokens."""
    pairs = zip(exact, other, strict=True)
    return math.fsum(divergence(a, b) for a, b in pairs) / len(exact)


def mean_mass(exact: Sequence[Prediction], other: Sequence[Prediction]) -> float:
    """Return the mean share of the exact probability, 0 to 1, that is compared token by token."""
    pairs = zip(exact, other, strict=True)
    return math.fsum(math.exp(a.top[i]) for a, b in pairs for i in a.top.keys() & b.top.keys()) / (
        len(exact)
    )


def divergence(exact: Prediction, other: Prediction) -> float:
    """Return the divergence in nats from the exact distribution of one token to another one."""
    assert exact.token_id == other.token_id, "the predictions are of different tokens"
    shared = exact.top.keys() & other.top.keys()
    total = math.fsum(
        math.exp(exact.top[i]) * (exact.top[i] - other.top[i]) for i in sorted(shared)
    )
    rest = _rest(exact, shared)
    if rest > 0.0:
        total += rest * math.log(rest / max(_rest(other, shared), math.ulp(1.0)))
    return total


def _rest(prediction: Prediction, shared: set[int]) -> float:
    """Return the probability of all tokens except the shared ones."""
    return max(0.0, 1.0 - math.fsum(math.exp(prediction.top[i]) for i in sorted(shared)))


# The texts whose tokens are predicted: prose and code that every installation of Python has.
#
# Owns what they are. They are the same on each machine with the same Python, and their digest
# stands beside every figure, for those that have another one.


PROSE: Final = ("execmodel", "import", "objects", "attribute-access", "strings")
"""Chapters of Python's language reference, as in help()."""
CODE: Final = ("heapq.py", "textwrap.py", "shelve.py", "fractions.py")
"""Modules of the standard library."""
CHARACTERS_OF_EACH: Final = 20_000
"""Characters of prose, and of code."""
PIECE: Final = 3_000
"""Characters of one prompt, about 700 tokens."""


@dataclass(frozen=True)
class Text:
    """A kind of text, in chunks."""

    kind: str
    pieces: tuple[str, ...]


def default_texts() -> list[Text]:
    """Return prose and code; raise ConfigError if this Python has no library sources."""
    return [_text("prose", _prose()), _text("code", _code())]


def text_of(path: Path) -> Text:
    """Return the text of a file; raise ConfigError if it cannot be read."""
    try:
        return _text(path.name, path.read_text("utf-8"), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path}: {error}", "text") from None


def digest(texts: list[Text]) -> str:
    """Return the SHA-256 of all chunks, in hex."""
    whole = hashlib.sha256()
    for text in texts:
        for piece in text.pieces:
            whole.update(piece.encode() + b"\0")
    return whole.hexdigest()


def _text(kind: str, content: str, limit: int | None = CHARACTERS_OF_EACH) -> Text:
    content = content[:limit]
    starts = range(0, len(content), PIECE)
    return Text(kind, tuple(content[start : start + PIECE] for start in starts))


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in PROSE if name in topics)


def _code() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    try:
        return "\n".join((library / name).read_text("utf-8") for name in CODE)
    except OSError as error:
        raise ConfigError(f"the texts are part of Python's library: {error}") from None


EXACT: Final = ("--dtype", "float32", "--cpu-weights", "f32")
FEWEST_TOKENS: Final = 8_000
_ANSWER_SECONDS: Final = 600.0
ALL: Final = "all"


@dataclass(frozen=True)
class Setting:
    """Flags to compare. bound_percent: maximal difference from the exact perplexity."""

    name: str
    bound_percent: float
    flags: tuple[str, ...]


SETTINGS: Final = (
    Setting("packed", 0.5, ("--cpu-weights", "packed")),
    Setting("bf16", 0.5, ("--cpu-weights", "bf16")),
    Setting("int8", 1.0, ("--cpu-weights", "int8")),
    Setting("int8 KV", 0.5, (*EXACT, "--kv-cache-dtype", "int8")),
    Setting("packed+int8", 1.0, ("--cpu-weights", "packed+int8")),
    Setting("auto", 0.5, ()),
)


@dataclass(frozen=True)
class Row:
    """A setting on one kind of text, or on all texts; a row of the table and the JSON."""

    setting: str
    flags: str
    text: str
    num_tokens: int
    perplexity: float
    exact_perplexity: float
    perplexity_change_percent: float
    kl_nats_per_token: float
    compared_mass: float
    bound_percent: float
    within_bound: bool


def main(words: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the JSON; exit with 1 for a setting out of bounds."""
    options = _parse(words)
    texts = [text_of(Path(name)) for name in options.text] or default_texts()
    settings = [_setting(each) for each in options.setting] or list(SETTINGS)
    exact = _predictions([*options.serve_flags, *EXACT], options.model, texts)
    num_tokens = sum(map(len, exact.values()))
    if num_tokens < FEWEST_TOKENS:
        raise ConfigError(f"{num_tokens} tokens are too few: {FEWEST_TOKENS} are needed", "text")
    rows: list[Row] = []
    for setting in settings:
        found = _predictions([*options.serve_flags, *setting.flags], options.model, texts)
        rows += compare(setting, exact, found)
    if options.json:
        Path(options.json).write_text(document(rows, texts))
    Console(width=120).print(_table(rows, num_tokens))
    if not all(row.within_bound for row in rows):
        sys.exit(1)


def compare(
    setting: Setting, exact: dict[str, list[Prediction]], found: dict[str, list[Prediction]]
) -> list[Row]:
    """Return rows for each kind of text, and for all texts, to which the bound applies."""
    kinds = {**exact, ALL: [each for kind in exact for each in exact[kind]]}
    others = {**found, ALL: [each for kind in exact for each in found[kind]]}
    rows = []
    for kind, right in kinds.items():
        ours, theirs = perplexity(others[kind]), perplexity(right)
        change = 100.0 * (ours / theirs - 1.0)
        rows.append(
            Row(
                setting=setting.name,
                flags=shlex.join(setting.flags),
                text=kind,
                num_tokens=len(right),
                perplexity=ours,
                exact_perplexity=theirs,
                perplexity_change_percent=change,
                kl_nats_per_token=mean_divergence(right, others[kind]),
                compared_mass=mean_mass(right, others[kind]),
                bound_percent=setting.bound_percent,
                within_bound=kind != ALL or abs(change) <= setting.bound_percent,
            )
        )
    return rows


def document(rows: Sequence[Row], texts: list[Text]) -> str:
    """Return the content of --json: the rows, and their texts."""
    what = {"texts_sha256": digest(texts), "rows": [asdict(row) for row in rows]}
    return json.dumps(what, indent=2) + "\n"


def predictions_of(answer: dict[str, Any]) -> list[Prediction]:
    """Return the predictions of all prompt tokens but the first, from `prompt_logprobs`."""
    (choice,) = answer["choices"]
    pairs = zip(choice["prompt_token_ids"], choice["prompt_logprobs"], strict=True)
    found = []
    for token_id, entries in pairs:
        if entries is not None:
            top = {int(key): float(entry["logprob"]) for key, entry in entries.items()}
            found.append(Prediction(token_id, top[token_id], top))
    return found


def _predictions(
    flags: Sequence[str], model: str, texts: Sequence[Text]
) -> dict[str, list[Prediction]]:
    """Return predictions by kind of text, from a daemon started for them."""
    with MeasuredDaemon(["--model", model, *flags]) as daemon, _client(daemon.url) as client:
        return {
            text.kind: [each for piece in text.pieces for each in _ask(client, model, piece)]
            for text in texts
        }


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_ANSWER_SECONDS)


def _ask(client: httpx.Client, model: str, piece: str) -> list[Prediction]:
    response = client.post(
        "/v1/completions",
        json={
            "model": Path(model).name,  # a folder is served under its name
            "prompt": piece,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": MAX_LOGPROBS,
            "return_token_ids": True,
        },
    )
    if response.status_code != httpx.codes.OK:
        raise TokendError(f"the daemon answered {response.status_code}: {response.text}")
    return predictions_of(response.json())


def _table(rows: Sequence[Row], num_tokens: int) -> Table:
    table = Table(
        title=f"perplexity of {num_tokens:,} tokens, beside float32 on the dequantised weights"
    )
    for column in ("setting", "text", "tokens", "exact", "perplexity", "change, %", "bound, %"):
        table.add_column(column, justify="left" if column in ("setting", "text") else "right")
    table.add_column("KL, nats a token", justify="right")
    table.add_column("compared", justify="right")
    for row in rows:
        bound = "" if row.text != ALL else f"{row.bound_percent:g}"
        table.add_row(
            row.setting,
            row.text,
            f"{row.num_tokens:,}",
            f"{row.exact_perplexity:.4f}",
            f"{row.perplexity:.4f}",
            f"{row.perplexity_change_percent:+.3f}",
            bound if row.within_bound else f"{bound} exceeded",
            f"{row.kl_nats_per_token:.6f}",
            f"{row.compared_mass:.3f}",
        )
    return table


def _setting(text: str) -> Setting:
    """NAME:PERCENT:FLAGS."""
    name, _, rest = text.partition(":")
    bound, colon, flags = rest.partition(":")
    try:
        percent = float(bound)
    except ValueError:
        percent = -1.0
    if not (name and colon and percent > 0.0):
        raise ConfigError(f"--setting takes NAME:PERCENT:FLAGS, got {text!r}", "setting")
    return Setting(name, percent, tuple(shlex.split(flags)))


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = BenchParser(prog="python -m tests.benchmarks.quality", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="served model")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME:PERCENT:FLAGS",
        help='instead of the usual ones: "packed:0.5:--cpu-weights packed"',
    )
    parser.add_argument(
        "--text", action="append", default=[], metavar="FILE", help="texts of one's own"
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows there, too")
    parser.add_argument("serve_flags", nargs="*", help="after --: flags of all daemons")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(run(main))
