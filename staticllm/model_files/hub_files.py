"""Which files of a repository on Hugging Face are the model that a name means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from staticllm.errors import ModelError, shown
from staticllm.model_paths import path_kinds as kinds
from staticllm.model_paths.hub_names import HubName
from staticllm.model_paths.path_kind import MODEL_XML, kind_of_listing

DEFAULT_QUANT = "Q4_K_M"
"""The quantization of a GGUF repository that is taken if the name has none, as other readers of GGUF do."""
TEXTS = (".json", ".jinja", ".txt", ".model", ".xml")
"""Endings of what a model directory has beside the weights: graphs, tokenizer, configuration."""
_QUANT = re.compile(
    r"(?:^|(?<=[-._]))((?:UD-)?(?:I?Q\d[A-Z0-9]*(?:_[A-Z0-9]{1,3})*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4)|BF16|FP?16|FP?32)(?=$|[-.])",
    re.IGNORECASE,
)
"""A quantization in a name, between separators; others may follow it, as in ``Q4_K_M-imat``."""
_FLOATS = ("BF16", "F16", "F32")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_NO_MODEL = ("mmproj", "imatrix")
"""What the names of GGUF files begin with that are no language models."""
_DENSE = re.compile(r"\d+_Dense/model\.safetensors")
"""The weights of a module of sentence-transformers, which an exported embedder keeps beside its graph."""
_MOST_SHOWN = 12


@dataclass(frozen=True)
class HubFile:
    """A file of a repository: its path, its bytes, and the digest that the hub names."""

    name: str
    size: int
    digest: str
    """A SHA-256 in hexadecimal if ``is_large`` (the file is kept outside git), else git's SHA-1 of a blob."""
    is_large: bool


@dataclass(frozen=True)
class Repository:
    """What a repository holds at one commit."""

    name: HubName
    commit: str
    files: tuple[HubFile, ...]
    config: bytes = b""
    """The text of its ``config.json``; empty if it is not known."""


def files_of_model(repository: Repository) -> tuple[HubFile, ...]:
    """Return the files that are needed: those of the OpenVINO model, whose graph is the last, or one GGUF file.

    Pickles, code and the weights of other frameworks are never among them.

    Raises:
        ModelError: there is no such model; the message says what is there and what helps.
    """
    name = repository.name
    names = {file.name for file in repository.files}
    if name.file or name.quant:
        return (_gguf(repository),)
    if MODEL_XML in names:
        return _openvino(repository.files)
    if any(file.endswith(".gguf") for file in names):
        return (_gguf(repository),)
    found = kind_of_listing(name.repo, dict.fromkeys(names, b"") | {"config.json": repository.config})
    if found.kind in (kinds.SUBFOLDER, kinds.SEVERAL):
        raise ModelError(f"{found.what} ({found.found}): give its folder after hf download {name.repo} --local-dir DIR")
    if found.kind in (kinds.NOTHING, kinds.EMPTY):
        raise ModelError(f"{str(name)!r} holds no model of OpenVINO or GGUF: give a repository that has one")
    raise ModelError(found.problem)


def _openvino(files: Sequence[HubFile]) -> tuple[HubFile, ...]:
    graphs = {file.name for file in files if file.name.endswith(".xml")}
    found = [file for file in files if _is_needed(file.name, graphs)]
    return tuple(sorted(found, key=lambda file: file.name == MODEL_XML))


def _is_needed(name: str, graphs: set[str]) -> bool:
    """Return whether a model directory needs a file: texts at the top or of modules, and weights of a graph."""
    folder, _, base = name.rpartition("/")
    if base.startswith(".") or (folder and not re.fullmatch(r"\d+_\w+|additional_chat_templates", folder)):
        return False
    path = PurePosixPath(name)
    if path.suffix == ".bin":  # others are pickles
        return str(path.with_suffix(".xml")) in graphs
    return path.suffix in TEXTS or _DENSE.fullmatch(name) is not None


