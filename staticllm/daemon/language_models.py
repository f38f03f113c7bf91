"""Language models with an engine in the daemon: programs submit requests, and share calls, weights and cached prefixes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.daemon.devices import Devices
from staticllm.errors import ConfigError, ModelError, PromptError, StaticLLMError
from staticllm.model_dir import MODEL_XML, weights_of, weights_size
from staticllm.pipelines.engine.device_use import DeviceUse
from staticllm.pipelines.engine.overflow import RULES
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.beam_search import StopCriteria
from staticllm.pipelines.generation.method_options import LONGEST_DRAFT, MAX_BEAMS
from staticllm.pipelines.generation.sampling_params import SEQUENCES, SamplingParams
from staticllm.pipelines.generation.structured.compiler import GrammarCompiler
from staticllm.pipelines.generation.structured.vocabulary import read_vocabulary
from staticllm.pipelines.model_loader.arguments import Candidate, read_tokenizer
from staticllm.pipelines.model_loader.launch import Launched, launch
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.wire.messages import Message, ProtocolError, text_of

MAX_ANSWERS = 64
MAX_SEQUENCE_TOKENS = 1 << 18
MAX_NUMBER = 1 << 64
_NUMBERS = {"float": (int, float), "int": (int,), "bool": (bool,)}


@dataclass(frozen=True)
class LanguageSource:
    """A model directory as a client names it, the devices to try, and their configs as JSON types."""

    directory: Path
    candidates: tuple[Candidate, ...]
    text: str  # the candidates as JSON, for comparing

    @property
    def xml(self) -> Path:
        """The model's file, for logs."""
        return self.directory / MODEL_XML

    @property
    def device(self) -> str:
        """The devices to try, for logs."""
        return ",".join(candidate.device for candidate in self.candidates)

    @property
    def num_bytes(self) -> int:
        """The bytes of the weights."""
        return weights_size(self.directory, self.candidates[0].config.weights_path)

    def identity(self) -> tuple[object, ...]:
        """Return a value that is equal for two sources that one engine serves.

        Raises:
            ModelError: a file is missing.
        """
        try:
            weights = weights_of(self.directory, self.candidates[0].config.weights_path)
            found = [path.stat() for path in (self.xml, weights)]
        except OSError as error:
            raise ModelError(f"the model in {str(self.directory)!r} cannot be read: {error.strerror}") from error
        stamps = tuple((each.st_size, each.st_mtime_ns, each.st_ino) for each in found)
        return ("language model", str(self.directory), stamps, self.text)


def language_source_of(message: Message) -> LanguageSource:
    """Return the checked source that a ``MODEL`` message names.

    Raises:
        ProtocolError: a field is missing or of a wrong type.
        ConfigError: a property has an impossible value.
    """
    directory = Path(text_of(message, "directory"))
    if not directory.is_absolute():
        raise ProtocolError("MODEL: directory must be an absolute path")
    given = message.body.get("candidates")
    if not isinstance(given, list) or not 1 <= len(given) <= 8:
        raise ProtocolError("MODEL: candidates must be a list of at most 8 devices")
    return LanguageSource(directory, tuple(map(_candidate, given)), json.dumps(given, sort_keys=True))


def _candidate(values: Any) -> Candidate:
    names = {field.name for field in fields(StaticLLMConfig)}
    if not isinstance(values, dict) or not isinstance(values.get("config"), dict):
        raise ProtocolError("MODEL: a candidate must have a device and a config")
    config, device = values["config"], values.get("device")
    if not isinstance(device, str) or not set(config) <= names:
        raise ProtocolError(f"MODEL: a candidate on {device!r} with the fields {sorted(set(config) - names)}")
    explicit = values.get("explicit", [])
    if not isinstance(explicit, list) or not set(map(str, explicit)) <= names:
        raise ProtocolError("MODEL: explicit must be a list of fields of the config")
    return Candidate(device, StaticLLMConfig(**config), frozenset(explicit))


