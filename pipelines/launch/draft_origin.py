"""Loads a draft model: a second, smaller model that guesses the tokens of the first."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from pathlib import Path
from typing import Any

import openvino_genai as genai

from staticllm.core import OnProgress
from staticllm.errors import ConfigError, quoted, shown
from staticllm.model_dir import path_of
from staticllm.model_files.model_at import check_model_dir

from ..engine.speculation.draft_model import DraftModel
from .arguments import Given, read_tokenizer, resolve_candidates
from .engine import Launched, load_first

TOKENIZER_XML = "openvino_tokenizer.xml"
NAME = "draft_model"
_UNUSED = re.compile(rb"[\[<][^a-z]*(pad|unused|reserved|extra|dummy|placeholder)\D*\d+\D*[\]>]", re.IGNORECASE)
"""Texts of tokens that fill a vocabulary up."""
MEASURE_SECONDS = 0.5
"""Time for measuring the cost of drafted tokens during loading, in seconds."""


@dataclass(frozen=True)
class DraftOrigin:
    """A draft model that a pipeline shall load."""

    models_path: Path
    device: str = ""
    """"" for the pipeline's own."""
    properties: Mapping[str, Any] = field(default_factory=dict)


def draft_model(models_path: str | os.PathLike[str], device: str = "", **properties: object) -> DraftOrigin:
    """Return the argument ``draft_model`` of a pipeline: ``StaticLLMPipeline(path, "CPU", draft_model=draft_model(small))``.

    Args:
        models_path: A directory exported by optimum-intel, of a smaller model with the same tokenizer.
        device: The device that runs it; "" for that of the pipeline.
        properties: Properties as for ``StaticLLMPipeline``. Lengths, ``MAX_NUM_SEQS`` and ``KV_SLOTS`` default to the pipeline's.
    """
    return DraftOrigin(path_of(models_path), device, properties)


def take_draft_origin(given: Given, properties: dict[str, Any]) -> tuple[Given, DraftOrigin | None]:
    """Remove ``draft_model`` from the arguments and properties of a constructor.

    Return the other arguments, and the draft model; None without one.

    Raises:
        ConfigError: it is an object of another type.
    """
    origin = properties.pop(NAME, None)
    if isinstance(given.config, Mapping) and NAME in given.config:
        others = {name: value for name, value in given.config.items() if name != NAME}
        origin = origin or given.config[NAME]
        given = replace(given, config=others)
    if origin is None or isinstance(origin, DraftOrigin):
        return given, origin
    known = next((noted for value, noted in tuple(_KNOWN) if value is origin), None)
    if known is None:
        raise ConfigError(
            f"draft_model is a {type(origin).__name__}, which Python cannot read: import StaticLLMPipeline before "
            "openvino_genai.draft_model is called, or use staticllm.draft_model(path, device)"
        )
    return given, known


def _noting_draft_model(models_path: str | os.PathLike[str], device: str = "", **properties: object) -> object:
    """Call ``openvino_genai.draft_model``, and note its arguments, which its result does not tell."""
    value: object = _native_draft_model(models_path, device, **properties)
    _KNOWN.append((value, DraftOrigin(Path(os.fsdecode(models_path)), device, properties)))
    return value


_native_draft_model = getattr(genai.draft_model, "__wrapped__", genai.draft_model)
_KNOWN: deque[tuple[object, DraftOrigin]] = deque(maxlen=8)
"""Recent results of ``openvino_genai.draft_model`` with their arguments."""
update_wrapper(_noting_draft_model, _native_draft_model)
genai.draft_model = _noting_draft_model


def load_draft(
    origin: DraftOrigin, launched: Launched, tokenizer: genai.Tokenizer, on_progress: OnProgress
) -> DraftModel:
    """Load a draft model for a model that was launched.

    Raises:
        ConfigError: one of the two models has recurrent states, or their tokenizers differ.
        ModelError, UnsupportedModelError, DeviceError, BlobError: as for ``launch``.
    """
    main = launched.config
    name = str(origin.models_path)
    if launched.loaded.programs.shape.recurrent_states:
        raise ConfigError("draft_model: this model has recurrent states, so that rejected tokens cannot be cut off")
    properties = dict(origin.properties)
    mode = launched.loaded.programs.options.mode
    defaults: dict[str, Any] = {
        "MAX_PROMPT_LEN": main.max_prompt_len,
        "MIN_RESPONSE_LEN": main.min_response_len,
        "MAX_NUM_SEQS": main.num_seqs(mode),
        "BACKGROUND_COMPILE": False,
    }
    if not {"KV_SLOTS", "KV_CACHE_GB", "MAX_PROMPT_LEN", "MIN_RESPONSE_LEN"} & set(properties):
        defaults["KV_SLOTS"] = main.num_kv_slots(mode)
    candidates = resolve_candidates(origin.device or launched.device, None, {**defaults, **properties})
    directory = check_model_dir(origin.models_path)
    check_tokenizers(tokenizer, directory)
    loaded = load_first(directory, candidates, on_progress).loaded
    shape = loaded.programs.shape
    if shape.recurrent_states:
        raise ConfigError(f"the draft model {name!r} has recurrent states, which cannot be cut: choose another one")
    if shape.vocab_size != launched.vocab_size and not (directory / TOKENIZER_XML).is_file():
        raise ConfigError(
            f"the draft model {name!r} has a vocabulary of {shape.vocab_size}, the model one of {launched.vocab_size}: "
            "choose a draft model of the same family"
        )
    model = DraftModel(loaded.runner, shape.vocab_size)
    model.measure(time.perf_counter() + MEASURE_SECONDS)
    return model


def check_tokenizers(tokenizer: genai.Tokenizer, directory: Path) -> None:
    """Check that a draft model's tokenizer, if any, has the same tokens where both have some in use.

    One may have more of them: a family's models have the same tokens and different numbers of unused ones at their end.

    Raises:
        ConfigError: a token differs; the message names it.
    """
    if not (directory / TOKENIZER_XML).is_file():
        return
    mine = tokenizer.get_vocab()
    other = read_tokenizer(directory).get_vocab()
    texts = {number: text for text, number in other.items()}
    for text, number in sorted(mine.items(), key=lambda pair: pair[1]):
        own = texts.get(number, text)
        if own != text and not (_UNUSED.fullmatch(own) or _UNUSED.fullmatch(text)):
            raise ConfigError(
                f"the draft model {quoted(directory)} has another tokenizer ({len(other)} tokens, the model has {len(mine)}; "
                f"token {number} is {shown(own)} there and {shown(text)} here): choose a draft model of the same family"
            )


def use_draft(
    origin: DraftOrigin | None, launched: object, tokenizer: genai.Tokenizer, on_progress: OnProgress
) -> None:
    """Load a draft model, if there is one, and let the engine of a launched model use it. If that fails, the engine is closed.

    Raises:
        ConfigError, ModelError, UnsupportedModelError, DeviceError, BlobError: as for ``load_draft``.
    """
    if origin is None:
        return
    assert isinstance(launched, Launched), "the daemon loads no draft models"
    try:
        model = load_draft(origin, launched, tokenizer, on_progress)
        core = launched.engine.core
        launched.engine.run_between_steps(lambda: core.device.draft_planner.use_model(model))
    except BaseException:
        launched.close()
        raise
