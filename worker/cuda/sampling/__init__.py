"""From logits to tokens on a GPU, without waiting for it."""
