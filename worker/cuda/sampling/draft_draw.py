"""The draws of drafts on a GPU."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker.cuda.accelerator import Accelerator
from worker.cuda.sampling.device_kernels import TritonDraw
from worker.cuda.sampling.device_sampler import DeviceDraw
from worker.cuda.transfers import Downloader, QueuedTransfers
from worker.sampling.logit_edits import NEVER
from worker.speculation.draft_sampler import DraftDraws, probabilities_of


class DeviceDraftDraw:
    """A DraftDraw on an accelerator, with the same results; waits for the tokens.

    The counts of penalties are sent with each draw: those on the device (DeviceCounts) are of
    tokens that were sampled.
    """

    def __init__(self, accelerator: Accelerator, draw: TritonDraw) -> None:
        self._transfers = QueuedTransfers(accelerator)
        self._drawing = DeviceDraw(QueuedTransfers(accelerator), draw)
        self._downloader = Downloader(accelerator)

    def __call__(
        self, logits: torch.Tensor, draws: DraftDraws
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        edits = _edit_arrays(draws, logits.shape[1])
        divisors, *sent = self._transfers.to_device([draws.divisors, *edits])
        if any(len(array) for array in edits):
            logits = _edited(logits, *sent)
        logits = logits.float().contiguous()
        token_ids = self._drawing.draw_tokens(logits, draws.params, masks_dropped=True)
        probabilities = probabilities_of(logits / divisors[:, None], token_ids)
        found = self._downloader.start_download([token_ids, probabilities]).arrays()
        return found[0], found[1]


def _edit_arrays(draws: DraftDraws, vocab_size: int) -> list[NDArray[Any]]:
    """Return the logit edits of drafts as arrays, in the order of `_edited`; indices are flat."""
    empty = np.empty(0, dtype=np.int64)
    added, values = [empty], [empty.astype(np.float32)]
    penalised, rules = [empty], [np.empty((0, 4), dtype=np.float32)]
    held, kept = [], [empty]
    for index, token_ids in draws.suppressed:
        added.append(index * vocab_size + token_ids)
        values.append(np.full(len(token_ids), NEVER, dtype=np.float32))
    for index, edits in draws.edits:
        first = index * vocab_size
        forbidden = np.array(edits.bad_words.forbidden, dtype=np.int64)
        added += [first + edits.bias_ids, first + forbidden]
        values += [edits.bias_values, np.full(len(forbidden), NEVER, dtype=np.float32)]
        if edits.penalises:
            ids, counts = edits.counts.ids, edits.counts.counts
            rule = np.empty((len(ids), 4), dtype=np.float32)
            rule[:] = (edits.repetition, edits.frequency, edits.presence, 0.0)
            rule[:, 3] = counts
            penalised.append(first + ids)
            rules.append(rule)
        if edits.allowed is not None:
            held.append(index)
            kept.append(first + edits.allowed)
    return [
        np.concatenate(added),
        np.concatenate(values),
        np.concatenate(penalised),
        np.ascontiguousarray(np.concatenate(rules).T),
        np.array(held, dtype=np.int64),
        np.concatenate(kept),
    ]


def _edited(
    logits: torch.Tensor,
    added: torch.Tensor,
    values: torch.Tensor,
    penalised: torch.Tensor,
    rules: torch.Tensor,
    held: torch.Tensor,
    kept: torch.Tensor,
) -> torch.Tensor:
    """Return edited logits float32 [D, V], in new memory.

    added, values: int64 and float32, what is added where. penalised: int64 [n], logits with
    penalties; rules: float32 [4 n], their repetition, frequency and presence penalties, and counts.
    held: int64, rows in which all logits but those at `kept` are −inf. Penalties are rounded as in
    TritonEdits.edit_rows.
    """
    edited = logits.to(torch.float32, copy=True).contiguous()
    flat = edited.view(-1)
    flat.index_add_(0, added, values)
    repetition, frequency, presence, counts = rules.view(4, -1).unbind(0)
    found = flat.index_select(0, penalised)
    scaled = torch.where(found > 0, found / repetition, found * repetition)
    present = torch.where(counts > 0, presence, torch.zeros_like(presence))
    flat.index_copy_(0, penalised, scaled - frequency * counts - present)
    allowed = flat.index_select(0, kept)
    edited.index_fill_(0, held, float("-inf"))
    flat.index_copy_(0, kept, allowed)
    return edited
