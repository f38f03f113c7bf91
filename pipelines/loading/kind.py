"""What loading, compiling, storing and measuring programs must know of a kind of model; all else is written once.

A new kind says how a model is lowered and which sizes its programs have (``lower``), what a call of random values is
(``random_call``), and what runs its programs (``runner``); ``fits`` recognises its graph. A row in ``staticllm/kinds.py``
makes it known.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar

import openvino as ov
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, Part, ProgressEvent
from staticllm.devices import get_core
from staticllm.devices import kind as device_kind
from staticllm.errors import ModelError, quoted
from staticllm.model_dir import given_as, read_model, weights_of
from staticllm.system.files import user_cache
from staticllm.system.heap import return_large_blocks
from staticllm.system.long_calls import attended, told
from staticllm.system.mapped_weights import MappedWeights

from ...compiler_passes.artifacts.blob_set import json_properties
from ...compiler_passes.artifacts.fingerprint import (
    Fingerprint,
    file_digest,
    fingerprint_model,
    machine_values,
    with_article,
)
from ...compiler_passes.artifacts.manifest import Manifest
from ...compiler_passes.artifacts.measurements import KeptCosts, digests_in, probes_in
from ...compiler_passes.compiling.autotune import ProbeTimes
from ...compiler_passes.compiling.chain_compiler import ChainCompiler
from ...compiler_passes.compiling.compile import CompiledPrograms, CompileOptions, CompilePlan, S, StartWith, V
from ...compiler_passes.compiling.device_memory import device_allocator
from ...compiler_passes.compiling.keep_small_constants import keep_small_constants
from ...compiler_passes.compiling.layout import fixed_layout, phase_properties
from ...compiler_passes.lower import Proof
from ..costs.model import CostModel
from .background import DeferredPrograms
from .npu_target import NPUTarget


class MeasuredRunner(Protocol[V]):
    """Runs the programs of a model, and measures them."""

    costs: CostModel[V]


PROBES = "probes"
"""The folder of probes in the cache of this user."""
R = TypeVar("R", bound=MeasuredRunner[Any])
"""The runner of a kind of model."""
K_co = TypeVar("K_co", bound="ProgramKind[Any, Any, Any]", covariant=True)


@dataclass(frozen=True)
class OpenedModel:
    """A model as it was read, and the weights that its graph maps."""

    model: ov.Model
    weights: MappedWeights


class ProgramKind(ABC, Generic[V, S, R]):
    """One kind of model, with the choices of one load.

    ``variant`` and ``shape`` are dataclasses whose annotations bound what a stored one may hold.
    """

    name: ClassVar[str]
    """Stands in manifests and messages."""
    variant: type[V]
    """The class of the sizes of its programs."""
    shape: type[S]
    """The class of their contract."""
    compiles_in_background: ClassVar[bool] = False
    """Whether it can serve before all of its programs are there."""

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model in a checked directory is of this kind.

        Raises:
            ModelError: a file is damaged.
        """
        del model, directory
        return False

    @staticmethod
    def check_stored(shape: S, content: Mapping[str, Any]) -> None:
        """Check a manifest of this kind, whose types are right: its shape, and the JSON of the whole.

        Raises:
            ConfigError, ValueError, TypeError: it is impossible; the text says what.
        """
        del shape
        if set(content["properties"]) != {"encode"} or content["kv_type"]:
            raise ValueError("the properties or the type of KV slots are not those of this kind of model")

    @abstractmethod
    def lower(self, job: Job[V, S, R], opened: OpenedModel, start: StartWith) -> CompilePlan[V, S]:
        """Lower the model, and choose the variants of its programs.

        Args:
            start: The programs that are compiled before it serves.

        Raises:
            UnsupportedModelError: a pass cannot lower it.
            ConfigError: an option is impossible for this model.
        """

    @abstractmethod
    def random_call(self, programs: CompiledPrograms[V, S], variant: V) -> Mapping[str, NDArray[Any]]:
        """Return inputs for a call of one variant by port name, the same in every process."""

    @abstractmethod
    def runner(self, job: Job[V, S, R], programs: CompiledPrograms[V, S], memory: Any, planned: Sequence[V] = ()) -> R:
        """Bind programs to host memory, run them once, and return what runs them.

        ``memory`` is what the block of ``memory`` gives; ``planned`` are all variants, if some are compiled later.
        """

    def plan(self, job: Job[V, S, R], for_blobs: bool = False, start: StartWith = "all programs") -> CompilePlan[V, S]:
        """Read and lower the model; nothing is compiled.

        Args:
            for_blobs: Whether its programs will be exported.

        Raises:
            ModelError: a file is missing or damaged, or the model is of another kind.
            ConfigError: an NPU elsewhere takes no programs of this layout.
            StaticLLMError: as for ``lower``.
        """
        begin = time.perf_counter()
        job = replace(job, has_blobs=job.has_blobs or for_blobs)
        config = job.config
        if config.memory_limit_mb is not None:
            return_large_blocks()
        event = ProgressEvent("read", 1, 1, 0.0)
        with told(job.on_progress, event):
            model = attended(job.read_model)
        self.check_graph(model, job.directory)
        if for_blobs:
            keep_small_constants(model)
        opened = OpenedModel(model, MappedWeights(model))
        read = time.perf_counter()
        job.on_progress(replace(event, seconds=read - begin))
        event = ProgressEvent("passes", 1, 1, 0.0)
        with told(job.on_progress, event):
            plan = self.lower(job, opened, start)
        if job.target is not None:
            job.target.check_layout(plan.options.layout)
            plan = replace(plan, chains=ChainCompiler(job.target.compile_part, len(job.target.compilers)))
        elif plan.options.layout == "blocks":
            plan = replace(plan, chains=ChainCompiler(allocate=device_allocator(get_core(), job.device)))
        job.on_progress(replace(event, seconds=time.perf_counter() - read))
        return plan

    def check_graph(self, model: ov.Model, directory: Path) -> None:
        """Check that a model is of this kind.

        Raises:
            ModelError: it is not.
        """
        if not self.fits(model, directory):
            raise ModelError(f"{quoted(given_as(directory))} is not {with_article(self.name)}")

    def may_have_no_blobs(self, job: Job[V, S, R]) -> bool:
        """Return whether the job's programs may be such that no blob of them can be imported."""
        del job
        return False

    def fingerprint(self, job: Job[V, S, R]) -> Fingerprint:
        """Return the fingerprint that a set must have to be loaded for this job.

        Raises:
            ModelError: a file of the model cannot be read.
        """
        return Fingerprint(
            kind=self.name,
            **asdict(fingerprint_model(job.directory, job.weights, job.config.model_file, _digest_of(job))),
            **(job.target.machine_values() if job.target else machine_values(get_core(), job.device)),
            choices=self.asked(job),
        )

    def asked(self, job: Job[V, S, R]) -> dict[str, str]:
        """Return what the user chose, by the names that users know. Lengths and sizes are resolved."""
        return {
            "PROGRAMS": fixed_layout(job.device, job.config),
            "properties": properties_text(self.properties(job)["encode"]),
            "choices": json.dumps(self.choices(job), sort_keys=True),
        }

    def properties(self, job: Job[V, S, R]) -> Mapping[Part, Mapping[str, Any]]:
        """Return OpenVINO's properties for each part of the work, as the user set them."""
        return {"encode": phase_properties(job.device, job.config)["prefill"]}

    def options(self, job: Job[V, S, R]) -> CompileOptions:
        """Return where and how the programs of a model without KV slots are compiled."""
        return CompileOptions(job.device, fixed_layout(job.device, job.config), None, self.properties(job))

    def choices(self, job: Job[V, S, R]) -> dict[str, Any]:
        """Return the choices behind a set, in the form that JSON holds."""
        del job
        return {}

    def decided_by(self, manifest: Manifest, job: Job[V, S, R]) -> Job[V, S, R]:
        """Return the job with the choices behind a set for whatever the user left open."""
        del manifest
        return job

    def memory(self, device: str, shape: S, variants: Sequence[V]) -> AbstractContextManager[Any]:
        """Return a block that allocates memory for these variants while their programs are compiled or imported."""
        del device, shape, variants
        return nullcontext()

    def first_to_serve(self, variants: Sequence[V]) -> tuple[V, ...]:
        """Return the variants that must be there before the model can serve; the others may be compiled in the background."""
        return tuple(variants)

    def check(self, programs: CompiledPrograms[V, S]) -> None:
        """Check the ports of imported programs, before any memory is allocated for them.

        Raises:
            ValueError, KeyError: a program cannot run its variant.
        """


