"""Makes speech models with random weights, and optimum's exports of them: python random_whisper.py TOKENIZER TARGET

TOKENIZER is a folder with a tokenizer of Whisper. Each model becomes a folder of TARGET, with ``original``, ``stateful`` and
``three_files``: ``tiny`` (multilingual, 80 bands), ``v3`` (128 bands), ``distil`` (fewer layers in its decoder).
"""

import shutil
import sys
from pathlib import Path

import torch
from optimum.exporters.openvino import main_export
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizerFast,
)

SHAPES = {"tiny": (80, 2, 2), "v3": (128, 2, 2), "distil": (80, 3, 1)}
"""Name → bands, and layers of encoder and decoder."""
LANGUAGES = ("en", "zh", "de", "es", "fr")


def config_of(bands, encoder_layers, decoder_layers, start):
    return WhisperConfig(
        vocab_size=51864, num_mel_bins=bands, d_model=64, encoder_layers=encoder_layers, decoder_layers=decoder_layers,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=1500, max_target_positions=448, init_std=0.25, decoder_start_token_id=start,
        eos_token_id=start - 1, bos_token_id=start - 1, pad_token_id=start - 1,
    )  # fmt: skip


def generation_of(tokenizer, start, decoder_layers):
    token = tokenizer.convert_tokens_to_ids
    return GenerationConfig(
        decoder_start_token_id=start, eos_token_id=start - 1, pad_token_id=start - 1, bos_token_id=start - 1,
        is_multilingual=True, lang_to_id={f"<|{code}|>": token(f"<|{code}|>") for code in LANGUAGES},
        task_to_id={task: token(f"<|{task}|>") for task in ("translate", "transcribe")},
        translate_token_id=token("<|translate|>"), transcribe_token_id=token("<|transcribe|>"),
        no_timestamps_token_id=token("<|notimestamps|>"), prev_sot_token_id=token("<|startofprev|>"),
        max_length=448, max_initial_timestamp_index=50, suppress_tokens=[1, 2, 7, 8, 9], begin_suppress_tokens=[220, start - 1],
        alignment_heads=[[layer, head] for layer in range(decoder_layers) for head in (0, 2)], return_timestamps=False,
    )  # fmt: skip


def make(name, tokenizer_path, target):
    torch.manual_seed(len(name))
    tokenizer = WhisperTokenizerFast.from_pretrained(tokenizer_path)
    start = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    bands, encoder_layers, decoder_layers = SHAPES[name]
    model = WhisperForConditionalGeneration(config_of(bands, encoder_layers, decoder_layers, start)).eval()
    model.generation_config = generation_of(tokenizer, start, decoder_layers)
    original = target / name / "original"
    model.save_pretrained(original)
    tokenizer.save_pretrained(original)
    WhisperFeatureExtractor(feature_size=bands).save_pretrained(original)
    for form, is_stateful in (("stateful", True), ("three_files", False)):
        main_export(
            str(original), target / name / form, task="automatic-speech-recognition-with-past", stateful=is_stateful,
            convert_tokenizer=True, library_name="transformers",
        )  # fmt: skip
        for file in ("preprocessor_config.json",):
            shutil.copy(original / file, target / name / form / file)


if __name__ == "__main__":
    for each in SHAPES:
        make(each, sys.argv[1], Path(sys.argv[2]))
