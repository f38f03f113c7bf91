"""What a transcription may be asked for: ``WhisperGenerationConfig``, and how a call's options are read and checked.

The options that Whisper shares with text generation are those of ``generation/options``: GenAI's class is derived from its
``GenerationConfig``, so ``resolve`` reads and checks them. This module adds Whisper's own: a field of
``WhisperTokens``, ``WhisperOptions`` or ``FallBackParams`` says how it is read.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import openvino_genai as genai

from staticllm.config import whole
from staticllm.errors import ConfigError, GenerationConfigError, ModelError, last_line, quoted, shown
from staticllm.system.files import read_regular

from ..generation.options.extra import EXTRA_NAMES, MAX_TOKEN, check_characters
from ..generation.options.requested_grammar import KEYWORDS
from ..generation.options.resolve import (
    DRAFTING,
    GenerationOptions,
    copy_config,
    resolve,
    unreadable_field,
)
from ..generation.options.resolve import NAMES as SHARED_NAMES
from ..generation.options.table import Reading, read_by, readings

Task: TypeAlias = Literal["transcribe", "translate"]
TASKS: tuple[Task, ...] = ("transcribe", "translate")
MAX_TEMPERATURES = 16
MAX_FILE = 16 << 20
"""The most bytes of a ``generation_config.json``."""
MAX_CONTEXT_CHARS = 1 << 16
"""The most characters of ``initial_prompt`` and ``hotwords``; of their tokens only the last 223 count."""
NOT_FOR_SPEECH = (
    "best_of", "suffix", "top_logprobs",
    "finish_grammar", "tools", "tool_choice", "parallel_tool_calls", "parse_tools", "extra_context", *KEYWORDS
)  # fmt: skip
"""Options of text generation that no transcription has."""


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, (bool, int)):
        raise GenerationConfigError(f"{name}={shown(value)}: must be True or False")
    return bool(value)


def _token(name: str, value: object) -> int:
    return _as_ours(name, value, MAX_TOKEN)


def _index(name: str, value: object) -> int:
    return _as_ours(name, value, 1500)


def _as_ours(name: str, value: object, most: int) -> int:
    try:
        return whole(name, value, 0, most)
    except ConfigError as error:
        raise GenerationConfigError(str(error)) from None


def _tokens(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a list of token ids")
    return tuple(_token(f"a token of {name}", token) for token in value)


def _optional_text(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        if value and len(value) > MAX_CONTEXT_CHARS:
            raise GenerationConfigError(
                f"{name} has {len(value)} characters: shorten it to at most {MAX_CONTEXT_CHARS}"
            )
        check_characters(name, [value or ""])
        return value
    raise GenerationConfigError(f"{name}={shown(value)}: must be a str or None")


def _languages(name: str, value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a dict from '<|en|>' and the like to token ids")
    return {text: _token(f"{name}[{text!r}]", token) for text, token in value.items()}


def _heads(name: str, value: object) -> tuple[tuple[int, int], ...]:
    pairs = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    if pairs is None or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pairs):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a list of pairs (layer, head)")
    return tuple(
        (_as_ours(f"a layer of {name}", layer, 1024), _as_ours(f"a head of {name}", head, 1024))
        for layer, head in pairs
    )


def _temperatures(name: str, value: object) -> tuple[float, ...]:
    given = cast(Sequence[Any], value if isinstance(value, (list, tuple)) else (value,))
    if not all(_is_number(number, 0.0, 100.0) for number in given) or len(given) > MAX_TEMPERATURES:
        raise GenerationConfigError(
            f"{name}={shown(value)}: must be at most {MAX_TEMPERATURES} numbers from 0 to 100, as (0.0, 0.2, 0.4)"
        )
    return tuple(float(number) for number in given)


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _threshold(least: float, most: float) -> Callable[[str, object], float | None]:
    def check(name: str, value: object) -> float | None:
        if value is not None and not _is_number(value, least, most):
            raise GenerationConfigError(f"{name}={shown(value)}: must be a number from {least:g} to {most:g}, or None")
        return None if value is None else float(cast(float, value))

    return check


@dataclass(frozen=True)
class WhisperTokens:
    """The token ids that have a meaning for Whisper. The defaults are those of GenAI's class, of multilingual models."""

    decoder_start: int = read_by(_token, 50258, "decoder_start_token_id")
    pad: int = read_by(_token, 50257, "pad_token_id")
    eos: int = 50257
    translate: int = read_by(_token, 50358, "translate_token_id")
    transcribe: int = read_by(_token, 50359, "transcribe_token_id")
    prev_sot: int = read_by(_token, 50361, "prev_sot_token_id")
    no_timestamps: int = read_by(_token, 50363, "no_timestamps_token_id")
    is_multilingual: bool = read_by(_flag, True)
    languages: Mapping[str, int] = read_by(_languages, option="lang_to_id", default_factory=dict)
    """Codes as ``en`` → ids; empty for an English-only model."""

    @property
    def no_speech(self) -> int:
        """The token whose probability after ``<|startoftranscript|>`` is that of a window without speech."""
        return self.no_timestamps - 1

    @property
    def timestamp_begin(self) -> int:
        """The token of 0.00 s; all tokens from this one on are timestamps."""
        return self.no_timestamps + 1


