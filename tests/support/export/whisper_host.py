"""Computes what transformers' host side of Whisper makes of given arrays: python whisper_host.py MODEL GIVEN.npz TARGET.npz

GIVEN has ``clip.N`` (samples), ``logits`` [rows, vocabulary] with ``generated.N`` (the tokens before each row), and for words
``features.N`` [1, mels, 3000], ``tokens.N`` (what the decoder is fed) and ``frames.N`` (of the recording). TARGET has
``features.MELS.N``, ``processed`` [rows, vocabulary], ``weights.N`` [heads, tokens, 1500] of the alignment heads, and of these
``filtered.N``, their negative mean ``cost.N`` [tokens, 1500] and ``starts.N`` [tokens], the first frame of each token.
"""

import sys

import numpy as np
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter


def numbered(given, name):
    return [key.rpartition(".")[2] for key in given.files if key.startswith(f"{name}.")]


def features_of(samples, num_mels):
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    padding = "max_length" if len(samples) <= 480000 else "longest"
    options = {"sampling_rate": 16000, "return_tensors": "np", "truncation": False, "padding": padding}
    return extractor(samples, **options)["input_features"][0]


def processed(model, given):
    processor = WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=1)
    rows = []
    for number, row in enumerate(given["logits"]):
        tokens = torch.tensor([[50257, *given[f"generated.{number}"].tolist()]])
        rows.append(processor(tokens, torch.from_numpy(row)[None].clone())[0].numpy())
    return np.stack(rows)


def weights_of(model, given, number):
    """Return the weights of the alignment heads [heads, tokens, 1500]."""
    tokens = torch.from_numpy(given[f"tokens.{number}"])[None]
    features = torch.from_numpy(given[f"features.{number}"])
    outputs = model(features, decoder_input_ids=tokens, output_attentions=True)
    heads = model.generation_config.alignment_heads
    return torch.stack([outputs.cross_attentions[layer][0, head] for layer, head in heads])


def path(weights):
    """Return weights as transformers filters them, their negative mean, and the first frame of each of its rows."""
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    filtered = _median_filter((weights - mean) / deviation, 7)
    cost = -filtered.mean(dim=0).numpy()
    rows, frames = _dynamic_time_warping(cost)
    return filtered.numpy(), cost, frames[np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)]


def main() -> None:
    source, given, target = sys.argv[1:]
    model = WhisperForConditionalGeneration.from_pretrained(source, attn_implementation="eager").eval().float()
    found = {}
    with torch.no_grad(), np.load(given) as known:
        for number in numbered(known, "clip"):
            for mels in (80, 128):
                found[f"features.{mels}.{number}"] = features_of(known[f"clip.{number}"], mels)
        found["processed"] = processed(model, known)
        for number in numbered(known, "tokens"):
            weights = weights_of(model, known, number)
            found[f"weights.{number}"] = weights.numpy()
            names = (f"filtered.{number}", f"cost.{number}", f"starts.{number}")
            found.update(zip(names, path(weights), strict=True))
    np.savez(target, **found)


if __name__ == "__main__":
    main()
