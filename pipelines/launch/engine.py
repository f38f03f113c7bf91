"""Tries devices in turn, starts serving, and compiles the remaining programs in the background."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, OnProgress, ProgressEvent, Variant
from staticllm.devices import kind
from staticllm.errors import ClosedError, DeviceError
from staticllm.model_dir import DECODER_POSITIONS, max_positions

from ...compiler_passes.compiling.chain import AnyProgram
from ...compiler_passes.compiling.compile import DecoderPrograms
from ...compiler_passes.compiling.dry_run import random_feeds, run_apart
from ..engine.engine import Engine
from ..engine.jobs import JobHost
from ..engine.options import EngineOptions, options_of
from ..engine.request import EngineText
from ..loading.background import BackgroundLoader, BackgroundWork, DeferredPrograms
from ..loading.decoder_kind import LoadedDecoder
from ..loading.load import load
from ..programs.bind import BoundPrograms
from ..programs.model_runner import ModelRunner
from ..scheduling.interface import OWN_BOUND, Policy, TokenBound
from .arguments import Candidate

DeferredDecoder: TypeAlias = DeferredPrograms[Variant, ModelShape]
ReadText: TypeAlias = Callable[[], EngineText | None]
"""Returns what an engine needs of the tokenizer once its programs are loaded; None without a tokenizer."""
PRECISION = "INFERENCE_PRECISION_HINT"
PAUSE_SECONDS = 0.02
REST_SECONDS = 0.2
"""How long an engine is idle before programs of a blob set that its first answer does not need are imported."""
PATIENCE_SECONDS = 10.0
"""The longest wait for that: an engine that always serves one request gets its other programs too."""


@dataclass
class Launched:
    """An engine that serves from ``loaded`` on ``device``.

    If the CPU serves until the device can, these two change together with the engine's runner.
    """

    engine: Engine
    loaded: LoadedDecoder
    device: str
    background: BackgroundLoader | None = None
    """Loads further programs; None if all are loaded."""

    @property
    def config(self) -> StaticLLMConfig:
        return self.loaded.config

    @property
    def vocab_size(self) -> int:
        return self.loaded.programs.shape.vocab_size

    @property
    def kv_type(self) -> str:
        return self.loaded.programs.options.kv_type or ""

    @property
    def has_mapped_weights(self) -> bool:
        """Whether weights are read from their file as long as the model runs."""
        return self.loaded.has_mapped_weights

    def load_further(self, work: BackgroundWork, on_progress: OnProgress) -> None:
        """Prepare background work, which begins when ``background`` is started."""
        self.background = BackgroundLoader(work, on_progress)

    def note_switch(self, found: LoadedDevice) -> None:
        """Record that the engine runs another loaded model from now on."""
        self.loaded = found.loaded
        self.device = found.device

    def close(self, drain: bool = False) -> None:
        """End the background work and the engine, keep the costs that were measured, and drop the programs.

        A second call does nothing.
        """
        if self.background is not None:
            self.background.close()
        self.engine.close(drain)
        self.loaded.keep_costs()
        self.loaded = self.loaded.without_programs()


@dataclass(frozen=True)
class LoadedDevice:
    """A model that was loaded, and the device that it was loaded for."""

    loaded: LoadedDecoder
    device: str


def launch(
    directory: Path,
    candidates: Sequence[Candidate],
    policy: Policy,
    on_progress: OnProgress,
    read_text: ReadText = lambda: None,
    token_bound: TokenBound = OWN_BOUND,
    host: JobHost | None = None,
) -> Launched:
    """Load a model for the first device that can run it, and start an engine, which keeps ``token_bound``.

    ``host`` is the engine that owns the device; None if the new one does.

    Raises:
        DeviceError: no device can run the model; the message is that of the last one.
        StaticLLMError: as for ``load``.
    """
    begin = time.perf_counter()
    first = candidates[0]
    _warn_of_length(directory, first.config)
    if first.config.serve_from_cpu and kind(first.device) != "CPU":
        launched = _from_cpu_first(directory, candidates, policy, on_progress, read_text, token_bound)
        _serve(launched, on_progress, begin)
        return launched
    found = load_first(directory, candidates, on_progress)
    deferred = found.loaded.deferred
    try:
        engine = _make_engine(found.loaded, policy, read_text, token_bound, host)
        launched = Launched(engine, found.loaded, found.device)
        if deferred is not None:
            work = DeferredCompiler(launched.engine, found.loaded.programs, deferred)
            launched.load_further(work, on_progress)
        _serve(launched, on_progress, begin)
    except BaseException:  # for example of a callback: no thread will run that releases the deferred programs
        if deferred is not None:
            deferred.release()
        raise
    return launched


def _make_engine(
    loaded: LoadedDecoder, policy: Policy, read_text: ReadText, token_bound: TokenBound, host: JobHost | None = None
) -> Engine:
    """Make the engine of a loaded model; its thread starts with the first request. Costs are kept when it has measured some."""
    _keep_costs_when_measured(loaded)
    options = _engine_options(loaded, token_bound)
    return Engine(loaded.runner, policy, options, read_text(), host=host)


def _engine_options(loaded: LoadedDecoder, token_bound: TokenBound) -> EngineOptions:
    programs = loaded.programs
    return options_of(loaded.config, programs.shape, programs.options.mode, token_bound)


def _keep_costs_when_measured(loaded: LoadedDecoder) -> None:
    """Let the runner's probe write the costs when it has measured some."""
    kept = loaded.kept_costs  # not the loaded model: a cycle
    costs = loaded.runner.costs

    def keep() -> None:
        if kept is not None:
            kept.write(costs.stable)

    loaded.runner.probe.when_done(keep)


