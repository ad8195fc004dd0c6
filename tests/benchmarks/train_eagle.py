"""Train a head of EAGLE for the packaged model on its own answers, and measure what is accepted.

    questions ─▶ answers of the model ─▶ its hidden states ─▶ a head ─▶ a folder as published
                                                                       └▶ acceptance by position

The loss is that of the paper (Li et al., 2024): the distance to the target's next hidden state, and
the cross entropy of the tokens that both predict. The head is trained on its own states as well as
on the target's, as EAGLE-3 does ("training-time test"), because later tokens of a draft follow
those. Questions of the measurement are about subjects that no question of the training is about.

Everything runs on a CPU; the time of the training is a setting.
"""

import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from deploy.bench.options import BenchParser, at_least_one
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig
from tests.benchmarks.command import run
from tests.e2e.reference import packaged_model
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.lookahead_runner import LookaheadRunner
from tests.fakes.prepared_models import spec_of
from tests.fakes.tiny_heads import prepare_head
from worker.attention.backend import AttentionInputs
from worker.attention.kv_cache import KVCache
from worker.batch.input_batch import InputBatch
from worker.cpu.formats import choose_format
from worker.cpu.kernels import load_kernels
from worker.loader.files import read_index
from worker.loader.weights import load_model
from worker.models.attention import AttentionSpec
from worker.models.mlp import MlpSpec
from worker.models.rope import DefaultRope
from worker.plan.memory_plan import layer_cache
from worker.speculation.draft_sampler import host_draw
from worker.speculation.drafter import DraftedModel
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import load_head, read_head
from worker.step.model_runner import ModelRunner

BLOCK: Final = 16
STEP_TOKENS: Final = 256
NUM_ROWS: Final = 16
LONGEST: Final = 512
"""Tokens of a question with its answer."""
NUM_BLOCKS: Final = 1 + (NUM_ROWS + 2) * LONGEST // BLOCK
MOST_DRAFTED: Final = 5
NUM_LOSS_TOKENS: Final = 4096
"""The cross entropy counts this many tokens, the most frequent ones of the answers."""
FEATURE_WEIGHT: Final = 1.0
TOKEN_WEIGHT: Final = 0.3
SUBJECTS: Final = (
    *("the sea", "bread", "a bridge", "winter", "a clock", "the moon", "a market", "tea"),
    *("a train", "gardens", "a river", "maps", "music", "stone", "a library", "rain", "glass"),
    *("a mountain", "bicycles", "the human heart", "volcanoes", "chess", "honey bees", "paper"),
    *("electricity", "the Roman Empire", "dolphins", "photosynthesis", "coffee", "gravity"),
    *("the Internet", "painting", "football", "vaccines", "sleep", "deserts", "money", "dogs"),
    *("solar energy", "the Renaissance", "batteries", "elephants", "poetry", "rockets", "salt"),
    *("friendship", "the printing press", "whales", "robots", "cooking", "tides", "castles"),
    *("dinosaurs", "the brain", "water", "bacteria", "jazz", "trees", "law", "cars", "wool"),
    *("telescopes", "islands", "democracy", "spiders", "ice", "theatre", "wheat", "lightning"),
    *("fractions", "the alphabet", "horses", "cities", "recycling", "planets", "shoes", "memory"),
    *("steel", "forests", "ships", "dreams", "cheese", "earthquakes", "schools", "butterflies"),
    *("probability", "the piano", "clouds", "medicine", "a lighthouse", "oil", "dance", "mirrors"),
    *("farming", "computers", "stars", "a hospital", "rice", "fire", "the violin", "penguins"),
    *("copper", "storytelling", "the desert fox", "ceramics", "kindness", "sharks", "snow"),
)
QUESTIONS: Final = (
    *("What is known of {}?", "Explain {} to a child.", "Why do people like {}?"),
    *("Write a short story about {}.", "List five facts about {}.", "What is the history of {}?"),
    *("Give three reasons to learn about {}.", "Write a poem about {}.", "How does {} work?"),
    *("Write an email to a friend about {}.", "What are common mistakes about {}?"),
    *("Compare {} with something similar.", "Summarise what matters about {} in two sentences."),
    *("Write a Python class that models {}.", "What would the world be without {}?"),
)
HELD_OUT: Final = len(SUBJECTS) // 10