def properties_text(properties: Mapping[str, Any]) -> str:
    """Return properties as one line, in the order of their names."""
    return ", ".join(f"{name}={value}" for name, value in sorted(json_properties(properties).items()))


@dataclass(frozen=True)
class LoadJob(Generic[K_co]):
    """One model for one device."""

    kind: K_co
    directory: Path
    device: str
    config: StaticLLMConfig
    on_progress: OnProgress
    explicit: frozenset[str] = frozenset()
    """The fields of the config that the user gave; a blob set decides the others."""
    target: NPUTarget | None = None
    """An NPU that is elsewhere, for which the model is only compiled."""
    is_launched: bool = False
    """Whether its engine serves while deferred programs are loaded; else all programs of a blob set are imported at once."""
    has_blobs: bool = False
    """Whether its programs will be exported."""
    proof: Proof = "before compiling"
    """When the first layers of a graph in pages are compared with those of the original."""

    @property
    def weights(self) -> Path:
        return weights_of(self.directory, self.config.weights_path, self.config.model_file)

    def read_model(self) -> ov.Model:
        """Read the IR.

        Raises:
            ModelError: OpenVINO cannot read it, or it cannot be decrypted.
        """
        config = self.config
        decrypt = config.weights_decryption_callback
        return read_model(get_core(), self.directory, config.weights_path, decrypt, config.model_file)

    @property
    def key(self) -> bytes:
        """The key that signs blob sets; empty if they are not signed."""
        return self.config.integrity_key or b""


