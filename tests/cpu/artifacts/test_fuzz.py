"""Tests thousands of damaged files: each is refused in one line or is harmless, and none crashes or hangs the process."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.helpers import a_manifest

from staticllm import StaticLLMError, demo_model_path
from staticllm.compiler_passes.artifacts.manifest import ManifestError, StoredBlob, decode, encode
from staticllm.core import Variant
from staticllm.kvcache.snapshot import load, save
from staticllm.kvcache.stored import StoredSequence
from staticllm.testing import fake_runner

IDENTITY = {"model": "fake", "KV type": "f32"}
NUMBERS = [b"-1", b"0", b"1", b"99999999", b"2147483648", b"18446744073709551615", b"1e9", b"NaN", b"9" * 5000]
WORDS = [b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\0\0\0\0"]
LONGEST = 20.0
"""Seconds that one file may take."""


def damaged(rng, data):
    """Return a changed copy: flipped bits, a piece missing or doubled, a truncated end, or another number or word."""
    while True:
        copy = bytearray(data)
        place = rng.randrange(len(copy))
        match rng.randrange(6):
            case 0:
                for _ in range(rng.choice([1, 1, 4, 32])):
                    copy[rng.randrange(len(copy))] ^= 1 << rng.randrange(8)
            case 1:
                del copy[place:]
            case 2:
                del copy[place : place + rng.randrange(1, 64)]
            case 3:
                copy[place:place] = copy[place : place + rng.randrange(1, 64)]
            case 4:
                numbers = list(re.finditer(rb'(?<=[":, \[])\d+', data))
                if numbers:
                    found = rng.choice(numbers)
                    copy[found.start() : found.end()] = rng.choice(NUMBERS)
            case _:
                copy[place // 4 * 4 : place // 4 * 4 + 4] = rng.choice(WORDS)
        if copy != data:
            return bytes(copy)


def test_damaged_manifests_are_refused(num_cases):
    rng, whole = random.Random(1), encode(a_manifest(blobs={"0.blob": StoredBlob("0" * 64, 3)}))
    decode(whole)
    for _ in range(num_cases(8000)):
        with pytest.raises(ManifestError) as error:
            decode(damaged(rng, whole))
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600


def test_damaged_snapshots_are_refused(num_cases, tmp_path):
    cache = fake_runner([Variant(16, 0), Variant(1, 64)], is_recurrent=True).cache
    slots = tuple(np.ones(shape, dtype) for shape, dtype in cache.layout.kv_shapes(9))
    states = tuple(np.ones(shape, dtype) for shape, dtype in cache.layout.states)
    path, rng = tmp_path / "snapshot", random.Random(2)
    save(StoredSequence(tuple(range(9)), slots, states), path, IDENTITY)
    whole = path.read_bytes()
    load(path, IDENTITY, cache.layout, 64)
    for _ in range(num_cases(6000)):
        path.write_bytes(damaged(rng, whole))
        with pytest.raises(StaticLLMError) as error:
            load(path, IDENTITY, cache.layout, 64)
        assert "\n" not in str(error.value)


# Model and tokenizer files are read in a child: what the checks let through goes into native code.

FILES = {
    "model": ["openvino_model.xml"],
    "tokenizer": [f"openvino_{kind}.{end}" for kind in ("tokenizer", "detokenizer") for end in ("xml", "bin")],
}


def read_all(what, first, last):
    """Damage one file of the demo model after another and use it. Print the number of each before, and its outcome after."""
    folder = Path(tempfile.mkdtemp())
    try:
        for path in demo_model_path().glob("openvino*"):
            (folder / path.name).symlink_to(path) if os.name != "nt" else shutil.copy(path, folder)
        for seed in range(first, last):
            rng = random.Random(seed)
            name = rng.choice(FILES[what])
            (folder / name).unlink()
            (folder / name).write_bytes(damaged(rng, (demo_model_path() / name).read_bytes()))
            print("case", seed, flush=True)
            start = time.monotonic()
            print("became", _used(what, folder), f"{time.monotonic() - start:.2f}", flush=True)
            (folder / name).unlink()
            shutil.copy(demo_model_path() / name, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _used(what, folder):
    from staticllm.devices import get_core
    from staticllm.model_dir import read_model
    from staticllm.model_files.model_at import check_model_dir
    from staticllm.pipelines.launch.arguments import read_generation_config, read_tokenizer
    from staticllm.pipelines.text.chat_prompt import encode_text
    from staticllm.pipelines.text.tokenizer_tools import decoder_of

    try:
        check_model_dir(folder)
        if what == "model":
            read_model(get_core(), folder)
        else:
            tokenizer = read_tokenizer(folder)
            prompt = encode_text(tokenizer, "Tell me a story, hé!")
            read_generation_config(folder, tokenizer)
            decoder_of(tokenizer, joins_tokens=False)(prompt.ids[:8])
    except StaticLLMError as error:
        return "refused" if "\n" not in str(error) else f"two lines: {error!r}"
    except Exception as error:
        return f"raw: {error!r}".replace("\n", " ")
    return "harmless"


@pytest.mark.parametrize(("what", "count"), [("model", 3000), pytest.param("tokenizer", 3000, marks=pytest.mark.slow)])
def test_damaged_model_and_tokenizer_files_never_kill_the_process(what, count, num_cases):
    first, last, found = 0, num_cases(count), Counter()
    command = [sys.executable, str(Path(__file__)), what]
    done = subprocess.run(
        [*command, str(first), str(last)], capture_output=True, text=True, check=False, timeout=3000,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    outcomes = [line for line in lines if line[:1] == ["became"]]
    for line in outcomes:
        found[line[1]] += 1
        assert line[1] in ("refused", "harmless"), line
        assert float(line[2]) < LONGEST, line
    assert done.returncode == 0, (lines[-1:], done.stderr[-500:])
    assert len(outcomes) == last, (lines[-1:], done.stderr[-500:])
    assert found["refused"] > last // 3, json.dumps(found)


if __name__ == "__main__":
    read_all(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