def _serve(launched: Launched, on_progress: OnProgress, begin: float) -> None:
    on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    if launched.background is not None:
        launched.background.start()


def _warn_of_length(directory: Path, config: StaticLLMConfig) -> None:
    limit = max_positions(directory, DECODER_POSITIONS)
    if limit is not None and config.max_seq_len > limit:
        warnings.warn(
            f"MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {config.max_seq_len}, but the model was made for {limit} positions "
            "(in its config.json): its answers beyond them may be wrong; lower a length",
            RuntimeWarning,
            stacklevel=4,
        )


def load_first(directory: Path, candidates: Sequence[Candidate], on_progress: OnProgress) -> LoadedDevice:
    """Load a model for the first device that can run it. A device that is missing or refuses is reported to ``on_progress``.

    Raises:
        StaticLLMError: as for ``launch``.
    """
    for index, candidate in enumerate(candidates, 1):
        try:
            loaded = load(directory, candidate.device, candidate.config, on_progress, candidate.explicit)
            return LoadedDevice(loaded, candidate.device)
        except DeviceError as error:
            if index == len(candidates):
                raise
            message = f"{error}; trying {candidates[index].device}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            on_progress(ProgressEvent("fallback", index, len(candidates), 0.0, message=message))
    raise DeviceError("no device was given: name one, or several with commas")


class DeferredCompiler:
    """Background work that compiles the deferred programs of a serving model and installs them in its engine."""

    def __init__(self, engine: Engine, programs: DecoderPrograms, deferred: DeferredDecoder) -> None:
        self._engine = engine
        self._deferred = deferred
        self._programs = programs
        self._compiled = dict(programs.compiled)
        engine.runner.probe.pause()  # costs are not measured beside a compilation

    def parts(self) -> Iterator[Callable[[], None]]:
        """Return one part per program, then one that writes all programs to the requested blob set."""
        if self._deferred.waits_for_rest:
            yield from self._pauses()
        with self._deferred.released():  # a probe may read them
            self._deferred.choose()
        together = self._deferred.programs
        yield from (partial(self.compile, variants) for variants in together)
        yield self._resume
        yield self.store

    def _pauses(self) -> Iterator[Callable[[], None]]:
        """Yield pauses until the engine was idle long enough or has several requests, for at most ``PATIENCE_SECONDS``."""
        begin = time.perf_counter()
        busy = begin
        while (now := time.perf_counter()) < min(begin + PATIENCE_SECONDS, busy + REST_SECONDS):
            if not self._engine.is_idle:
                busy = now
                if self._engine.steps.num_requests > 1:
                    return
            yield partial(time.sleep, PAUSE_SECONDS)

    def compile(self, variants: Sequence[Variant]) -> None:
        """Compile the variants of one program, run it once apart from the engine, and install it between two steps."""
        with self._deferred.released():
            found = {variant: self._deferred.compile(variant) for variant in variants}
            program = found[variants[0]]
            is_first = program not in self._compiled.values()
            self._compiled |= found
            if is_first:  # the first run packs the weights; no request waits for that
                run_apart(program, random_feeds(program, variants[0]))
        self._engine.run_between_steps(lambda: self._install(variants))

    def _install(self, variants: Sequence[Variant]) -> None:
        runner = self._engine.runner
        for variant in variants:
            _add_program(runner, variant, self._compiled[variant])
        self._deferred.note_costs(runner.costs, variants)
        runner.refresh_variants()

    def _resume(self) -> None:
        self._engine.run_between_steps(self._engine.runner.probe.resume)

    def store(self) -> None:
        """Write all programs, if a blob set was requested."""
        self._deferred.store(replace(self._programs, compiled=self._compiled))

    def release(self) -> None:
        """Unlock the cache entry. After an error, the costs of the programs that serve are measured from now on."""
        with suppress(ClosedError):
            self._resume()
        self._deferred.release()


