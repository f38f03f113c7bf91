"""``StaticLLMPipeline`` is a drop-in replacement for ``openvino_genai.LLMPipeline`` that serves many requests at once."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeAlias, overload

import openvino_genai as genai

from staticllm.config import Scheduler, StaticLLMConfig, as_float
from staticllm.core import ProgressEvent
from staticllm.errors import ConfigError, GenerationConfigError, shown
from staticllm.model_dir import forget_in_memory
from staticllm.results import DecodedResults, EncodedResults, GeneratedText
from staticllm.system.heap import return_free_memory
from staticllm.system.load_progress import LoadProgress, check_receiver
from staticllm.system.threads import close_when_collected

from .chat_session import ChatSession
from .daemon_client.remote_engine import DaemonHome
from .daemon_client.remote_launch import RemoteLaunched, check_home, check_sendable, remote_launcher
from .decisions.answers import Decision
from .decisions.calibration import Calibration
from .decisions.decider import Decider, DecisionLimits
from .decisions.handle import DecisionHandle
from .decisions.questions import Question, Reading
from .engine.client import EngineClient
from .engine.engine import Engine
from .engine.overflow import OverflowRule
from .engine.request import OutputQueue, check_priority
from .launch.arguments import model_path_of, named_in_memory, positional, resolve_candidates
from .launch.draft_origin import take_draft_origin, use_draft
from .launch.engine import Launched, launch
from .launch.text_reader import TextReader
from .loading.weights_watch import watch_of
from .profiling.stats import Stats
from .profiling.trace import MAX_RECORDS, Trace
from .scheduling.interface import Policy
from .scheduling.planner import make_policy
from .snapshots import ModelSnapshots
from .text.call import GenerateCall
from .text.chat_prompt import Prompt
from .text.handle import GenerationHandle, answers_of
from .text.input_processor import InputProcessor, check_deadline
from .text.inputs import Inputs, TokenInputs, form_of
from .text.output_processor import RequestOutput, Results, results_of
from .text.stop_checker import StopChecker
from .text.streamers import TokenSink, check_callback, make_sink, stream
from .text.tokenizer_tools import TokenizerTools

Streamer: TypeAlias = Callable[[str], genai.StreamingStatus | bool | None] | genai.StreamerBase | None
GenerationConfig: TypeAlias = genai.GenerationConfig | Mapping[str, object] | None


class StaticLLMPipeline:
    """Runs a stateful OpenVINO LLM as programs of fixed shape, for many requests at once.

    Args:
        models_path: A directory exported by optimum-intel: ``openvino_model.xml`` and the OpenVINO tokenizer. Or the text
            of an IR's XML, for a model in memory.
        args: ``device, config`` or ``tokenizer, device, config``, as in GenAI; for a model in memory
            ``weights, tokenizer, device, generation_config``.
        device: ``CPU`` (the default), ``NPU``, ``GPU`` … as OpenVINO names it. Of several (``NPU,CPU``) the first one that can
            run the model is used. ``AUTO`` stands for NPU, GPU and CPU, as far as they are present.
        config: A mapping of properties, or a ``StaticLLMConfig``.
        tokenizer: Replaces the one in ``models_path``.
        on_progress: Called with a ``ProgressEvent`` after each part of loading; an exception in it aborts the loading.
        scheduler: Scheduling policy: a name, or an object with a method ``plan(view)`` (docs/scheduling.md). Defaults to
            ``config.scheduler``.
        daemon: Whether the model runs in the daemon, which programs of this user share, or a ``DaemonHome`` (docs/daemon.md).
        properties: GenAI's and OpenVINO's properties: ``MAX_PROMPT_LEN``, ``adapters``, ``draft_model`` …

    Raises:
        ModelError: the directory is missing, half-written or not a language model.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, or it refused a program.
        ConfigError: a property is unknown or has an impossible value.

    Any thread may call the methods. One thread owns the device and serves all requests together; ``close`` ends it, and so
    does leaving a ``with`` block, deleting the pipeline or ending the process.
    """

    _launch = staticmethod(launch)  # staticllm.testing replaces it
    _launch_in_daemon = staticmethod(remote_launcher)

    def __init__(
        self,
        models_path: str | bytes | os.PathLike[str] | None = None,
        *args: object,
        device: str | None = None,
        config: Mapping[str, object] | StaticLLMConfig | None = None,
        tokenizer: genai.Tokenizer | None = None,
        on_progress: Callable[[ProgressEvent], None] | None = None,
        scheduler: Scheduler | Policy | None = None,
        daemon: bool | DaemonHome = False,
        **properties: object,
    ) -> None:
        start = time.perf_counter()
        check_receiver(on_progress)
        check_home(daemon)
        given, draft = take_draft_origin(positional(args, device, config, tokenizer), properties)
        given = named_in_memory(given, properties)
        candidates = resolve_candidates(given.device, given.config, properties)
        policy = make_policy(candidates[0].config.scheduler if scheduler is None else scheduler)
        if daemon:
            check_sendable(scheduler)
        progress = LoadProgress(on_progress, num_loads=1 if draft is None or daemon else 2)
        model_path, candidates = model_path_of(models_path, given, candidates, progress)
        self._forget_model = weakref.finalize(self, forget_in_memory, model_path)
        with TextReader(model_path, given, progress) as reader:
            self._launched: Launched | RemoteLaunched
            if daemon:
                start_engine = self._launch_in_daemon(daemon, draft, has_own_tokenizer=given.tokenizer is not None)
                self._launched = start_engine(model_path, candidates, policy, reader.on_progress)
            else:
                self._launched = self._launch(model_path, candidates, policy, reader.on_progress, reader.engine_text)
            text = reader.files()
            use_draft(None if daemon else draft, self._launched, text.tokenizer, reader.on_progress)
            progress.finish()
        tools = text.tools
        self._tools = tools
        self._engine: EngineClient = self._launched.engine
        self._stop_checker = StopChecker(self._engine)
        close_when_collected(self, _close, self._launched, self._stop_checker, tools)
        self._input_processor = InputProcessor(
            tools, text.generation_config, candidates[0].config.adapters, text.file_options, draft is not None
        )
        self._chat = ChatSession(tools)
        self._decider: Decider | None = None
        self._snapshots = ModelSnapshots(model_path, self._launched, self._input_processor)
        self._watch = watch_of(model_path, self.config, self._launched.has_mapped_weights)
        self._load_ms = (time.perf_counter() - start) * 1e3

    @property
    def config(self) -> StaticLLMConfig:
        """The resolved configuration that is in use now; with ``SERVE_FROM_CPU`` first the CPU's, then the device's."""
        return self._launched.config

    @overload
    def generate(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload] - a str is a Sequence[str]
        self,
        inputs: str,
        generation_config: GenerationConfig = ...,
        streamer: Streamer = ...,
        *,
        overflow: OverflowRule = ...,
        priority: int = ...,
        **kwargs: object,
    ) -> GeneratedText: ...

    @overload
    def generate(
        self,
        inputs: TokenInputs,
        generation_config: GenerationConfig = ...,
        streamer: Streamer = ...,
        *,
        overflow: OverflowRule = ...,
        priority: int = ...,
        **kwargs: object,
    ) -> EncodedResults: ...

    @overload
    def generate(
        self,
        inputs: Sequence[str] | genai.ChatHistory | Sequence[Mapping[str, object]],
        generation_config: GenerationConfig = ...,
        streamer: Streamer = ...,
        *,
        overflow: OverflowRule = ...,
        priority: int = ...,
        **kwargs: object,
    ) -> DecodedResults: ...

    def generate(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig = None,
        streamer: Streamer = None,
        *,
        overflow: OverflowRule = "stop",
        priority: int = 0,
        **kwargs: object,
    ) -> Results:
        """Generate the answers to one or more prompts; several prompts run together.

        Args:
            inputs: ``str``, list of ``str``, token ids (``[n]`` or ``[batch, n]``), ``ChatHistory`` or list of messages.
            generation_config: Replaces the pipeline's own for this call.
            streamer: A callable that takes text, or an ``openvino_genai.StreamerBase`` that takes lists of tokens; only for
                one prompt. It runs in the calling thread; its exceptions reach the caller, and the pipeline stays usable.
            overflow: If a conversation fills its slots: ``stop``, ``truncate_middle``, ``shift``, ``context_shift``.
            priority: Requests with a higher priority are served first; those below 0 are proactive: nobody waits for them.
            kwargs: Fields of ``GenerationConfig``, which override both configs, and our own options (docs/generation.md).

        Returns:
            ``GeneratedText`` (a ``str``) for a ``str``, ``EncodedResults`` for token ids, else ``DecodedResults``.

        Raises:
            PromptError: a prompt is empty or has ids outside the vocabulary, or the chat template refuses it.
            PromptTooLongError: a prompt has more than ``MAX_PROMPT_LEN`` tokens, and ``overflow`` is ``stop``.
            GenerationConfigError: an option is unknown or has an impossible value.
            AdapterError: one of ``adapters`` is not among those that the pipeline was loaded with.
            BusyError: ``MAX_WAITING`` requests are waiting.
            ClosedError: the pipeline was closed, or this is a forked child of the process that loaded it.
            ModelError: the weights file was overwritten while it is in use.
        """
        self._check_usable()
        form = form_of(inputs)
        sink = None if streamer is None else make_sink(streamer)
        call = self._input_processor.call(form, generation_config, kwargs, overflow=overflow, priority=priority)
        if sink is not None:
            call.check_single("streamer")
        decode = self._tools.decode
        if self._chat.is_open and form != "history":  # a history is a conversation itself
            outputs = [self._take_turn(inputs, call, sink)]
        else:
            prompts = self._input_processor.encode(inputs, call)
            if sink is not None and len(prompts) != 1:
                raise GenerationConfigError(
                    f"a streamer for {len(prompts)} prompts: it could not tell them apart; submit each with a callback"
                )
            outputs = self._answers(prompts, call, sink)
        return results_of(form, outputs, decode, call.options.parsers, None if sink is None else sink.parsed)

    __call__ = generate

    def submit(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig = None,
        *,
        priority: int = 0,
        deadline_ms: float | None = None,
        overflow: OverflowRule = "stop",
        callback: Callable[[str], object] | None = None,
        **kwargs: object,
    ) -> GenerationHandle:
        """Submit one prompt and return at once. It is no turn of ``start_chat``: pass a ``ChatHistory`` for a chat.

        Args:
            inputs: One prompt, in any form that ``generate`` takes.
            generation_config: As for ``generate``.
            priority: Requests with a higher priority are served first; those below 0 are proactive: nobody waits for them.
            deadline_ms: The answer ends this many ms from now, finished or not (finish reason ``deadline``).
            overflow: As for ``generate``.
            callback: Called with text as it is generated, in a thread of its own; an exception in it cancels the request.
            kwargs: Fields of ``GenerationConfig``.

        Raises:
            BusyError: ``MAX_WAITING`` requests are waiting.
            PromptError, PromptTooLongError, GenerationConfigError: as for ``generate``.
        """
        self._check_usable()
        check_callback(callback)
        call = self._input_processor.call(
            form_of(inputs), generation_config, kwargs, overflow=overflow, priority=priority, deadline_ms=deadline_ms
        )
        prompt = self._single_prompt(inputs, call)
        if callback is not None:
            call.check_single("callback")
        handle = self._begin(prompt, call)
        if callback is not None:
            handle.call_back(callback)
        return handle

    def decide(
        self,
        state: str | Mapping[str, object] | Sequence[object],
        questions: Question | Sequence[Question],
        *,
        reading: Reading | None = None,
        orders: int | None = None,
        calibration: Calibration | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
    ) -> Decision:
        """Answer typed questions about one state with probabilities; no text is generated (docs/decide.md).

        The state runs once, or not at all if it is cached. An answer depends on the state and on its own question only. The
        adapters are those of the default generation config.

        Args:
            state: A text; or an object or a list, which are shown as JSON.
            questions: 1 to 400 values ``Predicate``, ``Choice`` and ``Score``.
            reading: ``list`` shows the options of a question together, ``branches`` each on its own. None for ``list``.
            orders: With ``list``: how many orders of the options of a choice are averaged, 1 to 4. None for 2.
            calibration: Temperatures for the probabilities (``staticllm calibrate``); None for none.
            priority: As for ``generate``.
            deadline_ms: The decision fails this many ms from now unless it has ended.

        Raises:
            QuestionError: a question or the state cannot be asked about; ``path`` says where the fault is.
            PromptTooLongError: state and question are longer than the model's longest sequence.
            PromptError: the model has no chat template, or thinks before every answer.
            DecisionCancelledError: the deadline is over.
            BusyError: ``MAX_WAITING`` decisions are in progress.
            ConfigError: an option has an impossible value, or the engine is in the daemon.
            ClosedError, ModelError: as for ``generate``.
        """
        decider = self._usable_decider(priority, deadline_ms)
        order = decider.order(state, questions, reading, orders, calibration)
        with decider.running(priority, deadline_ms) as run:
            return decider.answer(run, order)

    def submit_decision(
        self,
        state: str | Mapping[str, object] | Sequence[object],
        questions: Question | Sequence[Question],
        *,
        reading: Reading | None = None,
        orders: int | None = None,
        calibration: Calibration | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
    ) -> DecisionHandle:
        """Begin a decision and return at once: ``result()`` or ``await`` gives what ``decide`` returns. ``cancel()`` ends it.

        Args:
            state, questions, reading, orders, calibration, priority, deadline_ms: As for ``decide``.

        Raises:
            StaticLLMError: as for ``decide``; what goes wrong later is raised by the handle.
        """
        decider = self._usable_decider(priority, deadline_ms)
        order = decider.order(state, questions, reading, orders, calibration)
        return DecisionHandle(decider, order, priority, deadline_ms)

    def _usable_decider(self, priority: int, deadline_ms: float | None) -> Decider:
        self._check_usable()
        check_priority(priority)
        check_deadline(deadline_ms)
        if self._decider is None:
            limits = DecisionLimits(self.config.max_seq_len, self.config.max_waiting)
            self._decider = Decider(self.engine, self._tools, limits, lambda: self._input_processor.adapter_scales)
        return self._decider

    def check(
        self,
        inputs: Inputs,
        generation_config: GenerationConfig = None,
        *,
        overflow: OverflowRule = "stop",
        **kwargs: object,
    ) -> None:
        """Check one prompt and its options like ``submit``, and run nothing. A grammar is not compiled.

        Args:
            inputs, generation_config, overflow, kwargs: As for ``submit``.

        Raises:
            PromptError, PromptTooLongError, GenerationConfigError: as for ``generate``.
        """
        self._check_usable()
        call = self._input_processor.call(form_of(inputs), generation_config, kwargs, overflow=overflow)
        prompt = self._single_prompt(inputs, call)
        self._input_processor.prepare(prompt, call, self.config, self._launched.vocab_size)

    def _single_prompt(self, inputs: Inputs, call: GenerateCall) -> Prompt:
        prompts = self._input_processor.encode(inputs, call)
        if len(prompts) != 1:
            raise GenerationConfigError(f"submit takes one prompt, not {len(prompts)}: submit each")
        return prompts[0]

    def start_chat(self, system_message: str = "") -> None:
        """Begin a conversation: from now on each ``generate`` with one prompt (``str`` or token ids) is a turn of it."""
        self._chat.start(system_message)

    def finish_chat(self) -> None:
        """End the conversation of ``start_chat`` and forget its turns."""
        self._chat.finish()

    def save_snapshot(self, path: str | os.PathLike[str], inputs: Inputs | None = None) -> int:
        """Write the keys and values of a conversation to disk, so that a later process does not compute them again.

        Args:
            path: The file, which is written atomically.
            inputs: A prompt, whose longest cached prefix is saved. None means the conversation of ``start_chat``.

        Returns:
            The number of tokens that were saved.

        Raises:
            SnapshotError: no cached sequence begins with the prompt's tokens, or the file cannot be written.
        """
        ids = self._chat.ids() if inputs is None else self._ids_of(inputs)
        return self._snapshots.save(ids, path)

    def load_snapshot(self, path: str | os.PathLike[str]) -> int:
        """Read a file of ``save_snapshot``; prompts that begin with its tokens do not compute them again.

        Returns:
            The number of tokens.

        Raises:
            SnapshotError: the file is missing, damaged or of another model, or there is no room for its tokens.
        """
        return self._snapshots.load(path)

    def stats(self) -> Stats:
        """Return statistics since the model was loaded: latencies, shares of device time, padding, prefix hits, slots."""
        return self._engine.stats()

    def record(self, max_records: int = MAX_RECORDS) -> AbstractContextManager[Trace]:
        """Record every step of a ``with`` block: ``with pipe.record() as trace: …``, then ``trace.save("trace.json")``."""
        return self._engine.record(max_records)

    @property
    def device(self) -> str:
        """The device that runs the model now: of several the first one that can serve."""
        return self._launched.device

    @property
    def engine(self) -> Engine:
        """The engine that owns the device, for other models on it: ``StaticEmbeddingPipeline(path, engine=llm.engine)``.

        Its own methods are not part of the stable API.

        Raises:
            ConfigError: the engine is in the daemon.
        """
        if not isinstance(self._launched.engine, Engine):
            raise ConfigError("the engine is in the daemon: other models of this program do not run on it")
        return self._launched.engine

    def close(self, drain: bool = False) -> None:
        """Cancel all requests, or with ``drain`` wait for them, and give memory, threads and files back before it returns.

        Only a compiler that runs cannot be ended: it goes on alone, for seconds, and reads the model's files until then. Replace
        these by renaming, as ``staticllm export`` does, rather than by writing into them.
        """
        _close(self._launched, self._stop_checker, self._tools, drain)
        self._forget_model()

    @property
    def is_complete(self) -> bool:
        """Whether all programs are compiled. Until then fewer programs, or those of the CPU, serve the requests."""
        return (background := self._launched.background) is None or background.is_done

    def wait_until_complete(self, timeout: float | None = None) -> bool:
        """Wait until all programs are compiled. Return False if that takes longer than ``timeout`` seconds.

        Raises:
            ConfigError: ``timeout`` is no number of seconds.
            StaticLLMError: compiling failed; the programs that are ready continue to serve.
        """
        if timeout is not None and (as_float(timeout) is None or not 0 <= timeout <= threading.TIMEOUT_MAX):
            raise ConfigError(f"timeout={shown(timeout)}: must be a number of seconds, or None")
        return (background := self._launched.background) is None or background.wait(timeout)

    def __enter__(self) -> StaticLLMPipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def get_tokenizer(self) -> genai.Tokenizer:
        """Return the tokenizer, an object of GenAI."""
        return self._tools.tokenizer

    def get_generation_config(self) -> genai.GenerationConfig:
        """Return a copy of the default generation config."""
        return self._input_processor.generation_config

    def set_generation_config(self, config: genai.GenerationConfig) -> None:
        """Replace the default generation config, which every call starts from.

        Raises:
            GenerationConfigError: a value is impossible; the previous config stays in use.
        """
        self._input_processor.generation_config = config

    def _take_turn(self, inputs: Inputs, call: GenerateCall, sink: TokenSink | None) -> RequestOutput:
        """Run one turn of ``start_chat``'s conversation. A turn that its streamer cancels is not added to it."""
        turns = self._input_processor.turns(inputs, call)
        if len(turns) != 1 or call.options.num_sequences != 1:
            count = max(len(turns), call.options.num_sequences)
            raise GenerationConfigError(
                f"a chat takes one prompt and one answer per turn, not {count}: finish_chat first"
            )
        with self._chat.exclusive():
            prompt = self._chat.prompt_of(turns[0])
            (output,) = self._answers([prompt], replace(call, is_chat=True), sink)
            if not output.is_dropped:
                self._chat.add(turns[0], prompt, output)
        return output

    def _answers(self, prompts: Sequence[Prompt], call: GenerateCall, sink: TokenSink | None) -> list[RequestOutput]:
        """Run prompts, with a streamer one, and return their answers in order."""
        if sink is None:
            return answers_of(lambda prompt: self._begin(prompt, call), prompts)
        return [stream(self._begin(prompts[0], call), sink)]

    def _ids_of(self, inputs: Inputs) -> list[int]:
        call = self._input_processor.call(form_of(inputs), None, {})
        return self._input_processor.encode(inputs, call)[0].ids

    def _check_usable(self) -> None:
        self._engine.check_process()
        self._tools.check_open()
        if self._watch is not None:
            self._watch.check()

    def _begin(self, prompt: Prompt, call: GenerateCall) -> GenerationHandle:
        """Check a prompt, submit it to the engine, and return the handle."""
        prepared = self._input_processor.prepare(prompt, call, self.config, self._launched.vocab_size)
        queue = OutputQueue()
        request = prepared.request
        handle = GenerationHandle(self._engine, prepared, queue, self._load_ms, owner=self)
        if request.max_new_tokens != 0:
            if call.options.stop_strings and request.beams is None:
                self._stop_checker.watch(request, queue, prepared.detokenizer)
            try:
                self._engine.submit(request, queue, prepared.processors)
            except BaseException:
                self._stop_checker.forget(request.id)
                raise
        return handle


def _close(
    launched: Launched | RemoteLaunched, checker: StopChecker, tools: TokenizerTools, drain: bool = False
) -> None:
    launched.close(drain)
    checker.close()
    tools.close()
    return_free_memory()
