"""What families of encoders share."""

from typing import Final

from worker.layers.activation import Activation
from worker.models.attention import AttentionSpec
from worker.models.config_reader import ConfigReader
from worker.models.rope import Rope

ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
"""Activations by their names in configurations."""


def bidirectional_attention(config: ConfigReader, rope: Rope) -> AttentionSpec:
    """Return multi-head attention without a causal mask, every head with keys of its own.

    Raises ModelError for heads that do not divide the
    hidden size, or of an odd size.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if hidden_size % (2 * num_heads):
        reason = f"heads of an even size must divide hidden_size = {hidden_size}"
        raise config.refusal("num_attention_heads", num_heads, reason)
    head_dim = hidden_size // num_heads
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bidirectional=True,
        rope=rope,
    )