@dataclass(frozen=True)
class FallBackParams:
    """When a window is decoded again at the next temperature, with the names of transformers and openai-whisper.

    A threshold of None has no effect.
    """

    temperatures: tuple[float, ...] = read_by(_temperatures, (0.0,))
    """Tried in order; a single one means that nothing is decoded twice."""
    compression_ratio_threshold: float | None = read_by(_threshold(0.0, 1e6), None)
    logprob_threshold: float | None = read_by(_threshold(-1e6, 0.0), None)
    no_speech_threshold: float | None = read_by(_threshold(0.0, 1.0), None)

    @property
    def finds_silence(self) -> bool:
        """Whether windows without speech have no text."""
        return self.no_speech_threshold is not None


@dataclass(frozen=True)
class WhisperOptions:
    """The checked options of one transcription."""

    generation: GenerationOptions
    """The options that text generation has too."""
    tokens: WhisperTokens
    """The model's special tokens."""
    language: str | None = read_by(_optional_text, None)
    """The code of the language that was asked for (``en``); None to detect it."""
    task: Task = read_by(_optional_text, "transcribe")
    """What is written: the speech's own language, or English."""
    return_timestamps: bool = read_by(_flag, False)
    """Whether results have chunks."""
    word_timestamps: bool = read_by(_flag, False)
    """Whether results have words."""
    alignment_heads: tuple[tuple[int, int], ...] = read_by(_heads, ())
    """Layer and head of the cross-attention from which words get their times."""
    initial_prompt: str | None = read_by(_optional_text, None)
    """Text before the first window; None without."""
    hotwords: str | None = read_by(_optional_text, None)
    """Text before every window; None without."""
    suppress_tokens: tuple[int, ...] = read_by(_tokens, ())
    """Tokens that are never chosen."""
    begin_suppress_tokens: tuple[int, ...] = read_by(_tokens, ())
    """Tokens that are not chosen first."""
    max_initial_timestamp_index: int = read_by(_index, 50)
    """The latest timestamp that a window can begin with, in steps of 0.02 s."""
    fall_back: FallBackParams = FallBackParams()
    """When a window is decoded again."""

    def check_ids(self, vocab_size: int) -> None:
        """Check the tokens of the prompts.

        Raises:
            GenerationConfigError: one is outside the vocabulary of the model.
        """
        tokens = self.tokens
        named = {"decoder_start_token_id": tokens.decoder_start, "no_timestamps_token_id": tokens.no_timestamps}
        if self.initial_prompt is not None or self.hotwords is not None:
            named["prev_sot_token_id"] = tokens.prev_sot
        if tokens.is_multilingual:
            named |= {"translate_token_id": tokens.translate, "transcribe_token_id": tokens.transcribe}
            named |= {f"lang_to_id[{code!r}]": token for code, token in tokens.languages.items()}
        for name, token in named.items():
            if token >= vocab_size:
                raise GenerationConfigError(
                    f"{name}={token}: ids go from 0 to {vocab_size - 1}; begin with the model's own config "
                    "(get_generation_config)"
                )


