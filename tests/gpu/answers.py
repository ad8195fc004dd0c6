"""Outputs of a daemon on the GPU over HTTP: 1B with random weights, one feature at a time."""

import json
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.e2e.daemon import Daemon, eventually
from tests.fakes.tiny_heads import head_config, head_tensors, save_head
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.hardware import Hardware, hardware, rehearsing
from tests.gpu.models import BLOCK
from tests.gpu.report import Report, demand
from tests.gpu.server import checkpoint, demand_answers, load, shown

NUM_TOKENS = 32
TIE = 0.1
"""Of two log-probabilities: what 16 bits may turn round."""
FIRST, SECOND = 5, 6
LONG = 96
FEW = list(range(8))
"""An answer of so few different tokens repeats itself, so there are drafts."""
PATTERN = "[0-9]{4}-[a-f]{4}"


def answers_1b(report: Report) -> None:
    """A daemon with graphs: greedy answers, one feature after the other, a dead worker."""
    gpu = hardware()
    with checkpoint(gpu, "1B") as folder, Daemon(folder, *gpu.daemon_flags) as daemon:
        report.kept("greedy-1b.json").write_text(json.dumps(greedy(daemon, gpu)))
        for check in (log_probabilities, penalties, grammar, worker_killed):
            with report.part(check.__name__):
                report.figure(check.__name__, check(daemon, gpu))


def eager_1b(report: Report) -> None:
    """An eager daemon answers as the one with graphs; choices with 8-bit K and V."""
    gpu = hardware()
    with checkpoint(gpu, "1B") as folder:
        kept = report.kept("greedy-1b.json")
        if kept.exists():
            graphs = json.loads(kept.read_text())
        else:
            with Daemon(folder, *gpu.daemon_flags) as daemon:
                graphs = greedy(daemon, gpu)
        flags = (*gpu.daemon_flags, "--enforce-eager")
        with report.part("an eager daemon"), Daemon(folder, *flags) as daemon:
            compare(report, graphs, greedy(daemon, gpu))
        flags = (*gpu.daemon_flags, "--kv-cache-dtype", gpu.eight_bits)
        with report.part("three choices, 8-bit KV"), Daemon(folder, *flags) as daemon:
            report.figure("three choices, 8-bit KV", three_choices(daemon))


def invariance_1b(report: Report) -> None:
    """With --batch-invariant, answers have the same bits alone, all at once and with drafts."""
    gpu = hardware()
    with checkpoint(gpu, "1B") as folder:
        flags = (folder, *gpu.daemon_flags, *gpu.invariant_flags)
        with Daemon(*flags) as daemon:
            alone = [long_answer(daemon, *each) for each in seeded(gpu)]
            demand_equal(report, "at once", alone, all_at_once(daemon, gpu))
        drafts = json.dumps({"method": "ngram", "num_speculative_tokens": 4})
        with Daemon(*flags, "--speculative-config", drafts) as daemon:
            with report.part("drafts, alone"):
                found = [long_answer(daemon, *each) for each in seeded(gpu)]
                demand_equal(report, "drafts, alone", alone, found)
            with report.part("drafts, at once"):
                demand_equal(report, "drafts, at once", alone, all_at_once(daemon, gpu))
            counts = draft_counts(daemon)
        report.figure("drafts", "{:.0f}, {:.0f} accepted".format(*counts))
        demand_drafts(counts[0])


def demand_drafts(drafted: float) -> None:
    """Demand that tokens were drafted, but in a rehearsal: on its CPU drafts may not pay."""
    demand(drafted > 0 or rehearsing(), "no draft was tried")


def drafted_config(gpu: Hardware) -> dict[str, Any]:
    """The model of the phases of drafts, and of those without: 1B with 16 layers."""
    return gpu.sizes.configs["1B"] | {"num_hidden_layers": 16}


def drafted_checkpoint(report: Report, gpu: Hardware) -> Path:
    """Return a folder with that model, which later phases find again.

    Only its first layer adds something, and it is all that the draft model has. So nearly all
    drafts are accepted: only the order of sums tells the two apart.
    """
    folder = report.kept("drafted-1b")
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, drafted_config(gpu), num_heard=1)
    return folder