@dataclass(frozen=True)
class Answer:
    """A question with its answer. num_prompt: tokens of the question, the first ones."""

    token_ids: list[int]
    num_prompt: int


class Target:
    """The packaged model on the kernels that serve it."""

    def __init__(self, prepared: PreparedModel) -> None:
        form = choose_format(ModelConfig(), torch.bfloat16, read_index(prepared), load_kernels())
        self.prepared = prepared
        self.decoder = load_model(
            prepared, spec_of(prepared), torch.bfloat16, CPU, lambda _: None, form
        )
        self.spec = self.decoder.spec
        self._tokenizer = Tokenizer.from_file(str(Path(prepared.folder, "tokenizer.json")))

    def prompt(self, question: str) -> list[int]:
        text = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
            f"Hugging Face<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def cache(self, num_blocks: int) -> KVCache:
        layout, geometry = layer_cache(self.spec, torch.bfloat16)
        return KVCache(geometry, layout, num_blocks, BLOCK)

    def runner(self, num_blocks: int) -> ModelRunner:
        """Return a runner without a head."""
        cache = self.cache(num_blocks)
        attention = create_backend("auto", cache, self.spec.attention_shape)
        rows = InputBatch(NUM_ROWS, LONGEST, BLOCK)
        return ModelRunner(self.decoder, attention, create_sampler(), rows, cache, CPU.transfers())

    def drafting_runner(self, num_blocks: int, folder: Path) -> LookaheadRunner:
        """Return a runner with the head in a folder, as a worker has it."""
        runner = self.runner(num_blocks)
        prepared = prepare_head(folder)
        spec = read_head("eagle", prepared, self.spec, CPU)
        form = choose_format(ModelConfig(), torch.bfloat16, read_index(prepared), load_kernels())
        head = load_head(prepared, spec, self.decoder, torch.bfloat16, CPU, form)
        layout, geometry = spec.cache(torch.bfloat16)
        cache = KVCache(geometry, layout, num_blocks, BLOCK)
        attention = create_backend("auto", cache, spec.attention_shape)
        runner._drafter = EagleDrafter(
            head,
            attention,
            cache,
            host_draw(create_sampler()),
            DraftedModel(runner.batch, 0, runner.vocab_size, LONGEST, LONGEST),
            CPU.transfers(),
        )
        return LookaheadRunner(runner, most=MOST_DRAFTED)

    def answers(
        self,
        questions: Sequence[str],
        max_tokens: int,
        temperature: float,
        runner: LookaheadRunner | None = None,
    ) -> list[Answer]:
        """Return each question with its answer. runner: None for one without a head."""
        engine = EngineHarness(
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK,
            max_model_len=LONGEST,
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=NUM_ROWS,
            vocab_size=self.spec.vocab_size,
        )
        engine.runner = runner or self.runner(NUM_BLOCKS)  # type: ignore[assignment]
        prompts = [self.prompt(question) for question in questions]
        requests = [
            engine.add_one(
                prompt,
                max_tokens,
                seed=number,
                temperature=temperature,
                eos_token_ids=self.prepared.eos_token_ids,
            )
            for number, prompt in enumerate(prompts)
        ]
        engine.run(max_steps=len(questions) * (max_tokens + 1))
        return [
            Answer(prompt + engine.tokens_of(request), len(prompt))
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def states(self, token_ids: list[int]) -> torch.Tensor:
        """Return the hidden state of each token behind the last norm, bfloat16 [n, H]."""
        num_tokens = len(token_ids)
        num_blocks = -(-num_tokens // BLOCK)
        cache = self.cache(num_blocks)
        attention = create_backend("auto", cache, self.spec.attention_shape)
        positions = np.arange(num_tokens)
        inputs = AttentionInputs(
            np.array([0, num_tokens], dtype=np.int32),
            np.array([num_tokens], dtype=np.int32),
            np.arange(num_blocks, dtype=np.int32)[None],
            positions,
        )
        attention.plan([inputs])
        hidden = self.decoder.forward(
            torch.tensor(token_ids), torch.from_numpy(positions), attention
        )
        return self.decoder.normed(hidden).clone()


def questions_of(subjects: Sequence[str]) -> list[str]:
    """Return every question about these subjects, in a fixed random order."""
    found = [question.format(subject) for subject in subjects for question in QUESTIONS]
    random.Random(5).shuffle(found)
    return found


class TrainedHead(nn.Module):
    """A head of EAGLE in torch, with the parameters' names of published heads."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        spec = target.spec
        layer = spec.layers[0]
        assert isinstance(layer.mixer, AttentionSpec)
        assert isinstance(layer.mixer.rope, DefaultRope)
        assert isinstance(layer.mlp, MlpSpec)
        self.mixer, self.mlp, self.rope = layer.mixer, layer.mlp, layer.mixer.rope
        self.eps = spec.norm_eps
        size, inner, mixer = spec.hidden_size, layer.mlp.intermediate_size, layer.mixer
        shapes = {
            "self_attn.q_proj": (mixer.query_size, size),
            "self_attn.k_proj": (mixer.kv_size, size),
            "self_attn.v_proj": (mixer.kv_size, size),
            "self_attn.o_proj": (size, mixer.query_size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        self.layer = nn.ParameterDict(
            {
                name.replace(".", "/"): nn.Parameter(torch.randn(shape) * 0.02)
                for name, shape in shapes.items()
            }
        )
        self.norm = nn.Parameter(torch.ones(size))
        # It begins with the state that it reads.
        self.fc = nn.Parameter(torch.cat((torch.randn(size, size) * 0.02, torch.eye(size)), dim=1))

    def weight(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self.layer[name.replace(".", "/")]
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters as they are published."""
        layer = {
            f"layers.0.{name.replace('/', '.')}.weight": value for name, value in self.layer.items()
        }
        norm = {"layers.0.post_attention_layernorm.weight": self.norm}
        tensors = {"fc.weight": self.fc, **layer, **norm}
        return {name: value.detach().to(torch.bfloat16) for name, value in tensors.items()}

    def passes(
        self, embedded: torch.Tensor, states: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """Yield the head's states [B, L, H] of position i as the first, second, … of a draft.

        embedded: of the token after each position; states: the target's; both [B, L, H].

            pass 1, position p    reads target states up to p
            pass 2                reads target states up to p - 1, and its own of pass 1 at p - 1
            pass 3                … up to p - 2, its own of pass 1 at p - 2, of pass 2 at p - 1
        """
        mixer, (num_seqs, length, _) = self.mixer, embedded.shape
        groups = mixer.num_heads // mixer.num_kv_heads
        rotation = _rotation(self.rope.theta, mixer.head_dim, length)
        distance = torch.arange(length)[:, None] - torch.arange(length)
        features = states
        earlier: list[tuple[torch.Tensor, torch.Tensor]] = []
        for number in range(count):
            x = F.linear(torch.cat((embedded, features), dim=-1), self.fc)
            query, key, value = (
                F.linear(x, self.weight(f"self_attn.{name}_proj"))
                .view(num_seqs, length, -1, mixer.head_dim)
                .transpose(1, 2)
                for name in "qkv"
            )
            query, key = _rotate(query, rotation), _rotate(key, rotation)
            earlier.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
            # Of the target's states those more than `number` positions back, then one of each pass.
            scores = (query @ earlier[0][0].mT * mixer.scale).float()
            scores = scores.masked_fill(distance < number, float("-inf"))
            own = []
            for back in range(number):
                keys = earlier[number - back][0].roll(back, dims=2)
                own.append((query * keys).sum(-1).float() * mixer.scale)
            joined = torch.cat((scores, torch.stack(own, -1)) if own else (scores,), dim=-1)
            weights = joined.softmax(-1).to(value.dtype)
            attended = weights[..., :length] @ earlier[0][1]
            for back in range(number):
                values = earlier[number - back][1].roll(back, dims=2)
                attended = attended + weights[..., length + back, None] * values
            attended = attended.transpose(1, 2).flatten(2)
            x = x + F.linear(attended, self.weight("self_attn.o_proj"))
            normed = F.rms_norm(x, (x.shape[-1],), self.norm.to(x.dtype), self.eps)
            inner = F.silu(F.linear(normed, self.weight("mlp.gate_proj")))
            inner = inner * F.linear(normed, self.weight("mlp.up_proj"))
            x = x + F.linear(inner, self.weight("mlp.down_proj"))
            yield x
            features = x.roll(1, dims=1)


def _rotation(theta: float, head_dim: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(heads: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate heads [B, n, L, head_dim] as worker/models/rotary.py does."""
    cosines, sines = (part.to(heads.dtype) for part in rotation)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)


class Batches:
    """Batches of answers with the target's states, each answer once an epoch."""

    def __init__(self, target: Target, answers: Sequence[Answer], size: int) -> None:
        self._answers = [answer for answer in answers if len(answer.token_ids) > answer.num_prompt]
        self._states = [target.states(answer.token_ids) for answer in self._answers]
        self._size = size

    def epoch(
        self, generator: random.Random
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield tokens after each position [B, L], states [B, L, H], and which positions count.

        tokens       q q q q a a a      read          q q q a a a .
        positions    0 1 2 3 4 5 6      count             x x x x      their next state is known,
                                                                       and gives an answer's token
        """
        order = list(range(len(self._answers)))
        order.sort(
            key=lambda number: (len(self._answers[number].token_ids) // 32, generator.random())
        )
        groups = [order[at : at + self._size] for at in range(0, len(order), self._size)]
        generator.shuffle(groups)
        for group in groups:
            length = max(len(self._answers[number].token_ids) for number in group)
            tokens = torch.zeros(len(group), length, dtype=torch.int64)
            states = torch.zeros(len(group), length, self._states[0].shape[1], dtype=torch.bfloat16)
            counts = torch.zeros(len(group), length, dtype=torch.bool)
            for row, number in enumerate(group):
                answer, end = self._answers[number], len(self._answers[number].token_ids)
                tokens[row, : end - 1] = torch.tensor(answer.token_ids[1:])
                states[row, :end] = self._states[number]
                counts[row, answer.num_prompt - 2 : end - 2] = True
            yield tokens, states, counts


def frequent_tokens(answers: Sequence[Answer]) -> torch.Tensor:
    """Return the most frequent tokens of the answers, int64."""
    numbers = Counter(token for each in answers for token in each.token_ids[each.num_prompt :])
    return torch.tensor([token for token, _ in numbers.most_common(NUM_LOSS_TOKENS)])


def train(
    target: Target,
    answers: Sequence[Answer],
    minutes: float,
    *,
    batch: int,
    passes: int,
    rate: float,
    console: Console,
) -> TrainedHead:
    """Return a head that was trained for some time, with a rate that falls to zero."""
    torch.manual_seed(0)
    head, generator = TrainedHead(target), random.Random(0)
    batches = Batches(target, answers, batch)
    vocabulary = target.decoder.embed(torch.arange(target.spec.vocab_size))
    head_rows = vocabulary[frequent_tokens(answers)]  # the head is tied
    assert target.spec.tied_embeddings
    optimizer = torch.optim.AdamW(head.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
    started = shown = time.monotonic()
    number = epoch = 0
    done = 0.0
    while done < 1.0:
        epoch += 1
        for tokens, states, counts in batches.epoch(generator):
            done = min(1.0, (time.monotonic() - started) / (60 * minutes))
            warm = min(1.0, (number + 1) / 50)
            optimizer.param_groups[0]["lr"] = rate * warm * 0.5 * (1 + math.cos(math.pi * done))
            losses = _losses(head, vocabulary, head_rows, tokens, states, counts, passes, generator)
            optimizer.zero_grad()
            torch.autograd.backward(torch.stack(losses).sum())
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            number += 1
            if time.monotonic() - shown > 60 or done == 1.0:
                shown = time.monotonic()
                shares = " ".join(f"{loss.item():.3f}" for loss in losses)
                console.print(f"step {number}, epoch {epoch}: loss by pass {shares}")
            if done == 1.0:
                break
    return head


def _losses(
    head: TrainedHead,
    vocabulary: torch.Tensor,
    head_rows: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor,
    counts: torch.Tensor,
    passes: int,
    generator: random.Random,
) -> list[torch.Tensor]:
    """Return the loss of each pass over a batch of `Batches.epoch`."""
    wanted = states[:, 1:][counts[:, :-1]].float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        probabilities = F.linear(wanted, head_rows).float().softmax(-1)
    noise = torch.empty_like(states).uniform_(-0.05, 0.05)
    losses = []
    with torch.autocast("cpu", torch.bfloat16):
        for number, found in enumerate(head.passes(vocabulary[tokens], states + noise, passes)):
            chosen = counts[:, :-1].clone()
            chosen[:, :number] = False
            kept = chosen[counts[:, :-1]]
            own = found[:, :-1][chosen].float()
            regression = F.smooth_l1_loss(own, wanted[kept])
            logits = F.linear(own, head_rows).float()
            entropy = -(probabilities[kept] * logits.log_softmax(-1)).sum(-1).mean()
            losses.append(FEATURE_WEIGHT * regression + TOKEN_WEIGHT * entropy)
    return losses


def save(head: TrainedHead, target: Target, folder: Path) -> None:
    """Write the head as published ones are: config.json and its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    spec, mixer = target.spec, head.mixer
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": head.mlp.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": head.rope.theta,
        "vocab_size": spec.vocab_size,
        "torch_dtype": "bfloat16",
        "bias": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(head.tensors(), folder / "model.safetensors")


def acceptance(
    target: Target, folder: Path, questions: Sequence[str], max_tokens: int, temperature: float
) -> list[tuple[int, int]]:
    """Return for each position of a draft how many reached it, and how many were accepted there.

    After each step the served drafter proposes; a token is accepted if it and all
    before it are those that the answer goes on with. A draft ends with its KV block, so fewer
    reach later positions; so does an answer's end.
    """
    runner = target.drafting_runner(NUM_BLOCKS, folder)
    answers = target.answers(questions, max_tokens, temperature, runner)
    of_start = {tuple(each.token_ids[: each.num_prompt]): each.token_ids for each in answers}
    assert len(of_start) == len(answers), "questions differ"
    num_prompts = {len(start) for start in of_start}
    counts = [[0, 0] for _ in range(MOST_DRAFTED)]
    for _, known, proposed, _ in runner.proposals:
        (answer,) = (
            of_start[tuple(known[:size])] for size in num_prompts if tuple(known[:size]) in of_start
        )
        for position, (token, right) in enumerate(
            zip(proposed, answer[len(known) :], strict=False)
        ):
            counts[position][0] += 1
            if token != right:
                break
            counts[position][1] += 1
    return [(reached, accepted) for reached, accepted in counts]


def report(console: Console, columns: dict[str, list[tuple[int, int]]]) -> None:
    """Print the share of tokens that are accepted if all before them are, and the tokens a step."""
    table = Table("position", *columns, box=None, pad_edge=False)
    for position in range(MOST_DRAFTED):
        shares = (counts[position] for counts in columns.values())
        table.add_row(
            str(position + 1), *(f"{yes / max(1, all_):.3f} of {all_:,}" for all_, yes in shares)
        )
    lengths = []
    for counts in columns.values():
        acceptance_prob, expected = 1.0, 1.0
        for reached, accepted in counts:
            acceptance_prob *= accepted / max(1, reached)
            expected += acceptance_prob
        lengths.append(f"{expected:.2f}")
    table.add_row("tokens a step", *lengths)
    console.print(table)


def main(words: Sequence[str]) -> None:
    """Train, save, measure."""
    parser = BenchParser(prog="train_eagle", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("eagle-head"), help="of the head")
    parser.add_argument("--questions", type=at_least_one, default=1200)
    parser.add_argument("--max-tokens", type=at_least_one, default=128, help="of an answer")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the training")
    parser.add_argument("--batch", type=at_least_one, default=8)
    parser.add_argument("--passes", type=at_least_one, default=3)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--measured", type=at_least_one, default=40, help="questions held out")
    options = parser.parse_args(words)
    console = Console()
    target = Target(packaged_model())
    questions = questions_of(SUBJECTS[:-HELD_OUT])[: options.questions]
    started = time.monotonic()
    half = len(questions) // 2
    answers = [
        *target.answers(questions[:half], options.max_tokens, 0.0),
        *target.answers(questions[half:], options.max_tokens, 0.8),
    ]
    num_tokens = sum(len(answer.token_ids) - answer.num_prompt for answer in answers)
    seconds = time.monotonic() - started
    console.print(f"{num_tokens:,} tokens of {len(answers)} answers in {seconds:.0f} s")
    head = train(
        target,
        answers,
        options.minutes,
        batch=options.batch,
        passes=options.passes,
        rate=options.rate,
        console=console,
    )
    save(head, target, options.folder)
    held_out = questions_of(SUBJECTS[-HELD_OUT:])[: options.measured]
    report(
        console,
        {
            f"temperature {temperature:g}": acceptance(
                target, options.folder, held_out, options.max_tokens, temperature
            )
            for temperature in (0.0, 0.8)
        },
    )


if __name__ == "__main__":
    sys.exit(run(main))
