"""The responses of each API, encoded from the output of an engine request."""