_CHECKS: Mapping[str, Reading] = {
    row.option: row for kind in (WhisperTokens, WhisperOptions, FallBackParams) for row in readings(kind).values()
}
"""How each of Whisper's own fields is read, by its name."""
WHISPER_NAMES = tuple(_CHECKS)
_OWN_DEFAULTS: Mapping[str, Any] = {**dict.fromkeys(readings(FallBackParams)), "temperatures": ()}
"""The fields that GenAI's class does not have."""


class WhisperGenerationConfig(genai.WhisperGenerationConfig):  # type: ignore[misc]
    """GenAI's class of the same name, with transformers' options for windows that were transcribed badly.

    Args:
        json_path: A ``generation_config.json``, whose values are the defaults.
        values: Fields. Unlike GenAI's class, this one refuses unknown names and impossible values.

    Raises:
        ModelError: the file cannot be read.
        GenerationConfigError: a field of the file, or one of ``values``, is unknown or has an impossible value.
    """

    temperatures: tuple[float, ...]
    """The temperatures at which a window is decoded, until its text passes the thresholds; ``()`` for ``temperature``
    alone. 0 is greedy decoding, or a beam search."""
    compression_ratio_threshold: float | None
    """The largest ratio to which zlib compresses good tokens; more means repetitions."""
    logprob_threshold: float | None
    """The least mean log-probability of the tokens of good text."""
    no_speech_threshold: float | None
    """The probability of no speech from which bad text is taken for silence."""

    def __init__(self, json_path: str | os.PathLike[str] | None = None, **values: object) -> None:
        if json_path is None:
            super().__init__()
        else:
            _read_as_genai(super().__init__, Path(json_path))
        for name, value in _OWN_DEFAULTS.items():
            setattr(self, name, value)
        self.update_generation_config(**({} if json_path is None else _own_fields(Path(json_path))))
        self.update_generation_config(**values)

    def update_generation_config(self, **values: object) -> None:
        """Set fields by name.

        Raises:
            GenerationConfigError: a name is unknown, or a value is impossible; no field was changed.
        """
        values = checked_names(values)
        checked = {name: _CHECKS[name].check(name, value) for name, value in values.items() if name in _CHECKS}
        shared = {name: value for name, value in values.items() if name not in _CHECKS}
        if extra := [name for name in shared if name not in SHARED_NAMES]:
            raise GenerationConfigError(f"{extra[0]} is no field of a config: pass it to generate")
        resolve(copy_config(self), shared)
        for name, value in {**checked, **shared}.items():
            setattr(self, name, value)

    def validate(self) -> None:
        """Check all fields together.

        Raises:
            GenerationConfigError: fields contradict each other or the model; the message names them.
        """
        whisper_options(self, {})


def _read_as_genai(read: Callable[[Path], None], path: Path) -> None:
    try:
        read(path)
    except RuntimeError as error:
        wrong = ""
        if path.is_file():
            wrong = unreadable_field(_text(path)) or _wrong_field(path)
        if wrong:
            raise GenerationConfigError(f"{quoted(path)}: {wrong}; correct it in this file") from None
        raise ModelError(f"{quoted(path)} cannot be read: {last_line(error)}") from error


def _text(path: Path) -> str:
    try:
        return read_regular(path, MAX_FILE).decode()
    except (OSError, UnicodeDecodeError):
        return ""


def _fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(_text(path))
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _own_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a file that GenAI's class does not have."""
    fields = _fields(path)
    return {name: fields[name] for name in _OWN_DEFAULTS if fields.get(name) is not None}


