"""Compiles each program only once per test run. Each pipeline still has its own slots, buffers and engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from staticllm.compiler_passes.compiling import compile as compile_programs
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.diagnostics.reference import StatefulReference
from staticllm.pipelines.loading import decoder_kind, kind
from staticllm.pipelines.programs import warm_up

MAX_READ = 8  # models that were read and are not lowered yet: those of encoders never are, here
MAX_GROUPS = 64  # of programs that stay compiled: each has some hundred memory maps, and a process has at most 65530


class SharedPrograms:
    """Wraps the functions with which the loader reads, lowers and compiles, and caches their results.

    A lowered model is known by what its files hold, the passes and their options, a program by that, its variants and its
    properties. So copies of a model share programs, except programs for blobs, which name the weights' file: these are cached
    for the models in ``folders``, whose files never change.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._read: dict[int, tuple[Any, Path, tuple]] = {}  # models that were read but not lowered, by their identity
        self._lowered: dict = {}
        self._names: dict = {}
        self._compiled: dict = {}
        self._costs: dict = {}
        self._read_model, self._lower = kind.read_model, decoder_kind.lower
        self._keep_small_constants = kind.keep_small_constants
        self._compile_programs = compile_programs.compile_programs
        self._warm_up = warm_up.warm_up

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "read_model", self.read_model)
            patch.setattr(kind, "keep_small_constants", self.keep_small_constants)
            patch.setattr(decoder_kind, "lower", self.lower)
            patch.setattr(compile_programs, "compile_programs", self.compile_programs)
            patch.setattr(warm_up, "warm_up", self.warm_up)
            yield

    def read_model(self, core, path, weights=None, decrypt=None, model_file=MODEL_XML):
        model = self._read_model(core, path, weights, decrypt, model_file)
        folder = Path(path).resolve()
        if weights is None and decrypt is None and model_file == MODEL_XML and folder.is_dir():
            self._read[id(model)] = (model, folder, (digest_of(folder), "whole"))
            while len(self._read) > MAX_READ:
                self._read.pop(next(iter(self._read)), None)
        return model

    def keep_small_constants(self, model):
        _, folder, _ = self._read.pop(id(model), (None, None, None))
        if folder is not None and any(folder.is_relative_to(known) for known in self._folders):
            self._read[id(model)] = (model, folder, (str(folder), "for blobs"))
        return self._keep_small_constants(model)

    def lower(self, model, options, passes):
        _, _, of_model = self._read.pop(id(model), (None, None, None))
        if of_model is None:
            return self._lower(model, options, passes)
        name = (*of_model, options, passes)
        if name not in self._lowered:
            lowered = self._lowered[name] = self._lower(model, options, passes)
            self._names[id(lowered)] = name
        return self._lowered[name]

    def compile_programs(self, core, lowered, variants, options):
        name = self._names.get(id(lowered))
        if name is None:
            yield from self._compile_programs(core, lowered, variants, options)
            return
        properties = repr(sorted((part, sorted(values.items())) for part, values in options.properties.items()))
        for group in [(variant,) for variant in variants] if options.mode == "separate" else [tuple(variants)]:
            key = (name, group, options.device, options.layout, properties)
            if key not in self._compiled:
                self._compiled[key] = list(self._compile_programs(core, lowered, group, options))
                self._forget_the_oldest()
            yield from self._compiled[key]

    def _forget_the_oldest(self) -> None:
        while len(self._compiled) > MAX_GROUPS:
            gone = {id(compiled) for compiled in self._compiled.pop(next(iter(self._compiled)))}
            self._costs = {key: costs for key, costs in self._costs.items() if gone.isdisjoint(kept for _, kept in key)}

    def warm_up(self, bound, known_costs, on_progress, kept_costs=None):
        """Measure the costs of a program once; later pipelines only run it once, as with a blob set."""
        kept = {id(compiled) for group in self._compiled.values() for compiled in group}
        key = frozenset((variant, id(bound.compiled(variant))) for variant in bound)
        if known_costs or kept_costs or not all(compiled in kept for _, compiled in key):
            return self._warm_up(bound, known_costs, on_progress, kept_costs)
        costs = self._warm_up(bound, self._costs.get(key, {}), on_progress)
        self._costs.setdefault(key, dict(costs.measured))
        return costs


def digest_of(folder: Path) -> str:
    """Return a digest of a model's graph and weights."""
    found = hashlib.blake2b()
    for file in (folder / MODEL_XML, (folder / MODEL_XML).with_suffix(".bin")):
        if file.is_file():  # its weights may be inside the graph
            found.update(file.read_bytes())
    return found.hexdigest()


class Original(StatefulReference):
    """The original model, with its answers cached for the whole test run."""

    def __init__(self, path: Path, rope_limits: tuple[int, ...] = ()) -> None:
        super().__init__(path, rope_limits=rope_limits)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        known = self._answers.get(tuple(prompt), [])
        if len(known) < count:
            known = self._answers[tuple(prompt)] = super().greedy(prompt, count)
        return known[:count]