def plain_1b(report: Report) -> None:
    """Answers of a daemon without drafts, which the next phases compare theirs with."""
    gpu = hardware()
    with Daemon(str(drafted_checkpoint(report, gpu)), *gpu.daemon_flags) as daemon:
        found = {"greedy": greedy(daemon, gpu), "long": two_tokens(daemon, gpu)}
        report.kept("plain-1b.json").write_text(json.dumps(found))
        report.figure("no drafts", shown(measured_load(daemon, gpu)))


def draft_model(report: Report) -> None:
    """Answers with a draft model are those without; nearly all of its drafts are accepted."""
    gpu = hardware()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), drafted_config(gpu) | {"num_hidden_layers": 1})
        drafted, accepted = with_drafts(report, gpu, "draft_model", folder)
    demand_drafts(drafted)
    if not rehearsing():
        demand(accepted > 0.9 * drafted, "the models draft other tokens")


def draft_head(report: Report) -> None:
    """Answers with a random head of EAGLE-3 are those without; few of its drafts are verified."""
    gpu = hardware()
    with tempfile.TemporaryDirectory() as folder:
        write_head(Path(folder), drafted_config(gpu))
        with_drafts(report, gpu, "eagle3", folder)


def with_drafts(report: Report, gpu: Hardware, method: str, model: str) -> list[float]:
    """Compare answers with and without drafts; return the tokens drafted and accepted."""
    kept = report.kept("plain-1b.json")
    if not kept.exists():
        plain_1b(report)
    plain = json.loads(report.kept("plain-1b.json").read_text())
    given = {"method": method, "model": model, "num_speculative_tokens": 4}
    flags = (*gpu.daemon_flags, "--speculative-config", json.dumps(given))
    with Daemon(str(drafted_checkpoint(report, gpu)), *flags) as daemon:
        compare(report, plain["greedy"], greedy(daemon, gpu), "as without drafts")
        pairs = list(zip(plain["long"], two_tokens(daemon, gpu), strict=True))
        same = sum(one == other for one, other in pairs)
        report.figure("long answers", f"{same} of {len(pairs)} equal those without")
        for check in (penalties, grammar):
            with report.part(check.__name__):
                report.figure(check.__name__, check(daemon, gpu))
        report.figure("load", shown(measured_load(daemon, gpu)))
        counts = draft_counts(daemon)
    report.figure("drafts", "{:.0f}, {:.0f} accepted".format(*counts))
    return counts


def swap(report: Report) -> None:
    """Preempted requests load their KV from host memory, and answer as alone.

    The pool has room for some of the prompts, and not for their answers.
    """
    gpu = hardware()
    prompt, output = gpu.sizes.input, gpu.sizes.output
    count = gpu.sizes.answers
    pool = min(4, count - 1) * -(-prompt // BLOCK) + -(-output // BLOCK) + 1
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": gpu.sizes.swap_bytes},
    }
    flags = (
        *replaced(gpu.daemon_flags, "--num-gpu-blocks-override", str(pool)),
        *("--preemption", gpu.preemption, "--kv-transfer-config", json.dumps(config)),
    )
    draws = np.random.default_rng(1)
    tokens = [draws.integers(0, 90, prompt).tolist() for _ in range(count)]
    with checkpoint(gpu, "1B") as folder, Daemon(folder, *flags) as daemon:
        alone = [complete(daemon, each, logprobs=2, max_tokens=output)[0] for each in tokens]
        # In one request, so that none ends before the last one begins
        together = complete(daemon, tokens, logprobs=2, max_tokens=output, cache_salt="other")
        preempted = daemon.metric("vllm:num_preemptions_total")
        loads = daemon.metric("vllm:kv_offload_load_size_count")
        failed = daemon.metric("tokend:kv_offload_failures_total")
    report.figure("preemptions, loads", f"{preempted:.0f}, {loads:.0f}")
    compare(report, alone, together, "as alone")
    demand(preempted > 0, "no request was preempted")
    demand(loads > 0 or rehearsing(), "nothing was loaded from host memory")
    demand(failed == 0, f"{failed:.0f} copies failed")


def replaced(flags: Sequence[str], name: str, value: str) -> list[str]:
    """Return flags with another value of one of them."""
    found = list(flags)
    if name in found:
        at = found.index(name)
        del found[at : at + 2]
    return [*found, name, value]


def two_tokens(daemon: Daemon, gpu: Hardware) -> list[list[int]]:
    """Complete the prompts one by one with one of two tokens at each place.

    Among all tokens the best of random weights is too unlikely for a draft.
    """
    fields = {"allowed_token_ids": [FIRST, SECOND], "max_tokens": LONG}
    return [complete(daemon, each, **fields)[0]["token_ids"] for each in 2 * prompts(gpu)]


