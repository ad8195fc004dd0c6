"""Traces played again: arrivals of a recorded load, the real scheduler, a clock that is not."""
