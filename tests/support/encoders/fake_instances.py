"""Stands for the instances of a pool: the vector of a text is the sum and the number of its ids."""

import threading
import time

import numpy as np

from staticllm.core import EncoderVariant
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.instances import EncoderInfo, WorkerLostError

COSTS = {EncoderVariant(1, 16, 2): 1e-3, EncoderVariant(4, 64, 32): 8e-3}
POISON, NAN = 13, 17


class Adder:
    """Stands for an instance: a text's vector is the sum and the number of its ids. ``gate`` holds its calls back."""

    device_seconds = None

    def __init__(self, name, can_be_killed=True):
        self.name, self.info = name, EncoderInfo(2, 64, 100, True)
        self.can_be_killed = can_be_killed
        self.calls, self.failure, self.num_recovered, self.is_closed = [], None, 0, False
        self.heals, self.seconds, self.problems = False, 0.0, []  # problems: what the next attempts to recover raise
        self.costs = COSTS
        self.gate, self.began, self.killed = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()

    def embed(self, texts, priority=0):
        assert not self.is_closed
        self.calls.append([int(text.ids[0]) for text in texts])
        self.began.set()
        time.sleep(self.seconds)
        if any(POISON in text.ids for text in texts):
            raise WorkerLostError("poisoned")
        while not (self.gate.wait(0.01) or self.killed.is_set()):
            pass
        if self.killed.is_set():
            self.killed.clear()
            raise WorkerLostError(f"{self.name} was killed")
        if self.failure:
            raise self.failure
        found = np.array([[text.ids.sum(), len(text)] for text in texts], np.float32)
        found[[index for index, text in enumerate(texts) if NAN in text.ids]] = np.nan
        return found

    def interrupt(self):
        if self.can_be_killed:
            self.killed.set()
        return self.can_be_killed

    def recover(self):
        self.num_recovered += 1
        if self.heals:
            self.failure = None
        if self.problems:
            raise self.problems.pop(0)

    def close(self):
        self.is_closed = True


def request(*ids, length=8, **options):
    return EmbeddingRequest([TokenizedText(np.full(length, i, np.int64)) for i in ids], 2, **options)


def sums(*ids, length=8):
    return [[i * length, length] for i in ids]
