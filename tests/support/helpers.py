"""Helpers for the tests of several packages."""

import json
import time

import numpy as np

from staticllm import StaticLLMConfig
from staticllm.compiler_passes.artifacts.blob_set import MANIFEST, write_set
from staticllm.compiler_passes.artifacts.fingerprint import Fingerprint, bytes_digest
from staticllm.compiler_passes.artifacts.manifest import Manifest, VariantFile, _canonical, _framed
from staticllm.core import Variant
from staticllm.errors import StaticLLMError
from staticllm.pipelines.loading.decoder_kind import LAYOUT_FIELDS

FINGERPRINT = Fingerprint(
    kind="decoder", ir_digest="1", weights_digest="2", openvino="2026.4", plugin="1", passes="0", device="CPU",
    device_name="a CPU", capabilities="FP32",
    choices={
        "MAX_PROMPT_LEN": "1024", "MIN_RESPONSE_LEN": "128", "PROGRAMS": "shared", "KV_CACHE_PRECISION": "f32",
        "MAX_NUM_SEQS": "16", "KV_SLOTS": "4608", "PREFILL_ROWS": "default", "PREFILL_KV_LENS": "default",
        "GENERATE_KV_LENS": "default", "prefill properties": "", "generate properties": "", "adapters": "none",
    },
)  # fmt: skip
SHAPE = {
    "kv_states": [
        {
            "layer": 0, "role": role, "variable_id": role, "heads": 2, "head_dim": 4, "kv_type": "f32", "is_scale": False,
            "is_cross": False,
        }
        for role in ("key", "value")
    ],
    "masks": [{"window": None, "table": "", "first_seen": []}],
    "vocab_size": 100, "position_rank": 2, "position_copies": 1, "is_packable": True, "has_distances": False,
    "recurrent_states": [], "max_rows": None, "num_adapters": 0, "adapted": [], "adapter_type": "f32",
    "cross_states": [], "cross_window_len": 0, "num_cross_windows": 0, "rope_limits": [], "page_size": 0,
}  # fmt: skip
KEY = b"0123456789abcdef"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""With these properties, models of the zoo generate the tokens of the original on any processor."""
SHORT = {**EXACT, "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32}
PROMPT = list(range(20, 45))


def tokens_of(pipe, prompt=PROMPT, count=12, **options):
    """Return ``count`` tokens after a prompt in token ids, ignoring stop tokens."""
    options = {"max_new_tokens": count, "ignore_eos": True, **options}
    return list(pipe.generate(np.array(prompt), **options).tokens[0])


def a_manifest(**changes):
    config = {name: getattr(StaticLLMConfig(), name) for name in LAYOUT_FIELDS}
    values = {
        "fingerprint": FINGERPRINT, "config": config, "programs": "shared", "kv_type": "f32", "shape": SHAPE,
        "properties": {"prefill": {}, "generate": {}}, "blobs": {}, "few_rows": 1, "is_weightless": False, "is_encrypted": False,
        "variants": (VariantFile(Variant(1, 64), "0.blob"),), "costs": {Variant(1, 64): 0.5},
    }  # fmt: skip
    return Manifest(**{**values, **changes})


def a_set(folder, data=b"program", key=b""):
    folder.parent.mkdir(parents=True, exist_ok=True)
    return write_set(folder, a_manifest(), {"0.blob": data}, key=key)


def forge(folder, change, key=b""):
    """Change the content of a set's manifest and update its digest."""
    content = json.loads((folder / MANIFEST).read_text())["content"]
    change(content)
    (folder / MANIFEST).write_bytes(_framed(content, bytes_digest(_canonical(content), key), bool(key)))


def one_line(error):
    text = str(error.value)
    assert text
    assert "\n" not in text
    assert isinstance(error.value, (StaticLLMError, RuntimeError))
    return text


def assert_nothing_held(pipe):
    """Check that the engine has no request, and that only the cached sequence uses slots."""
    engine = pipe.engine
    slots, requests, kept = engine.run_between_steps(
        lambda: (
            engine.runner.cache.slots.num_used,
            len(engine.core.device.kv_manager.states),
            engine.core.device.kv_manager.prefix.idle_slots,
        )
    )
    assert (slots, requests) == (kept, 0)


def assert_nothing_held_soon(pipe, seconds=30):
    """Check the same within ``seconds``: what was cancelled ends before the next device call."""
    until = time.monotonic() + seconds
    while True:
        try:
            return assert_nothing_held(pipe)
        except AssertionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
