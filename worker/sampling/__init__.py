"""From logits to tokens: filters, the keyed draw, log-probabilities."""
