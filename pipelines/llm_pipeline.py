"""``StaticLLMPipeline``: a drop-in for ``openvino_genai.LLMPipeline`` as a desktop app uses it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgressEvent
from staticllm.errors import ConfigError, GenerationConfigError, ModelError, StaticLLMError
from staticllm.kvcache.sequence import Sequence
from staticllm.metrics import PerfMetrics
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.generation import Answer, Generation, metrics_of
from staticllm.pipelines.generation_options import GenerationOptions, copy_config, resolve
from staticllm.pipelines.inputs import Form, check_ids, encode_messages, encode_text, form_of, token_ids
from staticllm.pipelines.loader import device_properties, load
from staticllm.pipelines.sampler import Sampler
from staticllm.pipelines.streamers import TokenSink, make_sink
from staticllm.results import DecodedResults, EncodedResults, GeneratedText

Streamer: TypeAlias = Callable[[str], Any] | genai.StreamerBase | None


class StaticLLMPipeline:
    """Runs a stateful OpenVINO LLM as programs of fixed shape.

    Args:
        models_path: A directory exported by optimum-intel: ``openvino_model.xml`` and the OpenVINO tokenizer.
        args: ``device, config`` or ``tokenizer, device, config``, as in GenAI.
        device: ``CPU`` (the default), ``NPU``, ``GPU`` … as OpenVINO names it.
        config: A mapping of properties, or a ``StaticLLMConfig``.
        tokenizer: Instead of the one in ``models_path``.
        on_progress: Called with a ``ProgressEvent`` after each part of loading; what it raises aborts the loading.
        properties: GenAI's and OpenVINO's properties: ``MAX_PROMPT_LEN``, ``INFERENCE_PRECISION_HINT`` …

    Raises:
        ModelError: the directory is missing, half-written or not a language model.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, or refused a program.
        ConfigError: an unknown property or an impossible value.

    Calls from several threads are served one after the other.
    """

    def __init__(
        self,
        models_path: str | bytes | os.PathLike[str],
        *args: Any,
        device: str | None = None,
        config: Mapping[str, Any] | StaticLLMConfig | None = None,
        tokenizer: genai.Tokenizer | None = None,
        on_progress: Callable[[ProgressEvent], None] | None = None,
        **properties: Any,
    ) -> None:
        start = time.perf_counter()
        device, config, tokenizer = _positional(args, device, config, tokenizer)
        directory = check_model_dir(models_path, needs_tokenizer=tokenizer is None)
        self._config = _resolve_config(device, config, properties)
        self._tokenizer = tokenizer or _read_tokenizer(directory)
        self._generation_config = _read_generation_config(directory, self._tokenizer)
        self._runner, self._shape = load(directory, device, self._config, on_progress or (lambda event: None))
        self._sequence = self._runner.cache.open()
        self._is_settled = True  # False while a call runs, and after one that an exception ended
        self._history: list[dict[str, str]] | None = None
        self._rng = np.random.default_rng(0)
        self._lock, self._owner = threading.Lock(), 0
        self._load_ms = (time.perf_counter() - start) * 1e3

    @property
    def config(self) -> StaticLLMConfig:
        """The resolved configuration."""
        return self._config

    def generate(
        self,
        inputs: Any,
        generation_config: genai.GenerationConfig | Mapping[str, Any] | None = None,
        streamer: Streamer = None,
        **kwargs: Any,
    ) -> Any:
        """Generate one answer.

        Args:
            inputs: A ``str``, a list of one ``str``, token ids (numpy or ``openvino.Tensor``, ``[n]`` or ``[1, n]``;
                ``TokenizedInputs``) or a ``ChatHistory``.
            generation_config: Replaces the pipeline's own for this call.
            streamer: A callable that takes text, or an ``openvino_genai.StreamerBase`` that takes tokens. Its exceptions
                reach the caller; the pipeline stays usable.
            kwargs: Fields of ``GenerationConfig``, which win over both configs.

        Returns:
            ``GeneratedText`` (a ``str``) for a ``str``, ``DecodedResults`` for a list or a history, ``EncodedResults``
            for token ids.

        Raises:
            PromptError: an empty prompt, a batch, ids outside the vocabulary.
            PromptTooLongError: more than ``MAX_PROMPT_LEN`` tokens.
            GenerationConfigError: an unknown option or an impossible value.
        """
        form, sink = form_of(inputs), make_sink(streamer)
        base, overrides = self._base_config(generation_config, kwargs)
        call = _Call(resolve(base, overrides), sink, time.perf_counter())
        with self._exclusive():
            turn = self._turn(form, inputs)
            ids = encode_messages(self._tokenizer, turn) if turn else self._encode(form, inputs, call.options)
            answer, metrics = self._answer(ids, call, is_chat=turn is not None)
            if turn and not answer.is_dropped:
                self._history = [*turn, {"role": "assistant", "content": answer.text}]
        if form == "tokens":
            tokens = (ids if call.options.echo else []) + answer.tokens
            return EncodedResults([tokens], [answer.score], [answer.finish_reason], metrics)
        text = (self._decode(ids) if call.options.echo else "") + answer.text
        results = DecodedResults([text], [answer.tokens], [answer.score], [answer.finish_reason], metrics)
        return GeneratedText.of(results) if form == "text" else results

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The same as ``generate``."""
        return self.generate(*args, **kwargs)

    def start_chat(self, system_message: str = "") -> None:
        """From now on ``generate`` of a ``str``, or of a list of one, is a turn of one conversation."""
        with self._exclusive():
            self._history = [{"role": "system", "content": system_message}] if system_message else []

    def finish_chat(self) -> None:
        """Forget the conversation."""
        with self._exclusive():
            self._history = None

    def get_tokenizer(self) -> genai.Tokenizer:
        """The tokenizer, GenAI's own."""
        return self._tokenizer

    def get_generation_config(self) -> genai.GenerationConfig:
        """A copy of the config that calls start from."""
        return copy_config(self._generation_config)

    def set_generation_config(self, config: genai.GenerationConfig) -> None:
        """Calls start from this config from now on.

        Raises:
            GenerationConfigError: a value is impossible; the config before stays in force.
        """
        resolve(config, {})
        self._generation_config = self._complete(config)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """One call at a time. Other threads wait; the same thread, from within its streamer, would wait for itself."""
        if self._owner == threading.get_ident():
            raise StaticLLMError("generate is running in this thread: a streamer cannot call its own pipeline")
        with self._lock:
            self._owner = threading.get_ident()
            try:
                yield
            finally:
                self._owner = 0

    def _base_config(self, config: object, overrides: dict[str, Any]) -> tuple[genai.GenerationConfig, dict[str, Any]]:
        if isinstance(config, Mapping):
            return self._generation_config, {**config, **overrides}
        if config is None:
            return self._generation_config, overrides
        if not isinstance(config, genai.GenerationConfig):
            raise GenerationConfigError(
                f"generation_config is a {type(config).__name__}: must be an openvino_genai.GenerationConfig or a dict"
            )
        return self._complete(config), overrides

    def _complete(self, config: genai.GenerationConfig) -> genai.GenerationConfig:
        """A copy with what the caller left open taken from the model's own config, as GenAI does: where answers end."""
        copied, own = copy_config(config), self._generation_config
        if not copied.stop_token_ids:
            copied.stop_token_ids = own.stop_token_ids
        if copied.eos_token_id == -1 and own.eos_token_id != -1:
            copied.set_eos_token_id(own.eos_token_id)
        return copied

    def _turn(self, form: Form, inputs: Any) -> list[dict[str, str]] | None:
        """The conversation up to this prompt, if there is a conversation and the prompt is text."""
        if self._history is None or form not in ("text", "texts"):
            return None
        text = inputs if form == "text" else inputs[0]
        return [*self._history, {"role": "user", "content": text}]

    def _encode(self, form: Form, inputs: Any, options: GenerationOptions) -> list[int]:
        if form == "tokens":
            return token_ids(inputs)
        if form == "history":
            return encode_messages(self._tokenizer, inputs)
        return encode_text(self._tokenizer, inputs if form == "text" else inputs[0], options.apply_chat_template)

    def _answer(self, ids: list[int], call: _Call, is_chat: bool) -> tuple[Answer, PerfMetrics]:
        encoded = time.perf_counter()
        check_ids(ids, self._shape.vocab_size, self._config.max_prompt_len, is_chat)
        call.options.check_room(len(ids))
        sampler = Sampler(call.options.sampling, ids, self._shape.vocab_size, self._rng_for(call.options))
        if not self._is_settled:  # an exception, Ctrl-C or the user's own, may have come between any two statements
            self._sequence = self._runner.reset()
        self._is_settled = False
        sequence = self._reuse(ids)
        answer = Generation(self._runner, sequence, call.options, sampler, self._decode, call.sink).run(ids)
        self._is_settled = True
        return answer, metrics_of(answer, len(ids), self._load_ms, call.started, encoded)

    def _reuse(self, ids: list[int]) -> Sequence:
        """The resident sequence, cut to the prefix that it shares with the prompt; the last token always runs."""
        shared = self._sequence.common_prefix(ids[:-1]) if self._config.prefix_caching else 0
        self._runner.cache.cut(self._sequence, shared)
        return self._sequence

    def _rng_for(self, options: GenerationOptions) -> np.random.Generator:
        """A seed starts its own stream, so that a call can be repeated; without one the pipeline's stream goes on."""
        seed = options.sampling.rng_seed
        return np.random.default_rng(seed) if seed else self._rng

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens)
        return text


