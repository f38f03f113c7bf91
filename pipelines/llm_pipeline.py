"""``StaticLLMPipeline``: a drop-in for ``openvino_genai.LLMPipeline`` as a desktop app uses it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import openvino_genai as genai
from staticllm.kvcache.sequence import Sequence
from staticllm.pipelines.generation import Answer, Generation
from staticllm.pipelines.generation_options import GenerationOptions, copy_config, resolve
from staticllm.pipelines.inputs import check_ids, encode_messages, encode_text, form_of, token_ids
from staticllm.pipelines.loader import device_properties, load
from staticllm.pipelines.sampler import Sampler
from staticllm.pipelines.streamers import make_sink

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgressEvent
from staticllm.errors import ConfigError, GenerationConfigError, ModelError
from staticllm.metrics import MICRO, PerfMetrics
from staticllm.model_dir import check_model_dir
from staticllm.results import DecodedResults, EncodedResults, GeneratedText

Streamer: TypeAlias = Callable[[str], Any] | genai.StreamerBase | None


class StaticLLMPipeline:
    """Runs a stateful OpenVINO LLM as programs of fixed shape.

    Args:
        models_path: A directory exported by optimum-intel: ``openvino_model.xml`` and the OpenVINO tokenizer.
        device: ``CPU``, ``NPU``, ``GPU`` … as OpenVINO names it. A ``Tokenizer`` may stand before it, as in GenAI.
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
        models_path: str | os.PathLike[str],
        device: str | genai.Tokenizer = "CPU",
        *args: Any,
        config: Mapping[str, Any] | StaticLLMConfig | None = None,
        tokenizer: genai.Tokenizer | None = None,
        on_progress: Callable[[ProgressEvent], None] = lambda event: None,
        **properties: Any,
    ) -> None:
        start = time.perf_counter()
        device, tokenizer, config = _positional(device, args, tokenizer, config)
        directory = check_model_dir(models_path)
        self._config = _resolve_config(device, config, properties)
        self._tokenizer = tokenizer or _read_tokenizer(directory)
        self._generation_config = _read_generation_config(directory, self._tokenizer)
        self._runner, self._shape = load(directory, device, self._config, on_progress)
        self._sequence = self._runner.cache.open()
        self._history: list[dict[str, str]] | None = None
        self._rng = np.random.default_rng(0)
        self._lock = threading.RLock()
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
        start = time.perf_counter()
        with self._lock:
            early = resolve(base, overrides, 0)
            if form == "text" and self._history is not None:
                return GeneratedText.of(self._chat_turn(inputs, base, overrides, sink, start))
            ids = self._encode(form, inputs, early.apply_chat_template)
            answer, metrics = self._answer(ids, base, overrides, sink, start)
        if form == "tokens":
            tokens = (ids if early.echo else []) + answer.tokens
            return EncodedResults([tokens], [answer.score], [answer.finish_reason], metrics)
        results = self._decoded(answer, metrics, self._decode(ids) if early.echo else "")
        return GeneratedText.of(results) if form == "text" else results

    def start_chat(self, system_message: str = "") -> None:
        """From now on ``generate(str)`` is a turn of one conversation."""
        with self._lock:
            self._history = [{"role": "system", "content": system_message}] if system_message else []

    def finish_chat(self) -> None:
        """Forget the conversation."""
        with self._lock:
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
        resolve(config, {}, 0)
        copied = copy_config(config)
        if copied.eos_token_id == -1 and self._generation_config.eos_token_id != -1:
            copied.set_eos_token_id(self._generation_config.eos_token_id)
        self._generation_config = copied

    def _base_config(self, config: object, overrides: dict[str, Any]) -> tuple[genai.GenerationConfig, dict[str, Any]]:
        if isinstance(config, Mapping):
            return self._generation_config, {**config, **overrides}
        if config is None:
            return self._generation_config, overrides
        if not isinstance(config, genai.GenerationConfig):
            raise GenerationConfigError(
                f"generation_config is a {type(config).__name__}: must be an openvino_genai.GenerationConfig or a dict"
            )
        if config.eos_token_id == -1:  # GenAI as well fills in what the caller left open
            overrides = {"eos_token_id": self._generation_config.eos_token_id, **overrides}
        return config, overrides

    def _encode(self, form: str, inputs: Any, apply_chat_template: bool) -> list[int]:
        if form == "tokens":
            return token_ids(inputs)
        if form == "history":
            return encode_messages(self._tokenizer, inputs)
        return encode_text(self._tokenizer, inputs if form == "text" else inputs[0], apply_chat_template)

    def _chat_turn(self, text: str, base: Any, overrides: dict[str, Any], sink: Any, start: float) -> DecodedResults:
        assert self._history is not None
        turn = [*self._history, {"role": "user", "content": text}]
        ids = encode_messages(self._tokenizer, turn)
        answer, metrics = self._answer(ids, base, overrides, sink, start, is_chat=True)
        if not answer.is_dropped:
            self._history = [*turn, {"role": "assistant", "content": answer.text}]
        return self._decoded(answer, metrics, "")

    def _answer(
        self, ids: list[int], base: Any, overrides: dict[str, Any], sink: Any, start: float, is_chat: bool = False
    ) -> tuple[Answer, PerfMetrics]:
        encoded = time.perf_counter()
        check_ids(ids, self._shape.vocab_size, self._config.max_prompt_len, is_chat)
        options = resolve(base, overrides, len(ids))
        sequence = self._reuse(ids)
        sampler = Sampler(options.sampling, ids, self._shape.vocab_size, self._rng_for(options))
        generation = Generation(self._runner, sequence, options, sampler, self._decode, sink)
        try:
            answer = generation.run(ids)
        except BaseException:  # Ctrl-C and the user's own exceptions too: no half-committed rows may stay
            self._sequence = self._runner.reset()
            raise
        return answer, self._metrics(answer, len(ids), start, encoded)

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

    def _decoded(self, answer: Answer, metrics: PerfMetrics, echoed: str) -> DecodedResults:
        return DecodedResults([echoed + answer.text], [answer.tokens], [answer.score], [answer.finish_reason], metrics)

    def _metrics(self, answer: Answer, num_input: int, start: float, encoded: float) -> PerfMetrics:
        metrics = PerfMetrics(self._load_ms)
        metrics.count(num_input, len(answer.tokens), answer.num_cached)
        raw, times = metrics.raw_metrics, answer.token_times
        raw.generate_durations.append((time.perf_counter() - start) * MICRO)
        raw.tokenization_durations.append((encoded - start) * MICRO)
        raw.inference_durations.append(sum(answer.device_seconds) * MICRO)
        raw.m_times_to_first_token.extend((first - start) * MICRO for first in times[:1])
        raw.m_durations.extend((after - before) * MICRO for before, after in pairwise(times))
        raw.m_new_token_times.extend(moment * 1e3 for moment in times)
        raw.m_batch_sizes.extend([1] * len(times))
        num_decoded = max(len(times) - 1, 0)
        raw.token_infer_durations.extend(
            s * MICRO for s in answer.device_seconds[len(answer.device_seconds) - num_decoded :]
        )
        return metrics


def _positional(
    device: Any, rest: tuple[Any, ...], tokenizer: Any, config: Any
) -> tuple[str, genai.Tokenizer | None, Any]:
    """GenAI's two orders: ``(path, device, config)`` and ``(path, tokenizer, device, config)``."""
    given = [device, *rest]
    if isinstance(given[0], genai.Tokenizer):
        tokenizer, given = given[0], given[1:] or ["CPU"]
    if len(given) > 2:
        raise ConfigError(f"{len(rest) + 2} positional arguments: at most models_path, tokenizer, device and config")
    return given[0], tokenizer, given[1] if len(given) == 2 else config


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