def _bound_programs(runner: ModelRunner) -> BoundPrograms:
    assert isinstance(runner.programs, BoundPrograms), "a loaded model has bound programs"
    return runner.programs


def _add_program(runner: ModelRunner, variant: Variant, program: AnyProgram) -> None:
    """Add the program of a variant, also to those that run between blocks if it decodes."""
    _bound_programs(runner).add(variant, program)
    if isinstance(runner.inserted, BoundPrograms) and variant.rows == variant.sequences:
        runner.inserted.add(variant, program)


def _from_cpu_first(
    directory: Path,
    candidates: Sequence[Candidate],
    policy: Policy,
    on_progress: OnProgress,
    read_text: ReadText,
    token_bound: TokenBound,
) -> Launched:
    """Serve from the CPU until the device can serve; then the engine switches between two requests."""
    cpu = load(directory, "CPU", _config_of_cpu(candidates), on_progress)
    launched = Launched(_make_engine(cpu, policy, read_text, token_bound), cpu, "CPU")
    launched.load_further(DeviceSwitch(launched, directory, candidates, on_progress, token_bound), on_progress)
    return launched


class DeviceSwitch:
    """Background work that loads all programs of the model for the device and switches the engine to them."""

    def __init__(
        self,
        launched: Launched,
        directory: Path,
        candidates: Sequence[Candidate],
        on_progress: OnProgress,
        token_bound: TokenBound,
    ) -> None:
        self._launched = launched
        self._directory = directory
        self._candidates = candidates
        self._on_progress = on_progress
        self._token_bound = token_bound
        self._deferred: DeferredDecoder | None = None

    def parts(self) -> list[Callable[[], None]]:
        """Return one part, because a device's programs are used together or not at all."""
        return [self.switch]

    def switch(self) -> None:
        """Load for the first device that can run the model, and switch the engine to it."""
        found = load_first(self._directory, self._candidates, self._on_progress)
        self._deferred = found.loaded.deferred
        if self._deferred is not None:
            found = replace(found, loaded=_completed(found.loaded, self._deferred))
        _keep_costs_when_measured(found.loaded)
        options = _engine_options(found.loaded, self._token_bound)
        self._launched.engine.switch(found.loaded.runner, options, partial(self._launched.note_switch, found))

    def release(self) -> None:
        """Unlock the cache entry of the device's programs, if one was held."""
        if self._deferred is not None:
            self._deferred.release()


def _config_of_cpu(candidates: Sequence[Candidate]) -> StaticLLMConfig:
    """Return the config with which the CPU serves meanwhile: the CPU's defaults and the user's precision."""
    own = candidates[0].config
    known = next((found.config for found in candidates if found.device == "CPU"), own).device_properties
    precision = {name: value for name, value in known.items() if name == PRECISION}
    return replace(own, programs="auto", cache_dir=None, blob_path=None, export_blob=False, device_properties=precision,
                   prefill_config={}, generate_config={}, kv_cache_precision=None)  # fmt: skip


def _completed(loaded: LoadedDecoder, deferred: DeferredDecoder) -> LoadedDecoder:
    """Compile the deferred programs of a staged model before it serves, and return it complete; the CPU serves meanwhile."""
    with deferred.released():
        deferred.choose()
    compiled = {**loaded.programs.compiled, **{variant: deferred.compile(variant) for variant in deferred.variants}}
    programs = replace(loaded.programs, compiled=compiled)
    for variant in deferred.variants:
        _add_program(loaded.runner, variant, compiled[variant])
        _bound_programs(loaded.runner)[variant].run()
    loaded.runner.refresh_variants()
    deferred.store(programs)
    return replace(loaded, programs=programs, deferred=None)
