"""Turns a model file or folder into a prepared folder, once.

The work runs in a process of its own (`__main__`), because converting a
tokenizer needs transformers and the supervisor must stay small. `locate` finds
what the user meant, `store` finds or makes the prepared folder, `gguf_file` and
`hf_folder` read the two kinds of source, `folder` writes.
"""
