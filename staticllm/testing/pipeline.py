"""Provides a pipeline over the fake device, so that an application can be tested without a model and without a compilation."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import openvino_genai as genai

from staticllm.compiler_passes.compiling.compile import CompiledPrograms, CompileOptions, DecoderPrograms
from staticllm.compiler_passes.compiling.variants import choose_variants
from staticllm.config import Scheduler
from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import encoding
from staticllm.model_dir import demo_model_path
from staticllm.pipelines.engine.client import UserProcessors
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.options import EngineOptions, options_of
from staticllm.pipelines.engine.request import EngineRequest, EngineText, OutputQueue
from staticllm.pipelines.launch.arguments import Candidate
from staticllm.pipelines.launch.engine import Launched, ReadText
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.loading.kind import Loaded
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.testing.device import fake_runner, fake_shape

Reply: TypeAlias = str | Callable[[str], str]
"""The text of every answer, or a function from a prompt, as text after the chat template, to its answer."""


def fake_pipeline(
    reply: Reply | None = None,
    *,
    tokenizer: genai.Tokenizer | None = None,
    scheduler: Scheduler | Policy | None = None,
    on_progress: Callable[[ProgressEvent], None] | None = None,
    **properties: object,
) -> FakePipeline:
    """Return a pipeline over the fake device, which is ready in less than a second: nothing is compiled.

    All else is real: the tokenizer and chat template of the demo model, the engine and its thread, scheduling, KV slots,
    limits, streamers, chats, cancellation, statistics and errors. Use it as a fixture in the tests of an application:

        @pytest.fixture
        def pipe():
            with fake_pipeline(reply=lambda prompt: "sunny" if "weather" in prompt else "I do not know") as pipe:
                yield pipe

    Args:
        reply: The text of every answer, or a function from the prompt's text, after the chat template, to the answer. It runs
            on the caller's thread, once per request; an exception in it reaches the caller. The answer ends with the
            end-of-sequence token, unless ``max_new_tokens`` or the length of the conversation ends it before. None answers
            with tokens that ``fake_answer(prompt, num_new, vocab_size=pipe.vocab_size)`` predicts.
        tokenizer: Replaces that of the demo model; the answer then ends with its end-of-sequence token.
        scheduler: Scheduling policy, as for ``StaticLLMPipeline``.
        on_progress: Called with the ``ProgressEvent`` ``ready``.
        properties: Properties as for ``StaticLLMPipeline``: ``MAX_PROMPT_LEN``, ``MAX_NUM_SEQS``, ``MAX_WAITING`` …; those of
            compiling have no effect, and costs are not measured.

    Raises:
        ConfigError: a property is unknown or has an impossible value.
    """
    return FakePipeline(reply, tokenizer, scheduler, on_progress, properties)


class FakePipeline(StaticLLMPipeline):
    """The pipeline that ``fake_pipeline`` returns."""

    def __init__(
        self,
        reply: Reply | None,
        tokenizer: genai.Tokenizer | None,
        scheduler: Scheduler | Policy | None,
        on_progress: Callable[[ProgressEvent], None] | None,
        properties: dict[str, Any],
    ) -> None:
        replies = _Replies(tokenizer or genai.Tokenizer(str(demo_model_path())), reply)
        self._launch = partial(_launch, replies)
        super().__init__(
            demo_model_path(),
            "CPU",
            tokenizer=replies.tokenizer,
            on_progress=on_progress,
            scheduler=scheduler,
            **{"MEASURE_COSTS": False, **properties},  # a measurement reads what is left, which the fake device refuses
        )
        generation = self.get_generation_config()
        generation.set_eos_token_id(replies.end)
        generation.stop_token_ids = {replies.end}
        self.set_generation_config(generation)

    @property
    def vocab_size(self) -> int:
        """The number of token ids, for ``fake_answer``."""
        return self._launched.vocab_size


class _Replies:
    """The answers to the prompts so far. Callers' threads add prompts, and the engine's thread reads the answers."""

    def __init__(self, tokenizer: genai.Tokenizer, reply: Reply | None) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = len(tokenizer.get_vocab())
        self._reply = reply
        self.end = int(tokenizer.get_eos_token_id())
        self._answers: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def add(self, prompt: tuple[int, ...]) -> None:
        """Decide on the answer to a prompt."""
        if self._reply is None:
            return
        text = self._reply if isinstance(self._reply, str) else self._reply(self.tokenizer.decode(list(prompt)))
        with encoding(f"{len(text)} characters"):
            ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids.data if text else ()
        answer = (*(int(token) for row in ids for token in row), self.end)
        with self._lock:
            self._answers[prompt] = answer

    def next_token(self, tokens: Sequence[int]) -> int | None:
        """Return the next token of the answer to the longest prompt that these tokens continue; None if there is none."""
        with self._lock:
            known = list(self._answers.items())
        for prompt, answer in sorted(known, key=lambda entry: -len(entry[0])):
            given = tuple(tokens[len(prompt) :])
            if tuple(tokens[: len(prompt)]) == prompt and given == self._padded(answer, len(given)):
                return self._padded(answer, len(given) + 1)[-1]
        return None

    def _padded(self, answer: tuple[int, ...], length: int) -> tuple[int, ...]:
        """Return the first ``length`` tokens of an answer that goes on with end-of-sequence tokens (``ignore_eos``)."""
        return (*answer[:length], *[self.end] * (length - len(answer)))


class _ReplyingEngine(Engine):
    """An engine that tells the fake device of each prompt before it is submitted."""

    def __init__(
        self, runner: ModelRunner, policy: Policy, options: EngineOptions, text: EngineText | None, replies: _Replies
    ) -> None:
        super().__init__(runner, policy, options, text)
        self._replies = replies

    def submit(
        self, request: EngineRequest, queue: OutputQueue | None = None, processors: UserProcessors = ()
    ) -> OutputQueue:
        self._replies.add(request.prompt)
        return super().submit(request, queue, processors)


def _launch(
    replies: _Replies,
    directory: Path,
    candidates: Sequence[Candidate],
    policy: Policy,
    on_progress: OnProgress,
    read_text: ReadText,
) -> Launched:
    """Make the engine that ``launch`` would, over fake programs of the sizes that the config asks for."""
    start = time.perf_counter()
    config = candidates[0].config
    num_adapters = len(config.adapters.adapters) if config.adapters is not None else 0
    shape = fake_shape(vocab_size=replies.vocab_size, num_adapters=num_adapters)
    runner = fake_runner(
        choose_variants(config, "shared", shape),
        vocab_size=replies.vocab_size,
        next_token=replies.next_token,
        num_adapters=num_adapters,
    )
    programs: DecoderPrograms = CompiledPrograms(shape, CompileOptions("CPU", "shared", "f32", {}), {})
    loaded = Loaded(runner, programs, config, "compiled", has_mapped_weights=False)
    engine = _ReplyingEngine(runner, policy, options_of(config, shape, "shared"), read_text(), replies)
    on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - start))
    return Launched(engine, loaded, "CPU")
