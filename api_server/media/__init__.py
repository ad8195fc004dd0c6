"""Images of requests: loaded within limits, decoded in a process of their own, kept as pixels."""
