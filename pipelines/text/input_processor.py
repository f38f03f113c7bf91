"""From the arguments of a call to what the engine needs: checked options, token ids, a stream of random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino_genai as genai

from staticllm.errors import GenerationConfigError, ModelError, last_line
from staticllm.pipelines.engine.overflow import OverflowRule, overflow_rule
from staticllm.pipelines.generation.options import GenerationOptions, copy_config, resolve
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.tokenization import Form, Prompt, encode_messages, encode_text, token_ids


@dataclass(frozen=True)
class Call:
    """How one call wants its requests served. ``started`` and ``deadline`` are ``time.perf_counter`` moments."""

    form: Form
    options: GenerationOptions
    overflow: OverflowRule
    priority: int
    deadline: float | None
    started: float
    is_chat: bool = False


class InputProcessor:
    """The tokenizer, and the options that calls start from."""

    def __init__(self, tokenizer: genai.Tokenizer, generation_config: genai.GenerationConfig) -> None:
        self.tokenizer = tokenizer
        self._generation_config = generation_config
        self._rng = np.random.default_rng(0)

    @property
    def generation_config(self) -> genai.GenerationConfig:
        """A copy of the config that calls start from."""
        return copy_config(self._generation_config)

    @generation_config.setter
    def generation_config(self, config: genai.GenerationConfig) -> None:
        resolve(config, {})
        self._generation_config = self._complete(config)

    def call(
        self,
        form: Form,
        config: object,
        overrides: dict[str, Any],
        overflow: str,
        priority: int,
        deadline_ms: float | None,
    ) -> Call:
        """
        Raises:
            GenerationConfigError: an unknown option or an impossible value.
        """
        started = time.perf_counter()
        options = resolve(*self._base_config(config, overrides))
        if not isinstance(priority, int):
            raise GenerationConfigError(f"priority={priority!r}: must be a whole number")
        if deadline_ms is not None and (not isinstance(deadline_ms, (int, float)) or not deadline_ms > 0):
            raise GenerationConfigError(f"deadline_ms={deadline_ms!r}: must be milliseconds, more than 0")
        deadline = None if deadline_ms is None else started + deadline_ms / 1e3
        return Call(form, options, overflow_rule(overflow), priority, deadline, started)

    def encode(self, inputs: Any, call: Call) -> list[Prompt]:
        """Token ids of every prompt."""
        if call.form == "tokens":
            return [Prompt(ids) for ids in token_ids(inputs)]
        if call.form == "history":
            if not call.options.apply_chat_template:
                raise GenerationConfigError(
                    "apply_chat_template=False with a chat history: leave it True, or pass a str"
                )
            return [encode_messages(self.tokenizer, inputs)]
        texts = [inputs] if call.form == "text" else inputs
        return [encode_text(self.tokenizer, text, call.options.apply_chat_template) for text in texts]

    def watch(self, options: GenerationOptions) -> Callable[[int], bool] | None:
        """What tells the engine that a stop string has come; the reader cuts the text."""
        if not options.stop_strings:
            return None
        stream = IncrementalDetokenizer(self.decode, options.stop_strings)

        def watch(token: int) -> bool:
            stream.push(token)
            return stream.is_stopped

        return watch

    def rng_for(self, options: GenerationOptions) -> np.random.Generator:
        """A seed starts its own stream, so that a call can be repeated; without one the pipeline's stream goes on."""
        seed = options.sampling.rng_seed
        return np.random.default_rng(seed or self._rng.integers(1, 2**63))

    def decode(self, tokens: list[int]) -> str:
        """
        Raises:
            ModelError: the tokenizer's files are damaged.
        """
        try:
            text: str = self.tokenizer.decode(tokens)
        except (RuntimeError, UnicodeError) as error:
            raise ModelError(f"the tokenizer cannot decode {len(tokens)} tokens: {last_line(error)}") from error
        return text

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
