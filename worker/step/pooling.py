"""From the hidden states of a step to the results of pooled sequences; nothing is sampled.

    hidden [T, H] ─▶ last norm ─▶ PartialPool of each sequence ─▶ PoolingHead ─▶ pooler_outputs

A prompt may come in chunks, so a sequence keeps what it has pooled so far; the last token needs
nothing kept. Start with `PoolingRunner.finish_on_host`. Everything here is float32. Of a GPU's
hidden states those that are pooled come to the host, after the last norm.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from proto.errors import ModelError
from proto.messages.model_runner_output import ModelRunnerOutput, RowPooled
from proto.messages.pooling import Activation, Pooler, PoolerLayer, PoolingParams, PoolingType
from proto.messages.prepared_model import PreparedModel, TensorEntry
from proto.messages.scheduler_output import SchedulerOutput
from worker.batch.step_inputs import StepInputs
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.step.model_runner import ForwardOutput, GrammarMaskSource, ModelRunner

ACTIVATIONS: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "relu": torch.relu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
}


@dataclass(slots=True)
class PartialPool:
    """What a sequence has pooled so far.

    end: tokens that are counted. vectors: the running value of each pooling type, [H].
    tokens: the hidden states themselves, for the task token_embed.
    """

    params: PoolingParams
    num_tokens: int
    end: int = 0
    vectors: dict[PoolingType, torch.Tensor] = field(default_factory=dict)
    tokens: list[torch.Tensor] = field(default_factory=list)

    @property
    def keeps_tokens(self) -> bool:
        return self.params.task == "token_embed"

    def add(self, hidden: torch.Tensor, start: int, types: Sequence[PoolingType]) -> None:
        """Count the hidden states [n, H] of the positions from `start` on.

        A preempted sequence begins again at 0, or at a position that is counted already.
        """
        if start == 0:
            self.end = 0
            self.vectors.clear()
            self.tokens.clear()
        assert start <= self.end, "hidden states of tokens are missing"
        hidden = hidden[self.end - start :]
        if not len(hidden):
            return
        if self.keeps_tokens:
            self.tokens.append(hidden.clone())
        else:
            for kind in types:
                self.vectors[kind] = self._pooled(kind, hidden)
        self.end += len(hidden)

    def _pooled(self, kind: PoolingType, hidden: torch.Tensor) -> torch.Tensor:
        before = self.vectors.get(kind)
        if kind == "cls":
            return hidden[0].clone() if before is None else before
        if kind == "last":
            return hidden[-1].clone()
        if kind == "max":
            highest = hidden.amax(0)
            return highest if before is None else torch.maximum(before, highest)
        if kind == "weighted_mean":
            first = self.end + 1
            hidden = hidden * torch.arange(first, first + len(hidden), dtype=hidden.dtype)[:, None]
        if before is not None:
            hidden = torch.cat([before[None], hidden])
        # NumPy adds row after row, so that the bits do not depend on the chunks of the text.
        return torch.from_numpy(np.add.reduce(hidden.numpy(), axis=0))

    def vector(self, types: Sequence[PoolingType]) -> torch.Tensor:
        """Return the pooled vectors of a complete sequence, joined."""
        count = self.num_tokens
        divisors = {
            "mean": float(count),
            "mean_sqrt_len": count**0.5,
            "weighted_mean": count * (count + 1) / 2,
        }
        return torch.cat([self.vectors[kind] / divisors.get(kind, 1.0) for kind in types])


class PoolingHead:
    """What follows pooling: the layers of a Pooler, then normalisation or activation."""

    def __init__(self, pooler: Pooler, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: float32, by name; see `Pooler.tensors`."""
        self.pooler = pooler
        self._layers = [_layer(layer, tensors) for layer in pooler.layers]

    @classmethod
    def load(cls, pooler: Pooler, prepared: PreparedModel) -> "PoolingHead":
        """Read the weights of the layers; raises ModelError if one is missing."""
        index = read_index(prepared)
        entries, files = entries_by_name(index), TensorFiles(index)
        tensors = {
            name: _read_float32(files, entries[name]) for name in pooler.tensors if name in entries
        }
        for layer in pooler.layers:
            if layer.name and f"{layer.name}.weight" not in tensors:
                raise ModelError(f"tensor {layer.name}.weight of the pooler is missing")
        return cls(pooler, tensors)

    def apply_layers(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layers' result for x [N, V]."""
        for layer in self._layers:
            x = layer(x)
        return x

    def finish(self, x: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """Return the result of a row, or of rows, as its request asks for it."""
        if params.task == "classify":
            activate = params.activate is not False
            return ACTIVATIONS[self.pooler.activation](x) if activate else x
        if params.dimensions:
            x = x[..., : params.dimensions]
        normalize = self.pooler.normalize if params.activate is None else params.activate
        return F.normalize(x, dim=-1) if normalize else x


def _read_float32(files: TensorFiles, entry: TensorEntry) -> torch.Tensor:
    return files.read(entry).to(torch.float32, copy=True)


def _layer(
    layer: PoolerLayer, tensors: Mapping[str, torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    if layer.kind == "normalize":
        return lambda x: F.normalize(x, dim=-1)
    weight, bias = tensors[f"{layer.name}.weight"], tensors.get(f"{layer.name}.bias")
    if layer.kind == "norm":
        return lambda x: F.layer_norm(x, weight.shape, weight, bias, layer.eps)
    activation = ACTIVATIONS[layer.activation]
    return lambda x: activation(F.linear(x, weight, bias))


class PoolingRunner(ModelRunner):
    """A ModelRunner whose steps end with pooling.

    head: the layers after it. Others as there.
    """

    def __init__(self, head: PoolingHead, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self._head = head
        self._partial: dict[int, PartialPool] = {}
        inputs = self._model.spec.inputs
        self._has_token_types = inputs is not None and inputs.token_types > 1
        self._second_starts = np.zeros(0, dtype=np.int64)

    @torch.inference_mode()
    def start_step(self, step: SchedulerOutput) -> ForwardOutput | ModelRunnerOutput:
        for seq_id in step.finished_seq_ids:
            self._partial.pop(seq_id, None)
        for new in step.new_requests:
            assert new.pooling_params is not None, "this model only pools"
            self._partial[new.seq_id] = PartialPool(new.pooling_params, len(new.prompt_token_ids))
        return super().start_step(step)

    def _build_inputs(
        self, step: SchedulerOutput, step_rows: NDArray[np.int64]
    ) -> tuple[StepInputs, list[int], list[int]]:
        built = super()._build_inputs(step, step_rows)
        if self._has_token_types:
            starts = [self._partial[seq_id].params.second_start for seq_id in built[1]]
            self._second_starts = np.array(starts, dtype=np.int64)
        return built

    def _arrays_beside(self, inputs: StepInputs) -> Sequence[NDArray[np.int64]]:
        """Return the type of each token, if not all are 0."""
        starts = self._second_starts
        if not starts.any():
            return ()
        # A single text has no second part: all its token types are 0.
        starts = np.where(starts, starts, np.iinfo(np.int64).max)
        types = inputs.positions >= np.repeat(starts, np.diff(inputs.query_start))
        return (types.astype(np.int64),)

    def _run_model(
        self,
        inputs: StepInputs,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        beside: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        self._attention.plan(inputs.attention)
        (token_types,) = beside or (None,)
        return self._model.forward(token_ids, positions, self._attention, token_types)

    @torch.inference_mode()
    def finish_on_host(
        self, forward: ForwardOutput, get_grammars: GrammarMaskSource
    ) -> tuple[ModelRunnerOutput, list[list[int]]]:
        """Pool the step's hidden states; return the results of complete sequences, and no token."""
        inputs, hidden = forward.inputs, forward.hidden
        nonfinite = self.transfers.nonfinite_sequences(hidden, inputs.query_start)
        results = self._results(forward, nonfinite)
        no_tokens: list[list[int]] = [[] for _ in forward.seq_ids]
        output = ModelRunnerOutput(
            forward.step.epoch,
            forward.step.step,
            [forward.seq_ids[index] for index in forward.step_order],
            no_tokens,
            compute_seconds=time.monotonic() - forward.started,
            failed_seq_ids=[forward.seq_ids[index] for index in np.flatnonzero(nonfinite)],
            pooler_outputs=results,
        )
        return output, no_tokens

    def warm_up(self) -> None:
        self.run_largest(1, 1)

    @torch.inference_mode()
    def run_largest(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step of dummy tokens, all of which are pooled."""
        hidden, _ = self._run_dummy_layers(num_tokens, num_seqs)
        self.transfers.to_host(self._model.final_norm(hidden))

    def _results(self, forward: ForwardOutput, nonfinite: NDArray[np.bool_]) -> list[RowPooled]:
        """Return the results of complete sequences; mark those that are not finite."""
        complete = self._pool_tokens(forward)
        if not complete:
            return []
        pooler = self._head.pooler
        partial = [self._partial[forward.seq_ids[index]] for index in complete]
        vectors = [each for each in partial if not each.keeps_tokens]
        if pooler.logit_tokens:
            ends = forward.inputs.query_start[1:][complete].astype(np.int64)
            (last,) = self.transfers.to_device([ends - 1])
            hidden = forward.hidden.index_select(0, last)
            with self._adapting(forward.inputs.adapters, ends - 1):
                logits = self.transfers.to_host(self._model.float32_logits(hidden))
            scores = logits[:, list(pooler.logit_tokens)]
            pooled = iter(scores[:, :1] - scores[:, 1:] if scores.shape[1] > 1 else scores)
        elif vectors:
            joined = torch.stack([each.vector(pooler.types) for each in vectors])
            pooled = iter(self._head.apply_layers(joined))
        results = []
        for index, each in zip(complete, partial, strict=True):
            if each.keeps_tokens:
                row = self._head.apply_layers(torch.cat(each.tokens))
            else:
                row = next(pooled)
            result = self._head.finish(row, each.params)
            if nonfinite[index] or not bool(result.isfinite().all()):
                nonfinite[index] = True
                continue
            data = result.contiguous().numpy().astype("<f4", copy=False).tobytes()
            results.append(RowPooled(forward.seq_ids[index], data))
        return results

    def _pool_tokens(self, forward: ForwardOutput) -> list[int]:
        """Count the step's hidden states; return the indices of sequences that are complete."""
        inputs, pooler = forward.inputs, self._head.pooler
        starts, ends = inputs.query_start[:-1].tolist(), inputs.query_start[1:].tolist()
        partial = [self._partial[seq_id] for seq_id in forward.seq_ids]
        lengths = inputs.seq_lens.tolist()
        complete = [
            index for index, each in enumerate(partial) if lengths[index] == each.num_tokens
        ]
        if pooler.logit_tokens:
            return complete
        counted = [
            index
            for index, each in enumerate(partial)
            if pooler.needs_all_tokens or each.keeps_tokens
        ]
        if counted:
            hidden = self.transfers.to_host(self._model.final_norm(forward.hidden))
            for index in counted:
                rows = hidden[starts[index] : ends[index]]
                partial[index].add(rows, int(inputs.num_computed[index]), pooler.types)
        if others := sorted(set(complete) - set(counted)):
            (last,) = self.transfers.to_device([np.array([ends[index] - 1 for index in others])])
            hidden = self._model.final_norm(forward.hidden.index_select(0, last))
            hidden = self.transfers.to_host(hidden)
            for row, index in zip(hidden, others, strict=True):
                partial[index].vectors["last"] = row
        return complete
