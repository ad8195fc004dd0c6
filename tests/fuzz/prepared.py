"""Load a prepared model like a worker, up to weights in memory."""

import torch

from proto.prepared_model import PreparedModel
from worker.loader.weights import load_model
from worker.models.registry import spec_of


def load(prepared: PreparedModel) -> str:
    """Load a model; raises ModelError like the worker."""
    spec = spec_of(prepared)
    load_model(prepared, spec, torch.float32, torch.device("cpu"), lambda fraction: None)
    return "loaded"
