"""Decides by its files what a path holds that is given as a model. No file is read but small JSON files and first bytes."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

from staticllm.errors import MAX_SHOWN, quoted, shown
from staticllm.kinds import kind_of_files
from staticllm.model_paths import path_kinds as kinds
from staticllm.model_paths.hub_names import ARCHIVES, FILE_ENDINGS, WEIGHTS, parse_hub_name
from staticllm.model_paths.path_kinds import PathKind
from staticllm.system.files import open_regular, read_regular

MODEL_XML = "openvino_model.xml"
TOKENIZER_XML = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
LANGUAGE_XML = "openvino_language_model.xml"
_BY_SUFFIX = ((".gguf", kinds.GGUF), (ARCHIVES, kinds.ARCHIVE), (".blob", kinds.BLOB), (".onnx", kinds.ONNX))
_LFS = b"version https://git-lfs"
_CONFIG_BYTES = 1 << 20
_MOST_ENTRIES = 4096
_MOST_FOLDERS = 256
_DEPTH = 3
"""Folders below a given one that are searched: models--owner--name/snapshots/revision of a Hugging Face cache."""
_COMPANION = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Parts of names of GGUF files that lie beside that of a language model."""
_ENCODER_DECODER = re.compile(r"openvino_(en|de)coder(_with_past)?_model\.xml")
_SPLIT = re.compile(r"-00001-of-\d+")


@dataclass(frozen=True)
class ModelPath:
    """What a path holds, in which ``directory``, by which names (``found``), and the ``task`` of an export, if one helps.

    A model that is a single file, which is converted when it is loaded, stands for its directory.
    """

    path: Path
    directory: Path
    kind: PathKind
    found: str = ""
    task: str = "text-generation-with-past"
    title: str = ""
    """What a model is called whose folder has another name."""
    note: str = ""
    """Which one of several is meant, if its name says less."""
    is_guess: bool = False
    """Whether it can mean another one when more of its repository is here."""
    given: str = ""
    """The path as it was typed, if it was: on Windows a ``Path`` has other separators."""

    @property
    def is_loadable(self) -> bool:
        """Whether there is an OpenVINO model, as far as names of files tell."""
        return self.kind is kinds.OPENVINO or self.is_converted

    @property
    def is_converted(self) -> bool:
        """Whether it is a file of which an OpenVINO model is made when it is loaded."""
        return self.kind is kinds.GGUF

    @property
    def name(self) -> str:
        """What the model is called: its title, the name of the folder, or that of the file without its ending."""
        if self.title:
            return self.title
        resolved = _resolved(self.directory)
        return resolved.stem if self.is_converted else resolved.name

    @property
    def what(self) -> str:
        """What it is, with the path."""
        if self.kind.name == "missing":
            is_file = self.path.name.lower().endswith(FILE_ENDINGS)
            name = _shown(self.typed)
            return f"there is no file {name}" if is_file else f"no model directory at {name}"
        return f"{_shown(self.typed)} {self._filled(self.kind.what)}"

    @property
    def typed(self) -> str:
        """The path as messages show it."""
        return self.given or str(self.path)

    @property
    def remedy(self) -> str:
        """The one command or step that helps; empty if it can be loaded."""
        return self._filled(self.kind.remedy)

    @property
    def problem(self) -> str:
        """What it is and what helps, in one line."""
        return f"{self.what}: {self.remedy}"

    def _filled(self, text: str) -> str:
        name = _resolved(self.directory).name or "model"
        return text.format(
            model=for_shell(self.directory if self.kind.name != "missing" else name_in(self.given or self.path)),
            out=for_shell(f"{name}_openvino"),
            set=for_shell(self.directory),
            task=self.task,
            found=self.found,
        )


