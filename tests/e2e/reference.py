"""The reference model: transformers on the same weights, and the rule for ties.

Greedy tokens are checked by teacher forcing: one forward over prompt and output
gives, at each position, the token that greedy decoding would take after exactly
these tokens. All positions agreeing is the same as generating the same tokens.
A token that differs counts as a tie if the two logits lie within TIE_GAP.
"""

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from proto.messages.prepared_model import PreparedModel
from tests.fakes.notices import Recorder

DEFAULT_MODEL = "smollm2-135m-instruct"
TIE_GAP = 1e-3
MAX_TIE_RATE = 1 / 500


@dataclass(frozen=True)
class Difference:
    """A token that greedy decoding of the reference would not have chosen."""

    position: int
    token_id: int
    expected: int
    gap: float


class Reference:
    """A causal language model of transformers in float32.

    model: the model, or a function that loads it.
    """

    def __init__(
        self, model: torch.nn.Module | Callable[[], torch.nn.Module], tokenizer: object
    ) -> None:
        self._model = model
        self.tokenizer = tokenizer
        self._checked: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Difference]] = {}

    @classmethod
    @functools.cache
    def load(cls, name: str = DEFAULT_MODEL) -> "Reference":
        """Load the tokenizer once per run, and the model when it is needed."""
        from tokenizers import pre_tokenizers
        from transformers import AutoModelForCausalLM, AutoTokenizer

        source = Path(packaged_model(name).source)
        where = {"gguf_file": source.name}

        def load_model() -> torch.nn.Module:
            folder, dtype = source.parent, torch.float32
            return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where).eval()

        tokenizer = AutoTokenizer.from_pretrained(source.parent, **where)
        if name == DEFAULT_MODEL:
            # Digits stand apart in the model's own tokenizer.json; transformers' reading of the
            # GGUF file leaves that out, which shows where several spaces precede a digit
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]
            )
        return cls(load_model, tokenizer)

    @functools.cached_property
    def model(self) -> torch.nn.Module:
        """The model; transformers takes half a minute to read a GGUF file."""
        return self._model if isinstance(self._model, torch.nn.Module) else self._model()

    @torch.inference_mode()
    def differences(self, prompt: list[int], output: list[int]) -> list[Difference]:
        """Positions of `output` that differ from greedy decoding."""
        key = (tuple(prompt), tuple(output))
        if key not in self._checked:
            tokens = torch.tensor([prompt + output[:-1]])
            # Some models compute all logits nevertheless.
            logits = self.model(tokens, logits_to_keep=len(output)).logits[0, -len(output) :]
            best, expected = logits.max(dim=-1)
            gaps = best - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            self._checked[key] = [
                Difference(i, output[i], int(expected[i]), float(gaps[i]))
                for i in range(len(output))
                if output[i] != int(expected[i])
            ]
        return self._checked[key]

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of every token but the first, given the tokens before it."""
        scores = self.model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        following = torch.tensor(tokens[1:])[:, None]
        found: list[float] = scores[:-1].gather(1, following)[:, 0].tolist()
        return found

    def assert_greedy(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        """Assert that outputs are greedy continuations of their prompts, except for rare ties."""
        ties, tokens = [], 0
        for prompt, output in pairs:
            tokens += len(output)
            for each in self.differences(prompt, output):
                where = f"prompt of {len(prompt)}, {each}"
                assert each.gap < TIE_GAP, f"differs from transformers: {where}"
                ties.append(where)
        print(f"{len(ties)} ties in {tokens} tokens: {ties}")
        assert len(ties) <= max(1, tokens * MAX_TIE_RATE)


def packaged_model(name: str = DEFAULT_MODEL) -> PreparedModel:
    """A packaged model, fetched and prepared if this machine has not served it yet."""
    return prepared_model(name, HostEnvironment.of(os.environ), Recorder())


def save_random(config: type[Any], folder: Path, **sizes: object) -> torch.nn.Module:
    """Save a tiny random model with the packaged model's tokenizer; returns it in float32.

    config: its class in transformers, as Qwen3Config. sizes: in addition to those of all.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(
        config(
            vocab_size=49152,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            eos_token_id=2,
            bos_token_id=1,
            **sizes,
        )
    ).eval()
    model.save_pretrained(folder)
    shutil.copy(Path(packaged_model().folder) / "tokenizer.json", folder)
    return model
