"""Stands for an encoder in tests of queues: the vector of a text is the sum and the number of its ids."""

import numpy as np

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

POISON = 13
"""A text with this id gets a vector that is not finite, and spoils the other texts of its call."""


class Adder:
    """Stands for an ``EncoderRunner``: the vector of a text is the sum and the number of its ids."""

    shape = EncoderShape("embeddings", 2, (), 64)
    variants = (EncoderVariant(1, 16, 2), EncoderVariant(2, 64, 16))
    max_rows = 64

    def __init__(self):
        self.calls = []
        self.failure = None

    def cost(self, variant):
        return 0.2 + 1e-3 * variant.batch * variant.rows

    def resumed(self, text):
        return None

    def close(self):
        pass

    def run(self, variant, sequences, meanwhile=None):
        texts = [text for sequence in sequences for text in sequence]
        self.calls.append([int(text.ids[0]) for text in texts])
        if self.failure:
            raise self.failure
        found = np.array([[text.ids.sum(), len(text)] for text in texts], np.float32)
        if any(POISON in text.ids for text in texts):
            found[:] = np.nan
        return found


def texts(*ids, length=8):
    return [TokenizedText(np.full(length, i, np.int64)) for i in ids]


def request(*ids, length=8, **options):
    return EmbeddingRequest(texts(*ids, length=length), 2, **options)