def _resolved(path: Path) -> Path:
    """Return where a path leads; the path itself if it is a loop of links."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # ValueError: characters that no path has
        return path


def path_kind(path: str | os.PathLike[str], needs_tokenizer: bool = False) -> ModelPath:
    """Return what a path holds. With ``needs_tokenizer``, an OpenVINO model without a tokenizer is a kind of its own."""
    given = Path(path)
    typed = path if isinstance(path, str) else ""
    if _is(Path.is_file, given):
        return replace(_of_file(given, needs_tokenizer), given=typed)
    if not _is(Path.is_dir, given):
        return ModelPath(given, given, _kind_of_name(given, name_in(typed or given)), given=typed)
    return replace(_of_folder(_Folder.read(given), given, needs_tokenizer), given=typed)


def kind_of_listing(name: str, files: Mapping[str, bytes]) -> ModelPath:
    """Return what a repository called ``name`` holds: the names of its files, each with its first bytes as far as they are known.

    A subfolder is named in ``found``, but cannot be given as a model.
    """
    given = Path(name)
    return replace(_of_folder(_Listed.of(given, files), given, False), given=name)


def _shown(path: str) -> str:
    return quoted(path) if len(path) <= MAX_SHOWN else shown(path)


def name_in(path: str | Path) -> str:
    """Return the name on Hugging Face that a path may be: without ``./``, and slashes that name nothing."""
    return (PurePosixPath(path) if isinstance(path, str) else path).as_posix()


def _kind_of_name(path: Path, text: str) -> PathKind:
    """Return the kind of a path that does not exist: it may be a name on Hugging Face, unless its first folder exists."""
    name = parse_hub_name(text)
    if name is None or (not name.is_prefixed and _is(Path.is_dir, Path(path.parts[0]))):
        return kinds.MISSING
    return kinds.HUB_NAME if find_spec("huggingface_hub") is not None else kinds.HUB_NAME_ALONE


@dataclass(frozen=True)
class _Folder:
    """The names of the files and folders in a folder, sorted, without hidden ones."""

    path: Path
    files: tuple[str, ...]
    folders: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> _Folder:
        try:
            with os.scandir(path) as entries:
                found = [entry for entry in islice(entries, _MOST_ENTRIES) if not entry.name.startswith(".")]
            files = tuple(sorted(entry.name for entry in found if entry.is_file()))
            return cls(path, files, tuple(sorted(entry.name for entry in found if entry.is_dir())))
        except OSError:  # it may not be read
            return cls(path, (), ())

    def ending(self, *suffixes: str) -> list[str]:
        return [name for name in self.files if name.lower().endswith(suffixes)]

    def below(self, name: str) -> _Folder:
        return _Folder.read(self.path / name)

    def start_of(self, name: str, count: int = 64) -> bytes:
        """Return the first bytes of a file; empty if it cannot be read."""
        return _start_of(self.path / name, count)

    def mentions(self, name: str, text: bytes, limit: int = 1 << 20) -> bool:
        """Return whether a text is among the first bytes of a file; an IR begins with its inputs."""
        return text in self.start_of(name, limit)

    def config(self) -> dict[str, Any]:
        """Return ``config.json``; empty without one."""
        try:
            found = json.loads(self._config_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _config_text(self) -> bytes:
        return read_regular(self.path / "config.json", _CONFIG_BYTES)


@dataclass(frozen=True)
class _Listed(_Folder):
    """A folder that is only known by the names in it, and the first bytes of some files."""

    starts: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, starts: Mapping[str, bytes]) -> _Listed:
        seen = [name for name in starts if not any(part.startswith(".") for part in name.split("/"))]
        files = tuple(sorted(name for name in seen if "/" not in name))
        folders = tuple(sorted({name.partition("/")[0] for name in seen if "/" in name}))
        return cls(path, files, folders, starts)

    def below(self, name: str) -> _Listed:
        inner = {each[len(name) + 1 :]: start for each, start in self.starts.items() if each.startswith(f"{name}/")}
        return _Listed.of(self.path / name, inner)

    def start_of(self, name: str, count: int = 64) -> bytes:
        return self.starts[name][:count]

    def _config_text(self) -> bytes:
        return self.starts.get("config.json", b"")


@dataclass(frozen=True)
class _Found:
    """A kind that was recognised, and the names that decided."""

    kind: PathKind
    names: tuple[str, ...] = ()
    task: str = "text-generation-with-past"

    def at(self, path: Path, directory: Path) -> ModelPath:
        more = ", …" if len(self.names) > 3 else ""
        return ModelPath(path, directory, self.kind, ", ".join(self.names[:3]) + more, self.task)


def _of_file(path: Path, needs_tokenizer: bool) -> ModelPath:
    """Return what a file is. One of several files of a model stands for its folder."""
    name = path.name.lower()
    own = _kind_of_file(path)
    if own is not None:
        return _Found(own, (path.name,)).at(path, path if own is kinds.GGUF else path.parent)
    found = path_kind(path.parent, needs_tokenizer)
    if found.is_loadable or found.kind.name == "no tokenizer":
        is_meant = name in (MODEL_XML, Path(MODEL_XML).with_suffix(".bin").name)
    else:
        is_meant = name.endswith((".xml", *WEIGHTS)) and found.kind.name not in ("several", "subfolder", "nothing")
    return found if is_meant else ModelPath(path, path.parent, kinds.FILE)


def _kind_of_file(path: Path) -> PathKind | None:
    """Return the kind of a file that is something by itself."""
    start = _start_of(path)
    if start.startswith(_LFS):
        return kinds.LFS_POINTERS
    if start.startswith(b"GGUF"):
        return kinds.GGUF
    return next((kind for suffixes, kind in _BY_SUFFIX if path.name.lower().endswith(suffixes)), None)


def _of_folder(folder: _Folder, path: Path, needs_tokenizer: bool) -> ModelPath:
    found = _plain(folder)
    if found is None:
        found = _below(folder) or _rest(folder)
    elif found.kind is kinds.OPENVINO and needs_tokenizer:
        missing = tuple(name for name in TOKENIZER_XML if name not in folder.files)
        if missing:
            can_convert = "tokenizer.json" in folder.files
            found = _Found(kinds.TOKENIZER_TO_CONVERT if can_convert else kinds.NO_TOKENIZER, missing[:1])
    return found.at(path, path / found.names[0] if found.kind is kinds.GGUF else path)


def _plain(folder: _Folder) -> _Found | None:
    """Return what a folder holds by its own files; None if they do not tell."""
    return next((found for check in _CHECKS if (found := check(folder)) is not None), None)


def _pointers(folder: _Folder) -> _Found | None:
    names = folder.ending(".xml", ".gguf", ".onnx", *WEIGHTS)
    found = tuple(name for name in names if folder.start_of(name).startswith(_LFS))
    return _Found(kinds.LFS_POINTERS, found) if found else None


def _openvino(folder: _Folder) -> _Found | None:
    return _Found(kinds.OPENVINO, (MODEL_XML,)) if MODEL_XML in folder.files else None


def _several_parts(folder: _Folder) -> _Found | None:
    """Return the kind of an export of several graphs."""
    if "model_index.json" in folder.files:
        return _Found(kinds.DRAWING)
    if LANGUAGE_XML in folder.files:
        takes_ids = folder.mentions(LANGUAGE_XML, b'"input_ids"')
        return _Found(kinds.LANGUAGE_PART if takes_ids else kinds.IMAGES)
    if (known := kind_of_files(folder.files)) is not None and known.files is not None:
        return _Found(PathKind(known.name, known.files.what, known.files.remedy, has_parts=True))
    is_translation = any(_ENCODER_DECODER.fullmatch(name) for name in folder.files)
    return _Found(kinds.TRANSLATION) if is_translation else None


def _blob_set(folder: _Folder) -> _Found | None:
    is_set = "manifest.json" in folder.files and folder.ending(".blob")
    return _Found(kinds.BLOB_SET) if is_set else None


def _adapter(folder: _Folder) -> _Found | None:
    if "adapter_model.safetensors" in folder.files:
        return _Found(kinds.ADAPTER)
    pickled = [name for name in folder.ending(".bin", ".pt", ".pth") if name.startswith("adapter_model")]
    return _Found(kinds.ADAPTER_AS_PICKLE, tuple(pickled)) if pickled else None


def _hugging_face(folder: _Folder) -> _Found | None:
    """Return a model of transformers: weights of one of its names, and its config."""
    if "config.json" not in folder.files:
        return None
    weights = tuple(
        name
        for name in folder.ending(*WEIGHTS)
        if name.endswith(".safetensors") or name.startswith(("pytorch_model", "consolidated"))
    )
    if not weights:
        return None
    config = folder.config()
    head = _head(config)
    is_body = head in ("Model", "EncoderModel")
    if "vision_config" in config and not is_body:
        return _Found(kinds.HUGGING_FACE_IMAGES, weights)
    if "num_mel_bins" in config:
        return _Found(kinds.HUGGING_FACE_SPEECH, weights)
    if _is_sentence_transformer(folder):
        return _Found(kinds.HUGGING_FACE, weights, "feature-extraction")
    kind, task = _HEADS.get(head, (kinds.HUGGING_FACE_OTHER, ""))
    if head == "Model" and "vocab_size" not in config:  # of images or sounds, or one name for several models
        kind = kinds.HUGGING_FACE_OTHER
    if not head and _is_scored(folder, config):
        task = "text-classification"
    return _Found(kind, weights, task)


def _head(config: dict[str, Any]) -> str:
    """Return the end of the first architecture's name (``ForMaskedLM``), "" without one; ``auto_map`` may say ``ForCausalLM``."""
    named = config.get("architectures")
    code = config.get("auto_map")
    name = str(named[0]) if isinstance(named, list) and named else ""
    is_own = isinstance(code, dict) and "AutoModelForCausalLM" in code
    if is_own and name.endswith(("Model", "ForConditionalGeneration")):
        return "ForCausalLM"
    if not name or (head := _HEAD.search(name)) is None:
        return name
    if head[0] == "Model" and config.get("is_encoder_decoder") is True:
        return "ForConditionalGeneration"
    return head[0]