def write_head(folder: Path, config: dict[str, Any]) -> None:
    """Write a random head of EAGLE-3 for a model with this configuration, in bfloat16."""
    size, num_layers = config["hidden_size"], config["num_hidden_layers"]
    changed = {
        name: config.get(name)
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "max_position_embeddings",
            "rope_theta",
            "vocab_size",
        )
    }
    layers = {"eagle_aux_hidden_state_layer_ids": [0, num_layers // 2, num_layers]}
    head = head_config(
        "eagle3",
        **changed,
        head_dim=config.get("head_dim", size // config["num_attention_heads"]),
        draft_vocab_size=min(4096, config["vocab_size"]),
        eagle_config=layers,
    )
    tensors = head_tensors("eagle3", head | {"vocab_size": min(4096, config["vocab_size"])})
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if name not in ("embed_tokens.weight", "t2d")
    }
    save_head(folder, head, tensors)


def measured_load(daemon: Daemon, gpu: Hardware) -> dict[str, Any]:
    """Answer some requests at once, after a few whose drafts the daemon learns from."""
    shape = (gpu.sizes.input, gpu.sizes.output)
    for count in (gpu.sizes.answers, 2 * gpu.sizes.answers):
        run = load(daemon.url, count, "--concurrency", str(gpu.sizes.answers), shape=shape)
        demand_answers(run, count)
    return run


def draft_counts(daemon: Daemon) -> list[float]:
    """Return how many tokens of drafts were verified, and how many of them accepted."""
    names = ("draft", "accepted")
    return [daemon.metric(f"vllm:spec_decode_num_{name}_tokens_total") for name in names]


def seeded(gpu: Hardware) -> list[tuple[list[int], float]]:
    """Prompts with their temperatures: every third is sampled."""
    return [(prompt, float(index % 3 == 2)) for index, prompt in enumerate(prompts(gpu))]


def long_answer(daemon: Daemon, prompt: list[int], temperature: float) -> dict[str, Any]:
    """Complete a prompt; returns the tokens and their log-probabilities."""
    fields = {"max_tokens": LONG, "seed": 3, "logprobs": 1, "allowed_token_ids": FEW}
    (choice,) = complete(daemon, prompt, temperature=temperature, **fields)
    return {name: choice[name] for name in ("token_ids", "logprobs")}


def all_at_once(daemon: Daemon, gpu: Hardware) -> list[dict[str, Any]]:
    """Complete the prompts together."""
    with ThreadPoolExecutor(gpu.sizes.answers) as pool:
        return list(pool.map(lambda each: long_answer(daemon, *each), seeded(gpu)))


def demand_equal(
    report: Report, name: str, alone: list[dict[str, Any]], found: list[dict[str, Any]]
) -> None:
    """Compare tokens and log-probabilities bit by bit."""
    tokens = sum(a["token_ids"] == b["token_ids"] for a, b in zip(alone, found, strict=True))
    bits = sum(a == b for a, b in zip(alone, found, strict=True))
    report.figure(name, f"of {len(alone)} answers {tokens} have equal tokens, {bits} equal bits")
    demand(bits == len(alone), f"{name}: {len(alone) - bits} answers differ from those alone")


def complete(
    daemon: Daemon, prompt: list[int] | list[list[int]], **fields: Any
) -> list[dict[str, Any]]:
    """Complete a prompt, or several at once; returns the choices."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    response = httpx.post(f"{daemon.url}/v1/completions", json=body | fields, timeout=60)
    demand(response.status_code == 200, response.text[:300])
    choices: list[dict[str, Any]] = response.json()["choices"]
    return choices


def prompts(gpu: Hardware) -> list[list[int]]:
    """Prompts with lengths on both sides of a block boundary."""
    draws = np.random.default_rng(0)
    return [draws.integers(0, 90, 9 + 7 * index).tolist() for index in range(gpu.sizes.answers)]


def greedy(daemon: Daemon, gpu: Hardware) -> list[dict[str, Any]]:
    """Complete the prompts one by one, with two log-probabilities per token."""
    return [complete(daemon, each, logprobs=2)[0] for each in prompts(gpu)]


def compare(
    report: Report,
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    name: str = "graphs as eager",
) -> None:
    """Compare outputs, which must be equal up to the first tie of a prompt."""
    equal = ties = 0
    demand(bool(ours) and len(ours) == len(theirs), "one of the daemons gave no answers")
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(one["token_ids"], other["token_ids"], strict=True)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if same is None:
            equal += 1
            continue
        best, second = sorted(one["logprobs"]["top_logprobs"][same].values())[:-3:-1]
        if best - second > TIE:
            report.error(f"prompt {number}, token {same}: they differ by {best - second:.2f}")
        ties += 1
    report.figure(name, f"{equal} of {len(ours)} prompts, others from a tie on")
    # Ties are rare; with many of them the comparison is meaningless.
    demand(ties <= len(ours) // 2, f"{ties} of {len(ours)} prompts have a tie")


def log_probabilities(daemon: Daemon, gpu: Hardware) -> str:
    """Five log-probabilities per token: descending, of a distribution, the greedy token first."""
    worst = 0.0
    for prompt in prompts(gpu)[:3]:
        (choice,) = complete(daemon, prompt, logprobs=5)
        found = choice["logprobs"]
        for token, own, five in zip(
            choice["token_ids"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            values = list(five.values())
            demand(five.get(f"token_id:{token}") == own, f"token {token} is not in {five}")
            demand(own == max(values), f"the best of {five} is not {token}")
            demand(values == sorted(values, reverse=True), f"not falling: {values}")
            worst = max(worst, float(np.exp(values).sum()))
    demand(worst <= 1.001, f"five probabilities add up to {worst:.4f}")
    return f"five add up to {worst:.4f} at most"


def penalties(daemon: Daemon, gpu: Hardware) -> str:
    """A bias makes one token the best, until its frequency penalty outweighs it."""
    fields = {"allowed_token_ids": [FIRST, SECOND], "logit_bias": {str(FIRST): 10}}
    prompt = prompts(gpu)[0]
    (alone,) = complete(daemon, prompt, **fields)
    demand(set(alone["token_ids"]) == {FIRST}, f"without a penalty: {alone['token_ids']}")
    (mixed,) = complete(daemon, prompt, **fields, frequency_penalty=2.0)
    count = mixed["token_ids"].count(SECOND)
    demand(count >= NUM_TOKENS // 4, f"with a penalty: {mixed['token_ids']}")
    return f"{count} of {NUM_TOKENS} tokens are the other one"


def grammar(daemon: Daemon, gpu: Hardware) -> str:
    """Random weights generate text that matches a regular expression."""
    text = ""
    for prompt in prompts(gpu)[:3]:
        fields = {"structured_outputs": {"regex": PATTERN}, "max_tokens": 40, "ignore_eos": False}
        (choice,) = complete(daemon, prompt, **fields)
        text = choice["text"]
        demand(re.fullmatch(PATTERN, text) is not None, f"{text!r} is not of {PATTERN}")
    return text


def worker_killed(daemon: Daemon, gpu: Hardware) -> str:
    """Kill the worker under load: every request completes on the restarted worker."""
    count = 4 * gpu.sizes.answers
    before = daemon.processes()["worker"].pid
    with ThreadPoolExecutor(1) as pool:
        flags = ("--concurrency", str(count // 2))
        running = pool.submit(load, daemon.url, count, *flags, shape=(32, gpu.sizes.output))
        busy = eventually(lambda: daemon.metric("vllm:num_requests_running") > 0, 20.0)
        daemon.processes()["worker"].kill()
        run = running.result()
    demand(busy, "no request was running")
    demand_answers(run, count)
    after = daemon.processes()["worker"].pid
    demand(after != before, "the worker was not killed")
    return f"{count} requests answered"


def three_choices(daemon: Daemon) -> str:
    """Three choices of a prompt differ, and are repeatable."""
    prompt = list(range(1, 28))
    found = []
    for salt in ("one", "two"):
        choices = complete(daemon, prompt, n=3, temperature=1.0, seed=7, cache_salt=salt)
        found.append([each["token_ids"] for each in choices])
        demand(len({tuple(each) for each in found[-1]}) == 3, f"choices are equal: {found[-1]}")
        demand(all(len(each) == NUM_TOKENS for each in found[-1]), "a choice is short")
    demand(found[0] == found[1], "the same request gives other tokens")
    return f"3 choices of {NUM_TOKENS} tokens, the same again"
