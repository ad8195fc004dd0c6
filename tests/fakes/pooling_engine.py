"""A scheduler with the real runner of a pooling model behind it, without sockets and processes."""

from pathlib import Path

import numpy as np
import torch

from deploy.models import gguf_file, hf_folder, prepared_folder
from engine_core.request import Request
from proto.messages.engine_io import FinishReason
from proto.messages.pooling import PoolingParams, PoolingTask
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import ModelConfig, ServeConfig
from proto.settings.pooler_config import pooler_of
from tests.fakes.adapters import Served
from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.real_engine import BLOCK, NUM_STATE_SLOTS, engine_for
from worker.attention.kv_cache import KVCache
from worker.attention.scratch_pages import SCRATCH_BLOCK, num_scratch_blocks
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.batch.input_batch import InputBatch
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.models.registry import model_spec
from worker.plan.memory_plan import layer_cache
from worker.step.pooling import PoolingHead, PoolingRunner

CHUNK = 16
_AS_THE_FOLDER_SAYS = ModelConfig()


def prepare(source: Path, name: str = "emb") -> PreparedModel:
    """Prepare a folder, or a GGUF file."""
    target = source.with_name(source.name + "-prepared")
    target.mkdir()
    reader = gguf_file if source.suffix == ".gguf" else hf_folder
    contents = reader.read(str(source), lambda what: None)
    return prepared_folder.write(
        contents, name=name, source=str(source), target=str(target), final=str(target)
    )


class PoolingEngine:
    """A scheduler and a runner of a pooling model, in float32."""

    def __init__(
        self,
        prepared: PreparedModel,
        config: ModelConfig = _AS_THE_FOLDER_SAYS,
        served: Served | None = None,
        **settings: object,
    ) -> None:
        """served: the model with its adapters; None to load it without."""
        pooler = pooler_of(config, prepared)
        assert pooler is not None
        self.pooler = pooler
        self.prepared = prepared
        spec = model_spec(prepared, ServeConfig(model=config))
        self.adapters = None if served is None else served.store
        self.decoder: Decoder = (
            load_model(prepared, spec, torch.float32, CPU, lambda part: None)
            if served is None
            else served.decoder
        )
        defaults: dict[str, object] = {"max_num_batched_tokens": CHUNK}
        if spec.is_bidirectional:
            defaults = {
                "max_num_batched_tokens": spec.max_position,
                "enable_chunked_prefill": False,
            }
        self.harness, self.num_blocks = engine_for(self.decoder, 15, **(defaults | settings))
        self.harness.runner = self.new_runner()  # type: ignore[assignment]

    def new_runner(self) -> PoolingRunner:
        spec = self.decoder.spec
        layout, geometry = layer_cache(spec, torch.float32)
        num_blocks, size = self.num_blocks, BLOCK
        if layout.is_scratch:
            num_blocks, size = num_scratch_blocks(spec.max_position, 64), SCRATCH_BLOCK
        cache = KVCache(geometry, layout, num_blocks, size)
        cache.buffer[0 if layout.is_scratch else 1 :] = float("nan")
        has_states = layout.states is not None
        rows = InputBatch(64, spec.max_position, BLOCK, layout.num_groups, has_states=has_states)
        attention = create_backend("auto", cache, spec.attention_shape)
        if layout.states is not None:
            states = StateCache(layout.states, NUM_STATE_SLOTS, BLOCK)
            states.buffer.fill_(float("nan"))
            attention = AttentionWithStates(attention, states)
        head = PoolingHead.load(self.pooler, self.prepared)
        return PoolingRunner(
            head,
            *(self.decoder, attention, create_sampler(), rows, cache, CPU.transfers()),
            adapters=self.adapters,
        )

    def add(
        self, prompt: list[int], task: PoolingTask = "embed", tenant: int = 0, **params: object
    ) -> Request:
        everything = self.pooler.needs_all_tokens or task == "token_embed"
        pooling = PoolingParams(task=task, needs_all_tokens=everything, **params)  # type: ignore[arg-type]
        return self.harness.add_one(prompt, 1, pooling_params=pooling, tenant=tenant)

    def result(self, request: Request) -> torch.Tensor:
        (output,) = self.harness.outputs[request.request_id, 0]
        assert output.finish_reason is FinishReason.STOP
        assert output.new_token_ids == []
        return torch.from_numpy(np.frombuffer(output.pooler_output, "<f4").copy())