@dataclass(frozen=True)
class _Call:
    """One call of ``generate``: its options, where its tokens go, and when it began (``time.perf_counter``)."""

    options: GenerationOptions
    sink: TokenSink
    started: float


def _positional(
    args: tuple[Any, ...], device: Any, config: Any, tokenizer: Any
) -> tuple[str, Any, genai.Tokenizer | None]:
    """GenAI's two orders: ``(path, device, config)`` and ``(path, tokenizer, device, config)``, by name or by place."""
    rest = list(args)
    if rest and (rest[0] is None or isinstance(rest[0], genai.Tokenizer)):
        tokenizer = rest.pop(0) or tokenizer
    if rest and not isinstance(rest[0], (Mapping, StaticLLMConfig)):
        if device is not None:
            raise ConfigError(f"the device is given twice: {rest[0]!r} by place and {device!r} by name")
        device = rest.pop(0)
    if rest and config is None:
        config = rest.pop(0)
    if rest:
        raise ConfigError(f"{len(args) + 1} positional arguments: at most models_path, tokenizer, device and config")
    if tokenizer is not None and not isinstance(tokenizer, genai.Tokenizer):
        raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}: must be an openvino_genai.Tokenizer")
    return "CPU" if device is None else device, config, tokenizer


def _resolve_config(device: str, config: Any, properties: dict[str, Any]) -> StaticLLMConfig:
    supported = device_properties(device)
    if isinstance(config, StaticLLMConfig):
        if properties:
            raise ConfigError(f"both a StaticLLMConfig and the property {next(iter(properties))!r}: give one of them")
        return config
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config is a {type(config).__name__}: must be a dict of properties or a StaticLLMConfig")
    return StaticLLMConfig.from_properties({**(config or {}), **properties}, supported)


def _read_tokenizer(directory: os.PathLike[str]) -> genai.Tokenizer:
    try:
        return genai.Tokenizer(directory)
    except RuntimeError as error:
        raise ModelError(
            f"the tokenizer in {str(directory)!r} cannot be read: {str(error).splitlines()[-1]}"
        ) from error


def _read_generation_config(directory: Any, tokenizer: genai.Tokenizer) -> genai.GenerationConfig:
    path = directory / "generation_config.json"
    try:
        config = genai.GenerationConfig(path) if path.is_file() else genai.GenerationConfig()
    except RuntimeError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if config.eos_token_id == -1 and tokenizer.get_eos_token_id() != -1:
        config.set_eos_token_id(tokenizer.get_eos_token_id())
    return config
