"""Reads the weights of a model that runs on transformers' code.

The tensors are views of the mapped files; transformers gives them the names of its modules, and
joins those that it keeps joined, such as experts. Then every linear layer is built in the model's
weight format, as for families of tokend's own.
"""

from collections.abc import Callable

import torch

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from worker.layers.adapters import AdapterTargets
from worker.loader.files import TensorFiles, entries_by_name, read_index
from worker.loader.formats import DenseFormat
from worker.models.layer_device import LayerDevice
from worker.models.registry import read_config
from worker.models.transformers_model import (
    ATTENTION_NAME,
    LinearModule,
    TransformersDecoder,
    TransformersSpec,
    model_class,
    transformers_config,
    without_padding_check,
)


def load_transformers(
    prepared: PreparedModel,
    spec: TransformersSpec,
    dtype: torch.dtype,
    device: LayerDevice,
    progress: Callable[[float], None],
    weight_format: DenseFormat,
    adapters: AdapterTargets | None = None,
) -> TransformersDecoder:
    """Load a model with activations of `dtype` onto `device`.

    progress: called with the finished part, 0 to 1.
    adapters: gets the products that adapters can change, which ask it in each step; None: there are
    none.
    Raises ModelError naming the first tensor that is missing, unknown or of another shape.
    """
    config, index = read_config(prepared), read_index(prepared)
    files = TensorFiles(index)
    tensors = {name: files.read(entry) for name, entry in entries_by_name(index).items()}
    try:
        model, report = model_class(config).from_pretrained(
            None,
            config=transformers_config(config),
            state_dict=tensors,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        raise ModelError(
            f"{spec.architecture}: transformers cannot read its weights: {error}"
        ) from error
    for problem, names in (
        ("is missing", report["missing_keys"]),
        ("has another shape than the configuration asks for", report["mismatched_keys"]),
        ("is no part of the model with this configuration", report["unexpected_keys"]),
    ):
        for name in sorted(map(str, names)):
            raise ModelError(f"tensor {name} {problem} ({len(names)} such tensors)")
    progress(0.5)
    without_padding_check(model.eval().to(device.torch_device))
    modules = {name: model.get_submodule(name) for name in spec.linear_shapes}
    # A router in float32 stays what it is.
    linears = [(name, each) for name, each in modules.items() if each.weight.dtype == dtype]
    for number, (name, linear) in enumerate(linears):
        bias = None if linear.bias is None else linear.bias.detach()
        built = weight_format.build(device, linear.weight.detach(), bias)
        if adapters is not None and name in spec.row_linears:
            adapters.add_products([(f"{name}.weight",)])
            built = adapters.adapted(built, (f"{name}.weight",))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, LinearModule(built, linear))
        progress(0.5 + 0.5 * (number + 1) / len(linears))
    weight_format.memory[weight_format.name] += sum(
        parameter.nbytes for parameter in model.parameters()
    )
    weight_format.choose_kernels(dtype, prepared.folder)
    files.release()
    return TransformersDecoder(spec, model)
