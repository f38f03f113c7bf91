"""Encodes texts as ``SentenceTransformer.encode`` does. ``batch_size`` has no effect: texts share calls anyway."""

import sys

import numpy as np

from staticllm import StaticEmbeddingPipeline


class Encoder:
    def __init__(self, path, **options):
        self.pipe = StaticEmbeddingPipeline(path, **options)

    def encode(self, sentences, *, prompt_name=None, prompt=None, batch_size=32, show_progress_bar=False, truncate_dim=None,
               convert_to_numpy=True, normalize_embeddings=False, precision="float32"):  # fmt: skip
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        shown = (lambda done, total: print(f"{done} of {total} texts", file=sys.stderr)) if show_progress_bar else None
        found = self.pipe.encode(
            texts,
            prompt=prompt,
            prompt_name=prompt_name,
            output_type=precision,
            dimensions=truncate_dim,
            on_progress=shown,
        )
        if normalize_embeddings and precision == "float32":
            found = found / np.linalg.norm(found, axis=1, keepdims=True)
        if isinstance(sentences, str):
            return found[0]
        return found if convert_to_numpy else list(found)


encoder = Encoder("my_encoder", device="CPU")
print(encoder.encode("one text").shape, encoder.encode(["one", "two"], prompt_name="query", batch_size=8).shape)
encoder.pipe.close()