class LanguageModel:
    """A language model that an engine of the daemon serves. Its steps take turns with the other calls on its device."""

    mode = "engine"

    def __init__(self, id: int, launched: Launched, devices: Devices) -> None:
        self.id, self.launched, self.device = id, launched, launched.device
        self.engine = launched.engine
        self.engine.device_use = DeviceUse(devices.turns(launched.device), -id)

    def describe(self) -> dict[str, Any]:
        """Return what a client's pipeline must know of the model, as JSON types."""
        config = self.launched.config
        return {
            "device": self.launched.device, "vocab_size": self.launched.vocab_size, "kv_type": self.launched.kv_type,
            "has_mapped_weights": self.launched.has_mapped_weights,
            "max_prompt_len": config.max_prompt_len, "min_response_len": config.min_response_len,
        }  # fmt: skip

    def request_of(self, values: Mapping[str, Any]) -> EngineRequest:
        """Return the checked request of a client.

        Raises:
            PromptError: its prompt is empty, too long, or has ids outside the vocabulary.
            ConfigError: a field is missing, unknown or of a wrong type.
        """
        try:
            request = EngineRequest.from_dict(values)
            _check_fields(request)
        except StaticLLMError:
            raise
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(f"a request with wrong fields: {error}") from None
        vocab, limit = self.launched.vocab_size, self.launched.config.max_seq_len
        ids = request.prompt
        if not 0 < len(ids) <= limit or not all(type(id) is int and 0 <= id < vocab for id in ids):
            raise PromptError(f"a prompt of {len(ids)} ids: must be 1 to {limit} ids from 0 to {vocab - 1}")
        return request

    def get_property(self, name: str) -> object:
        """Raise an error: an engine has several programs, with properties of their own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"a language model with an engine has no property {name!r}")

    def snapshot(self, message: Message) -> int:
        """Save or load a snapshot as a client's message says, and return its number of tokens.

        Raises:
            ProtocolError: a field is missing or of a wrong type.
            SnapshotError: it cannot be saved or loaded.
        """
        path, key, identity = text_of(message, "path"), text_of(message, "key"), message.body.get("identity")
        tokens = message.body.get("tokens")
        if not isinstance(identity, dict) or not isinstance(tokens, list) or not Path(path).is_absolute():
            raise ProtocolError("SNAPSHOT: path must be absolute, identity an object, tokens a list")
        texts, ids = {str(name): str(value) for name, value in identity.items()}, [int(token) for token in tokens]
        if text_of(message, "action", 8) == "save":
            return self.engine.save_snapshot(ids, path, texts, bytes.fromhex(key))
        return self.engine.load_snapshot(path, texts, bytes.fromhex(key))

    def close(self) -> None:
        """End the engine and release the programs."""
        self.launched.close()


def _check_fields(request: EngineRequest) -> None:
    """Check the types and bounds of a request from another process.

    Raises:
        ConfigError: one is wrong.
    """
    whole = {
        "seed": (0, 1 << 63), "num_sequences": (1, MAX_ANSWERS), "min_new_tokens": (0, 1 << 31),
        "priority": (-(1 << 31), 1 << 31),
    }  # fmt: skip
    for name, (least, most) in whole.items():
        value = getattr(request, name)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{name}={value!r}: must be a whole number from {least} to {most}")
    longest = request.max_new_tokens
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ConfigError(f"max_new_tokens={longest!r}: must be a whole number of at least 1")
    if request.overflow not in RULES:
        raise ConfigError(f"overflow={request.overflow!r}: must be one of {', '.join(RULES)}")
    if request.grammar is not None:
        request.grammar.check()
    if request.adapters:  # models of the daemon have none
        raise ConfigError(f"a request with {len(request.adapters)} adapters: the model was loaded without")
    if not all(type(id) is int for id in request.stop_token_ids):
        raise ConfigError("stop_token_ids must be whole numbers")
    _check_beams(request)
    _check_drafts(request)
    for moment in (request.arrival, request.deadline if request.deadline is not None else 0.0):
        if type(moment) not in (int, float) or not math.isfinite(moment):
            raise ConfigError("arrival and deadline must be finite numbers")
    for field in fields(SamplingParams):
        value = getattr(request.sampling, field.name)
        if field.name in SEQUENCES:
            _check_sequences(field.name, value)
        elif type(value) not in _NUMBERS[str(field.type)] or not abs(value) <= MAX_NUMBER:
            raise ConfigError(f"{field.name}={value!r}: must be of type {field.type} and at most {MAX_NUMBER}")


def _check_beams(request: EngineRequest) -> None:
    """Check the parameters of a beam search from another process.

    Raises:
        ConfigError: one is wrong, or stop strings, which need the tokenizer.
    """
    beams = request.beams
    if request.stop_strings:
        raise ConfigError("stop_strings with num_beams: the daemon has no tokenizer; load without daemon=True")
    if beams is None:
        return
    if type(beams.num_beams) is not int or not 2 <= beams.num_beams <= MAX_BEAMS:
        raise ConfigError(f"num_beams={beams.num_beams!r}: must be a whole number from 2 to {MAX_BEAMS}")
    if type(beams.num_beam_groups) is not int or beams.num_beam_groups < 1 or beams.num_beams % beams.num_beam_groups:
        raise ConfigError(f"num_beam_groups={beams.num_beam_groups!r}: must divide num_beams={beams.num_beams}")
    size = beams.no_repeat_ngram_size
    if size is not None and (type(size) is not int or size < 1):
        raise ConfigError(f"no_repeat_ngram_size={size!r}: must be a whole number of at least 1")
    for value in (beams.diversity_penalty, beams.length_penalty):
        if type(value) not in (int, float) or not abs(value) <= 1e6:
            raise ConfigError(f"diversity_penalty and length_penalty must be finite numbers, not {value!r}")
    if beams.stop_criteria not in get_args(StopCriteria):
        raise ConfigError(f"stop_criteria={beams.stop_criteria!r}: must be one of {', '.join(get_args(StopCriteria))}")


def _check_drafts(request: EngineRequest) -> None:
    """Check how the tokens of a request from another process are drafted.

    Raises:
        ConfigError: a parameter is wrong.
    """
    drafts = request.drafts
    if drafts is None:
        return
    for name in ("max_ngram_size", "max_tokens"):
        value = getattr(drafts, name)
        if type(value) is not int or not 0 <= value <= LONGEST_DRAFT:
            raise ConfigError(f"{name}={value!r}: must be a whole number from 0 to {LONGEST_DRAFT}")
    if type(drafts.uses_model) is not bool:
        raise ConfigError(f"uses_model={drafts.uses_model!r}: must be True or False")
    if type(drafts.confidence) not in (int, float) or not 0 <= drafts.confidence <= 1:
        raise ConfigError(f"confidence={drafts.confidence!r}: must be a number from 0 to 1")


def _check_sequences(name: str, rows: tuple[tuple[Any, ...], ...]) -> None:
    """Check rows of token ids, or of a token id and a number.

    Raises:
        ConfigError: one is neither, or there are too many.
    """
    if sum(map(len, rows)) > MAX_SEQUENCE_TOKENS:
        raise ConfigError(f"{name} has more than {MAX_SEQUENCE_TOKENS} tokens")
    for row in rows:
        ids, bias = (row[:1], row[1:]) if name == "logit_bias" else (row, ())
        if not ids or not all(type(id) is int and id >= 0 for id in ids) or len(bias) != (name == "logit_bias"):
            raise ConfigError(f"{name}={row!r}: must be token ids" + (", and a number" if bias else ""))
        if not all(type(number) in (int, float) and math.isfinite(number) for number in bias):
            raise ConfigError(f"{name}={row!r}: must be a token id and a finite number")


def compile_language_model(
    source: LanguageSource, id: int, devices: Devices, on_progress: OnProgress = lambda event: None
) -> LanguageModel:
    """Load a language model on the first of its devices that can run it, and start its engine.

    Raises:
        ModelError, UnsupportedModelError, ConfigError, BlobError, DeviceError: as for ``StaticLLMPipeline``.
    """
    candidates = list(source.candidates)
    policy = make_policy(candidates[0].config.scheduler)
    model = LanguageModel(id, launch(source.directory, candidates, policy, on_progress), devices)
    model.engine.grammars = GrammarCompiler(lambda: read_vocabulary(read_tokenizer(source.directory)))
    return model
