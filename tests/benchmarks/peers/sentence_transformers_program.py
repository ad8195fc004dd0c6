"""Embeds texts with sentence-transformers on the CPU, for `python -m tests.benchmarks.embeddings`.

Run by the interpreter of an environment that has it; shares no imports with tokend. Arguments: the
model's folder, the number of threads, the batch size. Each line of the input names a JSON file of
texts and a file for their embeddings, float32 one after the other; the answer is a line with the
seconds that they took. The first line of the output is the version, when the model is loaded.
"""

import json
import os
import sys
import time


def main(folder: str, num_threads: int, batch_size: int) -> None:
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="true")
    import torch
    from sentence_transformers import SentenceTransformer, __version__

    torch.set_num_threads(num_threads)
    model = SentenceTransformer(folder, device="cpu")
    print(json.dumps(__version__), flush=True)
    for line in sys.stdin:
        source, target = json.loads(line)
        with open(source, encoding="utf-8") as file:
            texts = json.load(file)
        started = time.perf_counter()
        vectors = model.encode(texts, batch_size=batch_size, show_progress_bar=False)
        seconds = time.perf_counter() - started
        vectors.astype("<f4").tofile(target)
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