Job: TypeAlias = LoadJob[ProgramKind[V, S, R]]

ProgramsFrom = Literal["compiled", "blob", "cache"]
"""Where a loaded model's programs come from."""


@dataclass(frozen=True)
class Loaded(Generic[V, S, R]):
    """A model that can run."""

    runner: R
    programs: CompiledPrograms[V, S]
    config: StaticLLMConfig
    """The config in force, where a blob set has decided what the user left open."""
    programs_from: ProgramsFrom
    deferred: DeferredPrograms[V, S] | None = None
    has_mapped_weights: bool = True
    """Whether weights are read from their file while the model runs."""
    kept_costs: KeptCosts[V] | None = None
    """Where the costs of its programs are kept, if anywhere."""

    def keep_costs(self) -> None:
        """Write the stable costs, if there is a place for them and they are new."""
        if self.kept_costs is not None:
            self.kept_costs.write(self.runner.costs.stable)

    def without_programs(self) -> Loaded[V, S, R]:
        """Return what is known of a model that was closed, without its programs and graphs."""
        return replace(self, programs=replace(self.programs, compiled={}), deferred=None)


def _digest_of(job: LoadJob[Any]) -> Callable[[Path], str]:
    """Return what digests the files of a job: with a cache, each is read once."""
    cache = job.config.cache_dir
    if cache is None:
        return file_digest
    with suppress(OSError):  # one that cannot be made keeps nothing
        Path(cache).mkdir(parents=True, exist_ok=True)
    return digests_in(Path(cache), job.key).of


def probes_of(job: LoadJob[Any]) -> ProbeTimes | None:
    """Return the times of probes that need not run again: those in the job's cache, or else in that of this user.

    Only a CPU is probed; an NPU need not be there at all.
    """
    if device_kind(job.device) != "CPU":
        return None
    try:
        folder = user_cache() / PROBES if job.config.cache_dir is None else Path(job.config.cache_dir)
    except RuntimeError:  # this user has no home
        return None
    return probes_in(folder, get_core(), job.device, job.key)