def _wrong_field(path: Path) -> str:
    """Return what is wrong with one of Whisper's own fields of a file; "" if none is found."""
    for name, value in _fields(path).items():
        if name in _CHECKS and value is not None:
            try:
                _CHECKS[name].check(name, value)
            except ConfigError as error:
                return str(error)
    return ""


def checked_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``given`` with a list of temperatures below its own name, ``temperatures``.

    Raises:
        GenerationConfigError: a name is unknown, or no transcription has it.
    """
    values = dict(given)
    if isinstance(values.get("temperature"), (list, tuple)):
        if "temperatures" in values:
            raise GenerationConfigError("temperature is a list, and temperatures is given too: leave one of them out")
        values["temperatures"] = values.pop("temperature")
    for name in values:
        if name in NOT_FOR_SPEECH:
            raise GenerationConfigError(f"{name} is an option of text generation: leave it out for speech")
        if name not in _CHECKS and name not in SHARED_NAMES and name not in EXTRA_NAMES:
            near = difflib.get_close_matches(str(name), (*_CHECKS, *SHARED_NAMES, *EXTRA_NAMES), n=1)
            raise GenerationConfigError(
                f"unknown option {shown(name)}" + (f": did you mean {near[0]!r}?" if near else "")
            )
    return values


def copy_whisper_config(config: genai.WhisperGenerationConfig) -> WhisperGenerationConfig:
    """Return a copy of GenAI's config or ours; the ``copy`` module cannot copy GenAI's class."""
    copied = WhisperGenerationConfig()
    for name in (*SHARED_NAMES, *_CHECKS):
        setattr(copied, name, getattr(config, name, _OWN_DEFAULTS.get(name)))
    return copied


def completed(config: genai.WhisperGenerationConfig, base: genai.WhisperGenerationConfig) -> WhisperGenerationConfig:
    """Return a copy of the config of a call with what it lacks from the model's own, as GenAI: stop tokens and languages."""
    copied = copy_whisper_config(config)
    if not copied.stop_token_ids:
        copied.stop_token_ids = base.stop_token_ids
    if copied.eos_token_id == -1:
        copied.set_eos_token_id(base.eos_token_id)
    if not copied.lang_to_id:
        copied.lang_to_id = base.lang_to_id
    return copied


def whisper_options(config: genai.WhisperGenerationConfig, overrides: Mapping[str, Any]) -> WhisperOptions:
    """Return the checked options of a call: those of ``config``, overridden by the keyword arguments of ``generate``.

    Raises:
        GenerationConfigError: a name is unknown, a value is impossible, or options contradict each other or the model.
        AdapterError: an adapter is unknown, or its file is missing or damaged.
    """
    overrides = checked_names(overrides)
    given = {name: overrides.get(name, getattr(config, name, _OWN_DEFAULTS.get(name))) for name in _CHECKS}
    tokens, own, fall_back = (
        {name: row.value(given) for name, row in readings(kind).items()}
        for kind in (WhisperTokens, WhisperOptions, FallBackParams)
    )
    generation = resolve(config, {name: value for name, value in overrides.items() if name not in _CHECKS})
    _check_generation(generation)
    _check_alignment(own)
    found = _tokens_of(tokens, overrides.get("eos_token_id", config.eos_token_id))
    spoken = {"language": _language_of(own["language"], found), "task": _task_of(own["task"], found)}
    sampling = generation.sampling
    if not fall_back["temperatures"]:
        fall_back["temperatures"] = (sampling.temperature if sampling.do_sample else 0.0,)
    return WhisperOptions(generation, found, **{**own, **spoken}, fall_back=FallBackParams(**fall_back))