_HEAD = re.compile(r"(For[A-Z]\w*?|LMHeadModel|EncoderModel|Model)$")
_HEADS = {
    "": (kinds.HUGGING_FACE, "text-generation-with-past"),
    "ForCausalLM": (kinds.HUGGING_FACE, "text-generation-with-past"),
    "LMHeadModel": (kinds.HUGGING_FACE, "text-generation-with-past"),
    "ForConditionalGeneration": (kinds.HUGGING_FACE_TRANSLATION, "text2text-generation-with-past"),
    "ForSequenceClassification": (kinds.HUGGING_FACE, "text-classification"),
    "ForMaskedLM": (kinds.HUGGING_FACE, "feature-extraction"),
    "ForPreTraining": (kinds.HUGGING_FACE, "feature-extraction"),
    "EncoderModel": (kinds.HUGGING_FACE, "feature-extraction"),
    "Model": (kinds.HUGGING_FACE, "feature-extraction"),
}
"""The heads of transformers' classes for text, with optimum's task for each."""


def _is_sentence_transformer(folder: _Folder) -> bool:
    """Return whether a folder has files of sentence-transformers for an embedder."""
    names = {"modules.json", "config_sentence_transformers.json"}
    return bool(names & {*folder.files}) or "1_Pooling" in folder.folders


