"""Makes the directory of a tiny Whisper with random weights, which hears windows of one second, and recordings for it."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
from support.models.speech_model import BANDS, COLUMNS, FRAMES, POSITIONS, write_speech_model

from staticllm import demo_model_path

RATE = 16000
LANGUAGES = ("en", "de")
AS_GENAI = {
    "TEMPERATURES": "0", "COMPRESSION_RATIO_THRESHOLD": "none", "LOGPROB_THRESHOLD": "none", "NO_SPEECH_THRESHOLD": "none",
}  # fmt: skip
"""Properties with which the server and the command write what the class writes: to a random model any text is unlikely."""


def write_whisper(folder, seed=0, is_multilingual=True, num_layers=0):
    """Write IRs, tokenizer and configs into a folder, and return it. Its tokenizer is that of the demo model.

    ``num_layers``: those of the encoder, each of which may be a block.
    """
    folder.mkdir(parents=True, exist_ok=True)
    demo = demo_model_path()
    eos = json.loads((demo / "config.json").read_text())["vocab_size"]
    start = eos + 1
    languages = {f"<|{code}|>": start + 1 + index for index, code in enumerate(LANGUAGES)}
    task = start + 1 + len(LANGUAGES)
    no_timestamps = task + 4
    write_speech_model(folder, seed, vocab=no_timestamps + 1 + FRAMES + 1, num_layers=num_layers)
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for ending in (".xml", ".bin"):
            shutil.copyfile(demo / f"{name}{ending}", folder / f"{name}{ending}")
    config = {"max_source_positions": FRAMES, "max_target_positions": POSITIONS, "model_type": "whisper"}
    generation = {
        "decoder_start_token_id": start, "eos_token_id": eos, "pad_token_id": eos, "translate_token_id": task,
        "transcribe_token_id": task + 1, "prev_sot_token_id": task + 2, "no_timestamps_token_id": no_timestamps,
        "is_multilingual": is_multilingual, "max_initial_timestamp_index": 5, "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [eos], "max_length": POSITIONS, "return_timestamps": False,
        "alignment_heads": [[0, 0], [1, 1]],
    }  # fmt: skip
    if is_multilingual:
        generation |= {"lang_to_id": languages, "task_to_id": {"translate": task, "transcribe": task + 1}}
    mel = {
        "feature_size": BANDS, "sampling_rate": RATE, "hop_length": RATE // COLUMNS, "n_fft": 400, "chunk_length": 1,
        "n_samples": RATE, "nb_max_frames": COLUMNS,
    }  # fmt: skip
    for name, values in (("config", config), ("generation_config", generation), ("preprocessor_config", mel)):
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def sound(seconds, seed=0, rate=RATE):
    """Return samples ``[n]`` of tones that change."""
    times = np.arange(int(seconds * rate)) / rate
    steps = np.random.default_rng(seed).integers(200, 2000, int(seconds * 4) + 1)
    return (0.4 * np.sin(2 * np.pi * steps[(times * 4).astype(int)] * times)).astype(np.float32)


def wav(samples, rate=RATE, kind="WAV", subtype=None):
    """Return the bytes of a file with samples ``[n]`` or ``[n, channels]``."""
    import soundfile

    content = io.BytesIO()
    soundfile.write(content, samples, rate, subtype=subtype, format=kind)
    return content.getvalue()