def _tokens_of(values: Mapping[str, Any], eos: int) -> WhisperTokens:
    """Return the special tokens. Without an ``eos`` (-1), the padding ends a text."""
    is_multilingual = values["is_multilingual"]
    if is_multilingual and not values["languages"]:
        raise GenerationConfigError(
            "is_multilingual=True without lang_to_id: begin with the model's own config (get_generation_config), "
            "or set is_multilingual=False for an English-only model"
        )
    languages = {text.strip("<|>"): token for text, token in values["languages"].items()} if is_multilingual else {}
    own = {**values, "languages": MappingProxyType(languages)}
    return WhisperTokens(**own, eos=eos if eos >= 0 else values["pad"])


def _language_of(language: str | None, tokens: WhisperTokens) -> str | None:
    """Return the code of a language, of which GenAI also takes the token (``<|en|>``)."""
    if language is None:
        return None
    if not tokens.is_multilingual:
        raise GenerationConfigError(f"language={shown(language)} for a model that knows English only: leave it out")
    code = language[2:-2] if language.startswith("<|") and language.endswith("|>") else language
    if code not in tokens.languages:
        known = ", ".join(sorted(tokens.languages))
        raise GenerationConfigError(f"language={shown(language)} is not one of the model's: {known}")
    return code


def _task_of(task: str | None, tokens: WhisperTokens) -> Task:
    if task is None:
        return "transcribe"
    if not tokens.is_multilingual:
        raise GenerationConfigError(f"task={shown(task)} for a model that knows English only: leave it out")
    if task not in TASKS:
        raise GenerationConfigError(f"task={shown(task)}: must be 'transcribe' or 'translate'")
    return task


def _check_generation(options: GenerationOptions) -> None:
    if options.num_return_sequences != 1:
        raise GenerationConfigError(
            f"num_return_sequences={options.num_return_sequences}: a recording has one transcription; set 1"
        )
    if options.drafts is not None or options.asks_for_drafts:
        raise GenerationConfigError(f"speech is decoded without drafts: leave {', '.join(DRAFTING)} out")
    of_text = {
        "structured_output_config": options.grammar, "echo": options.echo, "parsers": options.parsers,
        "apply_chat_template": options.apply_chat_template, "logprobs": options.sampling.wants_logprobs,
        "adapters": options.adapters is not None,
    }  # fmt: skip
    for name, value in of_text.items():
        if value:
            raise GenerationConfigError(f"{name} is an option of text generation: leave it out for speech")


def _check_alignment(values: Mapping[str, Any]) -> None:
    if values["word_timestamps"] and not values["alignment_heads"]:
        raise GenerationConfigError(
            "word_timestamps=True without alignment_heads: the model's generation_config.json has none; "
            "set alignment_heads=[(layer, head), …], or use return_timestamps=True"
        )


FALL_BACK: Mapping[str, Any] = {
    "temperatures": (0.0, 0.2, 0.4, 0.6, 0.8, 1.0),
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}
"""The thresholds with which openai-whisper and faster-whisper transcribe, those of transformers for repetitions: the defaults of
the server and of the command. The class has none, like GenAI's, so that noise becomes text there."""


def fall_back_value(name: str, value: object) -> Any:
    """Return the checked value of one of the options ``FALL_BACK``, which may be a text: ``0,0.2,0.4``, ``-1.0`` or ``none``.

    Raises:
        GenerationConfigError: it is impossible.
    """
    if isinstance(value, str):
        try:
            numbers = () if value.strip().lower() == "none" else tuple(map(float, value.split(",")))
        except ValueError:
            raise GenerationConfigError(f"{name}={shown(value)}: must be numbers, or none") from None
        is_list = name == "temperatures" or len(numbers) > 1
        value = numbers if is_list else next(iter(numbers), None)
    return _CHECKS[name].check(name, value)


def alignment_heads(config: WhisperGenerationConfig) -> tuple[tuple[int, int], ...]:
    """Return layer and head of each attention that aligns text and speech.

    Raises:
        GenerationConfigError: none are named.
    """
    if not config.alignment_heads:
        raise GenerationConfigError(
            "word_timestamps=True without alignment_heads: the model's generation_config.json has none; load without it"
        )
    return tuple((int(layer), int(head)) for layer, head in config.alignment_heads)
