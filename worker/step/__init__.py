"""One step of the engine on one device: its rows, inputs, KV cache and runner.

Start at model_runner.py.
"""