def _gguf(repository: Repository) -> HubFile:
    """Return the GGUF file that a name means.

    Raises:
        ModelError: there is none, there are several, or it is in parts.
    """
    name = repository.name
    ggufs = {file.name: file for file in repository.files if is_gguf_model(file.name)}
    if name.file:
        found = [file for file in repository.files if file.name == name.file]
        if not found:
            raise ModelError(f"{name.repo} has no file {name.file!r}: {_those(name, ggufs)}")
        return _whole(found[0], repository)
    if not ggufs:
        raise ModelError(f"{name.repo} holds no GGUF model, {name.quant!r} is none of its: leave :{name.quant} out")
    meant = chosen_gguf(tuple(ggufs), name.quant)
    if len(meant) == 1:
        return _whole(ggufs[meant[0]], repository)
    if not meant:
        raise ModelError(f"{name.repo} has no quantization {name.quant!r}: {_those(name, ggufs)}")
    raise ModelError(f"{name.repo} holds several GGUF models: {_those(name, {each: ggufs[each] for each in meant})}")


def is_gguf_model(name: str) -> bool:
    """Return whether a file is, by its name, a GGUF file of a language model or the first part of one."""
    path = PurePosixPath(name)
    split = _SPLIT.search(path.stem)
    is_first = split is None or int(split[1]) == 1
    is_other = path.name.lower().startswith(_NO_MODEL) or "mmproj" in re.split(r"[-._]", path.stem.lower())
    return path.suffix.lower() == ".gguf" and not is_other and is_first


def chosen_gguf(names: Sequence[str], quant: str) -> list[str]:
    """Return the GGUF files that a quantization means; without one, the default one or else all of them."""
    if quant:
        return [name for name in names if _is_of(name, quant)]
    default = [name for name in names if quant_of(name) == DEFAULT_QUANT]
    return default if len(default) == 1 else list(names)


def quant_of(name: str) -> str:
    """Return the quantization of a file, in capitals: in its name, else in that of a folder; empty if there is none.

    ``f16.q6`` and the like name the type of a few tensors too, so that a quantization comes before a type of floats.
    """
    path = PurePosixPath(name)
    for part in (_stem(name), *(each.name for each in path.parents)):
        # Q2 within a name may be a word of it
        found = [_plain(each[1]) for each in _QUANT.finditer(part) if each.end() == len(part) or _is_clear(each[1])]
        if found:
            return next((each for each in reversed(found) if each not in _FLOATS), found[-1])
    return ""


def _is_clear(quant: str) -> bool:
    return "_" in quant or "F" in quant.upper()


def _plain(quant: str) -> str:
    return quant.upper().replace("FP16", "F16").replace("FP32", "F32") if quant.upper() != "BF16" else "BF16"


def _stem(name: str) -> str:
    return _SPLIT.sub("", PurePosixPath(name).stem)


def _is_of(name: str, quant: str) -> bool:
    """Return whether a file has a quantization; ``Q8_0`` is not ``UD-Q8_0``, which repositories have beside it."""
    return quant_of(name) == _plain(quant) or quant.upper() == _stem(name).upper()


def _whole(file: HubFile, repository: Repository) -> HubFile:
    split = _SPLIT.search(PurePosixPath(file.name).stem)
    if split is None:
        return file
    raise ModelError(
        f"{file.name!r} of {repository.name.repo} is one of {int(split[2])} parts: choose a file that is whole, or download the "
        "parts, join them with `gguf-split --merge` and give that file"
    )


def _those(name: HubName, files: dict[str, HubFile]) -> str:
    """Return what to write in place of a name, for each file."""
    whole = [each for each in files if _SPLIT.search(PurePosixPath(each).stem) is None] or list(files)
    quants = [quant_of(each) for each in whole]
    better = [
        str(
            replace(name, quant=quant, file="")
            if quant and quants.count(quant) == 1
            else replace(name, quant="", file=each)
        )
        for each, quant in zip(whole, quants, strict=True)
    ]
    more = ", …" if len(better) > _MOST_SHOWN else ""
    return f"give one of {', '.join(better[:_MOST_SHOWN])}{more}" if better else "it has no GGUF model"


def check_file_name(name: str, repo: str) -> str:
    """Return the path of a file in a repository.

    Raises:
        ModelError: it would lie outside the folder of the repository.
    """
    parts = name.split("/")
    is_plain = name.isprintable() and len(name) <= 1024 and not set(name) & set('\\:*?"<>|')
    if not is_plain or any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts):
        raise ModelError(f"{repo} has a file called {shown(name)}, which no folder can hold: nothing of it is taken")
    return str(Path(*parts).as_posix())
