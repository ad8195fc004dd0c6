"""The parts of a layer on a GPU, by FlashInfer and Triton."""
