"""From a validated body to the encoded response: engine requests, the stream of their output."""
