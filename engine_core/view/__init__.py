"""The live view of an engine: made only while somebody watches. Its messages: `proto/view.py`."""
