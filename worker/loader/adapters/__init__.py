"""Reads adapters (LoRA) of PEFT and llama.cpp and makes them ready for the products of a model.

    files.py     tensors and digest of a folder or file        peft_config.py   adapter_config.json
    tensors.py   what each tensor is, and of which weight      build.py         an Adapter of these

Start at build.py:AdapterLoader. Everything here is a generator that yields after a small piece of
work, so that a thread can read an adapter between the steps of a worker.
"""