def _is_scored(folder: _Folder, config: dict[str, Any]) -> bool:
    """Return whether the labels of a config without architectures tell a cross-encoder."""
    is_chat = {"generation_config.json", "chat_template.jinja"} & {*folder.files}
    is_scored = "sentence_transformers" in config or ("id2label" in config and "problem_type" in config)
    return is_scored and not is_chat


def _gguf(folder: _Folder) -> _Found | None:
    found = [name for name in folder.ending(".gguf") if _SPLIT.search(name) or "-of-" not in name]
    names = [name for name in found if not _COMPANION.search(name)] or found
    return _Found(kinds.GGUF if len(names) == 1 else kinds.GGUFS, tuple(names)) if names else None


def _ctranslate2(folder: _Folder) -> _Found | None:
    has_words = any(name.startswith(("vocabulary.", "shared_vocabulary.")) for name in folder.files)
    return _Found(kinds.CTRANSLATE2) if "model.bin" in folder.files and has_words else None


def _onnx(folder: _Folder) -> _Found | None:
    names = folder.ending(".onnx")
    if not names and "onnx" in folder.folders:
        names = [f"onnx/{name}" for name in folder.below("onnx").ending(".onnx")]
    return _Found(kinds.ONNX, tuple(names)) if names else None


def _other_ir(folder: _Folder) -> _Found | None:
    names = [name for name in folder.ending(".xml") if folder.mentions(name, b"<net", 4096)]
    if names and set(names) <= set(TOKENIZER_XML):
        return _Found(kinds.TOKENIZER)
    names = [name for name in names if name not in TOKENIZER_XML]
    return _Found(kinds.OTHER_OPENVINO, tuple(names)) if names else None


