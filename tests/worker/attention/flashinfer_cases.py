"""Steps for the FlashInfer backend."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.worker.attention.steps import Case, Step
from worker.attention.backend import AttentionInputs

MIXED = ((0, 7), (20, 1), (33, 5), (15, 1), (16, 1), (0, 1))

DECODES = ((20, 1), (15, 1), (40, 1))

PREFILLS = ((0, 7), (33, 5), (0, 32))


def case_of(sequences: Sequence[tuple[int, int]], **fields: object) -> Case:
    return Case(tuple(sequences), **{"dtype": torch.bfloat16} | fields)


LATENT = {"num_heads": 4, "num_kv_heads": 1, "head_dim": 576, "latent_dim": 512}

CASES = {
    "mixed": case_of(MIXED),
    "decodes": case_of(DECODES),
    "prefills": case_of(PREFILLS),
    "prefills, then decodes": case_of(PREFILLS + DECODES),
    "one token": case_of(((0, 1),)),
    "a page and its neighbours": case_of(((15, 1), (16, 1), (14, 1), (0, 15), (0, 16), (0, 17))),
    "float16": case_of(MIXED, dtype=torch.float16),
    "heads of 128, each its own": case_of(MIXED, num_heads=2, num_kv_heads=2, head_dim=128),
    "heads of 256, a window": case_of(MIXED, num_heads=4, num_kv_heads=1, head_dim=256, window=6),
    "a window of one": case_of(MIXED, window=1),
    "a window longer than all": case_of(MIXED, window=900),
    "pages of one, a window": case_of(MIXED, window=6, block_size=1),
    "a soft cap": case_of(MIXED, soft_cap=2.0),
    "latents": case_of(MIXED, **LATENT),
    "latents, twenty heads": case_of(PREFILLS + DECODES, **LATENT | {"num_heads": 20}),
    "latents, 64 heads": case_of(DECODES, **LATENT | {"num_heads": 64}),
    "latents, a token of each page": case_of(MIXED, **LATENT, block_size=1),
}

SHARING = {
    "decodes": ((40, 1), (33, 1), (64, 1)),
    "prefills": ((40, 3), (33, 20), (64, 7)),
    "mixed": ((50, 9), (40, 1), (33, 1), (64, 2), (32, 1)),
}


def sharing_two_pages(step: Step) -> AttentionInputs:
    """Let all sequences begin with the first one's pages."""
    table = step.inputs.block_table.copy()
    table[:, :2] = table[0, :2]
    return replace(step.inputs, block_table=table)
