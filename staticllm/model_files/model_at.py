"""Finds the model that a path or a name stands for, and makes a directory of it that pipelines load."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from staticllm.core import OnProgress
from staticllm.errors import ModelError
from staticllm.model_dir import check_model_files, is_in_memory, note_given, path_of
from staticllm.model_files.hub import located
from staticllm.model_paths.path_kind import MODEL_XML


def check_model_dir(
    path: str | bytes | os.PathLike[str],
    needs_tokenizer: bool = True,
    weights: str | None = None,
    is_encrypted: bool = False,
    on_progress: OnProgress = lambda event: None,
    model_file: str = MODEL_XML,
) -> Path:
    """Return the complete model directory that a path stands for, which ``check_model_files`` has checked.

    ``path`` may also be the ``openvino_model.xml`` in it, a GGUF file, which is converted once, or a name on Hugging Face whose
    files are in the cache of this machine; nothing is downloaded. The other arguments are those of ``check_model_files``.

    Raises:
        ModelError: there is no OpenVINO model; the message says what is there and which command helps. Or a file is truncated
            or damaged; the message names it.
    """
    if isinstance(path, str) and "<net" in path:
        raise ModelError("a model as a str needs its weights: pass an openvino.Tensor with them, then the tokenizer")
    directory = path_of(path)
    if not is_in_memory(path) and model_file == MODEL_XML:
        directory = _found(path if isinstance(path, str) else directory, needs_tokenizer, on_progress)
    return check_model_files(directory, needs_tokenizer, weights, is_encrypted, model_file)


def _found(path: str | Path, needs_tokenizer: bool, on_progress: OnProgress) -> Path:
    found = located(path, needs_tokenizer)
    if not found.is_loadable:
        raise ModelError(found.problem)
    if found.is_guess:
        warnings.warn(f"{found.note}: write that name to have the same model whatever else is pulled", stacklevel=5)
    if not found.is_converted:
        return found.directory
    from staticllm.model_files.converted import converted  # it imports NumPy, which helps of commands do not need

    directory = converted(found.directory, on_progress)
    note_given(directory, found.directory)
    return directory
