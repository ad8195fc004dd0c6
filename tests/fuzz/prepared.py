"""Load a prepared model like a worker, up to weights in memory."""

import torch

from proto.messages.prepared_model import PreparedModel
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import spec_of
from worker.loader.weights import load_model


def load(prepared: PreparedModel) -> str:
    """Load a model; raises ModelError like the worker."""
    spec = spec_of(prepared)
    load_model(prepared, spec, torch.float32, CPU, lambda fraction: None)
    return "loaded"
