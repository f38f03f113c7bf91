"""Programs that run a stateful model by themselves, on the original and on our engine, and compare the logits."""

from __future__ import annotations

import numpy as np

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
SHORT = {"MAX_PROMPT_LEN": 192, "MIN_RESPONSE_LEN": 64}
TOLERANCE = 2e-6
"""Of the range of the logits."""


class Original:
    """What a program does without us."""

    def __init__(self, compiled):
        self.request = compiled.create_infer_request()
        self.names = {name for port in compiled.inputs for name in port.get_names()}

    def infer(self, inputs):
        self.request.infer({name: array for name, array in inputs.items() if name in self.names})
        return self.request.get_tensor("logits").data.copy()

    def reset(self):
        self.request.reset_state()


class Program:
    """A program like optimum-intel: it keeps the mask, and computes positions and ``beam_idx``."""

    def __init__(self, *requests, seed=0):
        self.requests, self.random = requests, np.random.default_rng(seed)
        self.mask = None

    def inputs(self, batch, columns, padding=(), beams=None):
        """Return inputs of random tokens; row i begins with ``padding[i]`` hidden ones."""
        new = np.ones((batch, columns), np.int64)
        for row, count in enumerate(padding):
            new[row, :count] = 0
        beams = np.arange(batch) if beams is None else np.asarray(beams)
        self.mask = new if self.mask is None else np.concatenate([self.mask[beams], new], 1)
        positions = self.mask.cumsum(1) - 1
        positions[self.mask == 0] = 1
        ids = self.random.integers(8, 1000, (batch, columns))
        return {
            "input_ids": ids, "attention_mask": self.mask, "position_ids": positions[:, -columns:], "beam_idx": beams
        }  # fmt: skip

    def step(self, *args, **kwargs):
        """Run one call on both, and assert that the logits of all visible tokens agree."""
        return self.run(self.inputs(*args, **kwargs))

    def run(self, inputs):
        shown = inputs["attention_mask"][:, -inputs["input_ids"].shape[1] :] == 1
        ours, native = (request.infer(inputs) for request in self.requests)
        assert ours.shape == native.shape
        assert ours.dtype == np.float32
        assert np.abs(ours - native)[shown].max() <= TOLERANCE * np.ptp(native)
        return ours

    def reset(self):
        self.mask = None
        for request in self.requests:
            request.reset()
