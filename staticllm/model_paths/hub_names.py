"""The grammar of names on Hugging Face: ``owner/name``, with a revision, a quantization or a file of a GGUF repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".bz2", ".7z", ".rar", ".zst", ".whl")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
FILE_ENDINGS = (*ARCHIVES, ".gguf", ".blob", ".onnx", ".xml", *WEIGHTS)
"""Endings of files, which no name on Hugging Face has."""
HOSTS = ("hf.co/", "huggingface.co/")
PREFIXES = (*HOSTS, *(f"https:/{slash}{host}" for slash in ("/", "") for host in HOSTS))
"""What may stand before a name; a path has one slash where an address has two."""
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(
    rf"(?P<owner>{_PART})/(?P<name>{_PART})(?P<file>(/[^/@:\\]+)+\.gguf)?"
    r"(@(?P<revision>[\w.-]+(/[\w.-]+)*))?(:(?P<quant>[A-Za-z0-9][\w.-]{0,63}))?",
    re.ASCII,
)
_MOST_CHARS = 1024


@dataclass(frozen=True)
class HubName:
    """A name of a model on Hugging Face."""

    repo: str
    revision: str = ""
    quant: str = ""
    """Chooses a file of a GGUF repository, as ``file`` does; empty for none."""
    file: str = ""
    is_prefixed: bool = False
    """Whether it was written with ``hf.co/``, so that it cannot be a path."""

    def __str__(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repo}{file}{revision}{f':{self.quant}' if self.quant else ''}"

    @property
    def title(self) -> str:
        """What a server calls the model: the name without its revision."""
        return str(HubName(self.repo, "", self.quant, self.file))


def parse_hub_name(text: str) -> HubName | None:
    """Return the name that a text has the form of, None if it is no name.

    ``owner/name``, ``hf.co/owner/name``, ``https://huggingface.co/owner/name``,
    ``owner/name@revision``, ``owner/name:Q4_K_M``, ``owner/name/file.gguf``.
    """
    prefix = next((each for each in PREFIXES if text.startswith(each)), "")
    found = _NAME.fullmatch(text[len(prefix) :]) if len(text) <= _MOST_CHARS else None
    if found is None:
        return None
    file = (found["file"] or "").lstrip("/")
    revision = found["revision"] or ""
    dotted = (*PurePosixPath(file).parts, *revision.split("/"), found["owner"], found["name"])
    if any(each in (".", "..") or "--" in each for each in dotted[-2:]) or ".." in dotted or (file and found["quant"]):
        return None
    if found["name"].lower().endswith((*FILE_ENDINGS, ".git")):
        return None
    return HubName(f"{found['owner']}/{found['name']}", revision, found["quant"] or "", file, bool(prefix))
