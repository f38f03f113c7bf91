"""From what a pipeline is asked for to an engine that serves: devices in turn, what can serve first, the rest meanwhile."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgressEvent, Variant
from staticllm.errors import DeviceError
from staticllm.model_dir import max_positions
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.model_loader.background import BackgroundLoader
from staticllm.pipelines.model_loader.load import DeferredPrograms, Loaded, load, make_engine, options_of
from staticllm.pipelines.programs.build import OnProgress
from staticllm.pipelines.programs.dry_run import random_feeds, run_apart
from staticllm.pipelines.scheduling.interface import Policy

PRECISION = "INFERENCE_PRECISION_HINT"
Candidate = tuple[str, StaticLLMConfig]
"""A device, and the config for it: devices know different properties."""


@dataclass
class Launched:
    """An engine that serves from ``loaded``, on ``device``; ``background`` is what still goes on, None if all is there.

    Where the CPU serves until the device can, ``loaded`` and ``device`` change with the engine's runner.
    """

    engine: Engine
    loaded: Loaded
    device: str
    background: BackgroundLoader | None = None


def launch(directory: Path, candidates: Sequence[Candidate], policy: Policy, on_progress: OnProgress) -> Launched:
    """Load for the first device that can, and serve.

    Raises:
        ModelError, UnsupportedModelError, ConfigError, BlobError
        DeviceError: no device could; what the last one said.
    """
    begin = time.perf_counter()
    device, config = candidates[0]
    _warn_of_length(directory, config)
    if config.serve_from_cpu and device.split(".", maxsplit=1)[0] != "CPU":
        launched = _from_cpu_first(directory, candidates, policy, on_progress)
        _serve(launched, on_progress, begin)
        return launched
    loaded, device = load_first(directory, candidates, on_progress)
    try:
        engine = make_engine(loaded, policy)
        launched = Launched(engine, loaded, device, _the_rest(engine, loaded, on_progress))
        _serve(launched, on_progress, begin)
    except BaseException:  # a callback's own, say: nothing will run that would release what the rest holds
        if loaded.rest is not None:
            loaded.rest.release()
        raise
    return launched


def _serve(launched: Launched, on_progress: OnProgress, begin: float) -> None:
    on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    if launched.background is not None:
        launched.background.start()


def _warn_of_length(directory: Path, config: StaticLLMConfig) -> None:
    limit = max_positions(directory)
    if limit is not None and config.max_seq_len > limit:
        warnings.warn(
            f"MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {config.max_seq_len}, the model was made for {limit} positions "
            "(max_position_embeddings in its config.json): what it says beyond them may be nonsense; lower a length",
            RuntimeWarning,
            stacklevel=4,
        )


def load_first(directory: Path, candidates: Sequence[Candidate], on_progress: OnProgress) -> tuple[Loaded, str]:
    """What the first device that can has loaded. One that is not there, or refuses, is reported and passed over."""
    for index, (device, config) in enumerate(candidates, 1):
        try:
            return load(directory, device, config, on_progress), device
        except DeviceError as error:
            if index == len(candidates):
                raise
            message = f"{error}; trying {candidates[index][0]}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            on_progress(ProgressEvent("fallback", index, len(candidates), 0.0, message=message))
    raise DeviceError("no device was given: name one, or several with commas")


def _the_rest(engine: Engine, loaded: Loaded, on_progress: OnProgress) -> BackgroundLoader | None:
    rest = loaded.rest
    if rest is None:
        return None
    compiled = dict(loaded.programs.compiled)

    def add(variant: Variant) -> None:
        program = rest.compile(variant)
        is_first = program not in compiled.values()
        compiled[variant] = program
        if is_first:  # it packs its weights: nobody waits for it
            run_apart(program, random_feeds(program, variant))

        def enter() -> None:
            engine.runner.programs.add(variant, program)  # type: ignore[attr-defined]
            engine.runner.refresh_variants()

        engine.run_between_steps(enter)

    def parts() -> list[Callable[[], None]]:
        adding = [lambda variant=variant: add(variant) for variant in rest.variants]
        return [*adding, lambda: rest.finish(replace(loaded.programs, compiled=compiled))]

    return BackgroundLoader(parts, on_progress, rest.release)


def _from_cpu_first(
    directory: Path, candidates: Sequence[Candidate], policy: Policy, on_progress: OnProgress
) -> Launched:
    """The CPU serves until the device can; then a switch between two requests."""
    cpu = load(directory, "CPU", _config_of_cpu(candidates), on_progress)
    launched = Launched(make_engine(cpu, policy), cpu, "CPU")
    held: list[DeferredPrograms] = []

    def switch() -> None:
        loaded, device = load_first(directory, candidates, on_progress)
        if loaded.rest is not None:
            held.append(loaded.rest)
            loaded = _completed(loaded, loaded.rest)

        def is_installed() -> None:
            launched.loaded, launched.device = loaded, device

        launched.engine.switch(loaded.runner, options_of(loaded), is_installed)

    def release() -> None:
        for rest in held:
            rest.release()

    launched.background = BackgroundLoader(lambda: [switch], on_progress, release)
    return launched


def _config_of_cpu(candidates: Sequence[Candidate]) -> StaticLLMConfig:
    """What the CPU serves with meanwhile: its own defaults, and the precision that was asked for."""
    own = candidates[0][1]
    known = next((config for device, config in candidates if device == "CPU"), own).device_properties
    precision = {name: value for name, value in known.items() if name == PRECISION}
    return replace(own, programs="auto", cache_dir=None, blob_path=None, export_blob=False, device_properties=precision,
                   prefill_config={}, generate_config={}, kv_cache_precision=None, asked=frozenset())  # fmt: skip


def _completed(loaded: Loaded, rest: DeferredPrograms) -> Loaded:
    """All programs of a staged load, before anybody is served from it: the CPU serves meanwhile."""
    compiled = {**loaded.programs.compiled, **{variant: rest.compile(variant) for variant in rest.variants}}
    programs = replace(loaded.programs, compiled=compiled)
    for variant in rest.variants:
        loaded.runner.programs.add(variant, compiled[variant])  # type: ignore[attr-defined]
        loaded.runner.programs[variant].run()
    loaded.runner.refresh_variants()
    rest.finish(programs)
    return replace(loaded, programs=programs, rest=None)