def _cache(folder: _Folder) -> _Found | None:
    is_ours = any(name.startswith("staticllm-probes-") for name in folder.files)
    is_openvinos = bool(folder.ending(".blob", ".cl_cache"))
    sets = (_blob_set(folder.below(name)) for name in folder.folders[:16])
    return _Found(kinds.CACHE) if is_ours or is_openvinos or any(sets) else None


_CHECKS: tuple[Callable[[_Folder], _Found | None], ...] = (
    _pointers, _openvino, _several_parts, _blob_set, _adapter, _hugging_face, _gguf, _ctranslate2, _onnx, _other_ir, _cache,
)  # fmt: skip
"""What recognises each kind, in this order: the first that a folder has files of decides."""


def _below(folder: _Folder) -> _Found | None:
    """Return where the models are, if they are in subfolders."""
    models = [str(inner.path) for inner in islice(_models_below(folder), 4)]
    if not models:
        return None
    return _Found(kinds.SUBFOLDER if len(models) == 1 else kinds.SEVERAL, tuple(map(for_shell, models)))


def _models_below(folder: _Folder) -> Iterator[_Folder]:
    """Yield folders with models, the nearest first. At most ``_MOST_FOLDERS`` are looked into."""
    waiting = deque((folder, name, 1) for name in folder.folders)
    for _ in range(_MOST_FOLDERS):
        if not waiting:
            return
        outer, name, depth = waiting.popleft()
        inner = outer.below(name)
        if _plain(inner) is not None:
            yield inner
        elif depth < _DEPTH:
            waiting.extend((inner, each, depth + 1) for each in inner.folders)


def _rest(folder: _Folder) -> _Found:
    archives = folder.ending(*ARCHIVES)
    if archives:
        return _Found(kinds.ARCHIVES, tuple(archives))
    names = (*folder.files, *folder.folders)
    return _Found(kinds.NOTHING, names) if names else _Found(kinds.EMPTY)


def _is(check: Callable[[Path], bool], path: Path) -> bool:
    try:
        return check(path)
    except (OSError, ValueError):  # it is too long, or may not be seen
        return False


def _start_of(path: Path, count: int = 64) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(count)
    except OSError:
        return b""


def for_shell(path: str | Path) -> str:
    """Return a path as it can be pasted into a command line of this system."""
    text = str(path)
    return f'"{text}"' if os.name == "nt" and " " in text else text if os.name == "nt" else shlex.quote(text)
