"""Computes what transformers' Whisper hears in f32: python whisper_reference.py MODEL CLIPS.npz TARGET.npz

CLIPS has samples at 16 kHz by name. TARGET has, for each name: ``.features`` [1, mels, 3000], ``.encoded`` [1, 1500, width],
``.tokens`` (all that greedy decoding feeds, then the end), ``.prompt`` (the number of those that are given), ``.logits``
[tokens, vocabulary] of all tokens in one call, and ``.text``.
"""

import sys

import numpy as np
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor


def hear(model, processor, samples):
    features = processor(samples, sampling_rate=16000, return_tensors="pt").input_features
    config = model.generation_config
    prompt = [config.decoder_start_token_id, config.no_timestamps_token_id]
    generated = model.generate(features, decoder_input_ids=torch.tensor([prompt]), do_sample=False, num_beams=1)[0]
    tokens = generated.tolist()
    tokens = [*prompt, *tokens] if tokens[: len(prompt)] != prompt else tokens
    if tokens[-1] != config.eos_token_id:
        tokens.append(config.eos_token_id)
    outputs = model(features, decoder_input_ids=torch.tensor([tokens]))
    return {
        "features": features.numpy(), "encoded": outputs.encoder_last_hidden_state.numpy(), "tokens": np.array(tokens),
        "prompt": np.array(len(prompt)), "logits": outputs.logits[0].numpy(),
        "text": np.array(processor.decode(tokens, skip_special_tokens=True)),
    }  # fmt: skip


def main() -> None:
    source, clips, target = sys.argv[1:]
    model, report = WhisperForConditionalGeneration.from_pretrained(source, output_loading_info=True)
    wrong = {key: list(value) for key, value in report.items() if value}
    if wrong:
        sys.exit(f"the weights do not fit: {wrong}")
    processor = WhisperProcessor.from_pretrained(source)
    with torch.no_grad(), np.load(clips) as known:
        found = {
            f"{name}.{field}": value
            for name in known.files
            for field, value in hear(model.eval().float(), processor, known[name]).items()
        }
    np.savez(target, **found)


if __name__ == "__main__":
    main()
