"""A tiny model of our own in place of llama.cpp's story tellers, and an adapter of it.

After one prompt the model says a text that llama.cpp's tests expect without an adapter, and with
the adapter's factor 0.3, 0.7 and 1 another text each: the adapter is trained with these factors, by
PEFT. So the texts show that the factor is applied as PEFT applies it.
"""

import functools
import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tests.e2e.reference import packaged_model
from tests.fakes.adapters import SEVEN
from tests.worker.adapters.test_formats import write_gguf

PROMPT: Final = "Look in thy glass"
TEXTS: Final = {
    0.0: " and see a happy little girl.",
    0.3: " for one special thing.",
    0.7: " and look away from home.",
    1.0: ", my love: the sun's own eye.",
}
"""What follows the prompt, by the factor of the adapter."""
_LOSS: Final = 0.1
"""Of the worst text: every token is more likely than all others together."""
_MOST_STEPS: Final = 1000
_VOCAB_SIZE: Final = 49152
Batch = tuple[torch.Tensor, torch.Tensor]


class StoryModel(NamedTuple):
    """folder: of the model. adapter: folder of PEFT. gguf: the same adapter for llama.cpp."""

    folder: Path
    adapter: Path
    gguf: Path


@functools.cache
def story_model(workspace: Path) -> StoryModel:
    """Train the model and the adapter, some seconds each, and save them below a folder."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    warnings.filterwarnings("ignore", module=r"(peft|transformers)\..*")
    file = Path(packaged_model().folder) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    num_known = len(tokenizer.encode(PROMPT).ids)
    rows = {scale: tokenizer.encode(PROMPT + text).ids for scale, text in TEXTS.items()}
    # The model learns the other texts after other prompts, so that it has their words.
    others = [
        [100 + number] * num_known + row[num_known:]
        for number, (scale, row) in enumerate(rows.items())
        if scale
    ]
    # Only the tokens of the texts have numbers; all others have the logit 0.
    used = sorted({token for row in (*rows.values(), *others) for token in row})
    place = {token: number for number, token in enumerate(used)}
    rows = {scale: [place[token] for token in row] for scale, row in rows.items()}
    others = [[place[token] for token in row] for row in others]

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    model: Any = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=len(used), **settings))
    _train(model, {0.0: _batch([rows[0.0], *others], num_known)})
    whole: Any = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=_VOCAB_SIZE, **settings))
    numbers = dict(model.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        table = torch.zeros(_VOCAB_SIZE, 64)
        table[used] = numbers[name]
        numbers[name] = table
    whole.load_state_dict(numbers)
    folder = workspace / "stories"
    whole.save_pretrained(folder)
    shutil.copy(file, folder)
    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules=SEVEN))
    _train(adapted, {scale: _batch([row], num_known) for scale, row in rows.items() if scale})
    adapter = workspace / "shakespeare"
    adapted.save_pretrained(adapter)
    return StoryModel(folder, adapter, write_gguf(workspace / "shakespeare.gguf", adapter))


def _batch(rows: Sequence[Sequence[int]], num_known: int) -> Batch:
    """Return tokens and labels, int64 [n, longest]; the first tokens of a row are given."""
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    labels = torch.full_like(tokens, -100)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
        labels[place, num_known : len(row)] = torch.tensor(row[num_known:])
    return tokens, labels


def _train(model: Any, batches: dict[float, Batch]) -> None:
    """Train until every batch is known with its factor of the adapter."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one costs more than it brings, beside other programs
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=5e-3)
    layers = [each for each in model.modules() if isinstance(getattr(each, "scaling", None), dict)]
    for _ in range(_MOST_STEPS):
        worst = 0.0
        for scale, (tokens, labels) in batches.items():
            for layer in layers:
                layer.scaling["default"] = scale
            logits = model(tokens).logits[:, :-1]
            rest = torch.full_like(logits[..., :1], math.log(_VOCAB_SIZE - logits.shape[-1]))
            wanted = torch.cat([logits, rest], 2).flatten(0, 1)
            loss = F.cross_entropy(wanted, labels[:, 1:].flatten())
            loss.backward()
            worst = max(worst, loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if worst < _LOSS:
            torch.set_num_threads(num_threads)
            return
    raise AssertionError(f"the texts are not learned: {worst}")
