"""Computes the vectors of texts as sentence-transformers' models with mean pooling do: python mean_vectors.py MODEL TARGET.npy

The texts are a JSON list on standard input. Each runs alone in f32, so that nothing is padded.
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer


def main() -> None:
    source, target = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    vectors = []
    for text in json.load(sys.stdin):
        with torch.no_grad():
            states = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy()
        vectors.append(states.mean(0) / np.linalg.norm(states.mean(0)))
    np.save(target, np.stack(vectors))


if __name__ == "__main__":
    main()
