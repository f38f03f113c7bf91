"""Loads a pool: chooses devices and processor cores, loads an instance on each, and makes the queues and their policy."""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import openvino as ov
import openvino_genai as genai

from staticllm.config import switch
from staticllm.core import OnProgress, ProgressEvent
from staticllm.devices import PREFERRED, get_core, kind
from staticllm.errors import ConfigError, as_ours, shown
from staticllm.model_dir import check_model_dir
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.embedding.encoder_files import EncoderFiles, read_encoder_files
from staticllm.pipelines.embedding.encoder_job import OPTIONS
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.load import load_encoder
from staticllm.pipelines.embedding.pool.embedding_pool import EmbeddingPool
from staticllm.pipelines.embedding.pool.instances import EncoderInfo, Instance, LocalInstance, load_of
from staticllm.pipelines.embedding.pool.measured_depths import MeasuredDepth, OnStage, measure_depths, regress
from staticllm.pipelines.embedding.pool.pool_state import PoolState
from staticllm.pipelines.embedding.pool.worker_instance import WorkerInstance, WorkerSpec, can_start_workers
from staticllm.pipelines.embedding.windve import detector
from staticllm.pipelines.embedding.windve.affinity import instance_cores, read_topology, unsupported
from staticllm.pipelines.embedding.windve.depth_file import read_estimates, write_estimates
from staticllm.pipelines.embedding.windve.detector import Detection, UsedDevice, without_slow_cpu
from staticllm.pipelines.embedding.windve.device_load import LENGTH
from staticllm.pipelines.embedding.windve.device_queue import DeviceQueue
from staticllm.pipelines.embedding.windve.queue_depth import Estimate, Recalibration
from staticllm.pipelines.embedding.windve.queue_manager import QueueManager
from staticllm.pipelines.embedding.windve.queue_policies import Plain, Predicted, QueuePolicy, Windve, WindveQueued
from staticllm.pipelines.launch.genai_properties import plain_properties
from staticllm.properties import DEVICE_PROPERTIES, as_number, properties_by_device, with_own

PolicyName = Literal["plain", "predicted", "windve", "windve_q"]
_WITHOUT_EFFECT = OPTIONS - {"programs"}
"""Options of caches and blobs: the depths that a command without them measured are good for a pipeline with them."""
DEPTHS_NAME = "queue_depths.json"
"""The file of queue depths in ``CACHE_DIR``."""
POOL_PROPERTIES = (
    "HETEROGENEOUS", "LATENCY_MS", "QUEUE_POLICY", "QUEUE_DEPTHS", "DEVICE_PROPERTIES", "SEPARATE_PROCESS",
)  # fmt: skip
"""The properties that ``take_options`` takes."""


@dataclass(frozen=True)
class PoolOptions:
    """The properties of a pipeline on several devices; docs/embeddings.md describes them.

    ``policy`` is None for ``predicted`` with a latency limit (seconds), and for ``plain`` without.
    """

    is_heterogeneous: bool = False
    limit_s: float | None = None
    policy: PolicyName | None = None
    depths: Path | None = None
    device_properties: Mapping[str, Mapping[str, object]] | None = None
    is_apart: bool = False

    @property
    def policy_name(self) -> PolicyName:
        """The name of the policy."""
        return self.policy or ("plain" if self.limit_s is None else "predicted")


def take_options(properties: dict[str, object]) -> PoolOptions:
    """Remove the properties of a pool from ``properties``, and return them.

    Raises:
        ConfigError: a value is impossible.
    """
    together = switch("HETEROGENEOUS", properties.pop("HETEROGENEOUS", False))
    apart = switch("SEPARATE_PROCESS", properties.pop("SEPARATE_PROCESS", False))
    limit = as_number(properties.pop("LATENCY_MS", None))
    policy, depths = properties.pop("QUEUE_POLICY", None), properties.pop("QUEUE_DEPTHS", None)
    is_limit = isinstance(limit, (int, float)) and not isinstance(limit, bool) and 0 < limit <= sys.float_info.max
    if limit is not None and not is_limit:
        raise ConfigError(f"LATENCY_MS={shown(limit)}: must be a number of ms above 0, or None for no limit")
    if policy not in (None, "plain", "predicted", "windve", "windve_q"):
        raise ConfigError(f"QUEUE_POLICY={policy!r}: must be 'plain', 'predicted', 'windve' or 'windve_q'")
    if policy not in (None, "plain") and limit is None:
        raise ConfigError(f"QUEUE_POLICY={policy!r} needs a latency limit: give LATENCY_MS")
    if depths is not None and not isinstance(depths, (str, Path)):
        raise ConfigError(f"QUEUE_DEPTHS={depths!r}: must be the path of a file")
    if depths is None and isinstance(folder := properties.get("CACHE_DIR"), (str, Path)) and folder:
        depths = Path(folder) / DEPTHS_NAME
    given = plain_properties({DEVICE_PROPERTIES: properties.pop(DEVICE_PROPERTIES, None)})[DEVICE_PROPERTIES]
    own = None if given is None else properties_by_device(given)
    limit_s = float(limit) / 1e3 if isinstance(limit, (int, float)) else None
    return PoolOptions(together, limit_s, policy, None if depths is None else Path(depths), own, apart)


def needs_pool(device: str, options: PoolOptions) -> bool:
    """Return whether texts are embedded by a pool: on several devices or core groups, with a latency limit, or apart."""
    return (
        options.is_heterogeneous
        or options.is_apart
        or options.limit_s is not None
        or any(mark in device for mark in ",#")
    )


def devices_of(device: str, is_heterogeneous: bool, available: Sequence[str]) -> Detection:
    """Return the devices that embed together: the named ones, and with ``is_heterogeneous`` those of other kinds.

    ``with_other_kinds`` says where these stand: ``CPU``, the default, becomes NPU, GPU, CPU. A CPU beside other devices gets the
    cores that WINDVE's rules leave to it, where threads can be bound to cores.

    Raises:
        ConfigError, DeviceError: as for ``named``.
    """
    found = detector.named(device, available)
    if is_heterogeneous:
        found = replace(found, devices=detector.with_other_kinds(found.devices, available))
    if found.is_heterogeneous and not unsupported():
        found = replace(found, devices=tuple(map(_with_cores, found.devices)))
    return found


def _with_cores(used: UsedDevice) -> UsedDevice:
    if kind(used.device) != "CPU" or used.cores:
        return used
    groups = instance_cores(read_topology())
    return replace(used, cores=tuple(groups[0])) if groups else used


@dataclass(frozen=True)
class LoadedInstances:
    """Instances that are ready to run, in order of preference; the tokenizer, and what the model's files say."""

    instances: tuple[Instance, ...]
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    info: EncoderInfo

    def close(self) -> None:
        """Close the instances."""
        for instance in self.instances:
            instance.close()


@dataclass(frozen=True)
class LoadedPool:
    """A pool that serves, its tokenizer, what the model's files say, and a line for each device that is not used."""

    pool: EmbeddingPool
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    info: EncoderInfo
    left_out: tuple[str, ...]


def load_instances(
    directory: Path,
    devices: Sequence[UsedDevice],
    choices: Callable[[UsedDevice], EncoderChoices],
    on_progress: OnProgress = lambda event: None,
    is_apart: bool = False,
) -> LoadedInstances:
    """Load an instance on each device. Processor cores get a worker process each, and so does a CPU beside other devices.

    With ``is_apart`` every device has one. ``on_progress`` gets the parts of loading in this process.

    Raises:
        ModelError, ConfigError, DeviceError: as for ``load_encoder``.
    """
    found: dict[str, Instance] = {}
    workers: list[WorkerInstance] = []
    tokenizer: genai.Tokenizer | None = None
    try:
        for used in devices:
            if _runs_apart(used, len(devices), is_apart):
                spec = WorkerSpec(used.name, directory, used.device, used.cores, _with_threads(used, choices(used)))
                workers.append(WorkerInstance(spec))
                found[used.name] = workers[-1]
        for used in devices:
            if used.name not in found:
                loaded = load_encoder(directory, used.device, choices(used), on_progress)
                found[used.name] = LocalInstance(used.name, loaded.runner, EncoderInfo.of(loaded))
                tokenizer = loaded.tokenizer
        for worker in workers:
            worker.wait_ready()
        instances = tuple(found[used.name] for used in devices)
        shortest = min(instance.info.max_length for instance in instances)
        info = replace(instances[0].info, max_length=shortest)
        return LoadedInstances(instances, tokenizer or genai.Tokenizer(directory), read_encoder_files(directory), info)
    except BaseException as error:
        for worker in workers:
            worker.close()
        if isinstance(error, Exception):
            raise as_ours(error) from error
        raise


def _runs_apart(used: UsedDevice, num_devices: int, is_wanted: bool) -> bool:
    is_apart = is_wanted or bool(used.cores) or (kind(used.device) == "CPU" and num_devices > 1)
    if is_apart and (is_wanted or used.cores) and not can_start_workers():
        what = "its cores are not kept apart" if used.cores else "a crash of its device ends this process too"
        warnings.warn(f"{used.name}: no worker process can be started here, {what}", stacklevel=4)
    return is_apart and can_start_workers()


def _with_threads(used: UsedDevice, choices: EncoderChoices) -> EncoderChoices:
    """Return the choices with one thread per core of a group, unless the user chose another number."""
    if not used.cores:
        return choices
    return replace(choices, properties={"INFERENCE_NUM_THREADS": len(used.cores), **(choices.properties or {})})


def choices_by_device(choices: EncoderChoices, options: PoolOptions, names: Sequence[str]) -> dict[str, EncoderChoices]:
    """Return the choices of each device, with its own properties in them (``DEVICE_PROPERTIES``).

    Those of ``CPU`` are also those of ``CPU#0-3``. Those of an NPU, GPU or CPU that is not used are left out.

    Raises:
        ConfigError: there are properties of something else.
    """
    own = options.device_properties or {}
    unknown = [name for name in own if name not in names and name.split(".")[0] not in PREFERRED]
    if unknown:
        raise ConfigError(
            f"DEVICE_PROPERTIES for {min(unknown)!r}: there is no such device here; there are: {', '.join(names)}"
        )
    given = {**(choices.properties or {}), DEVICE_PROPERTIES: own}
    each = {name: {**with_own(given, name.split("#", maxsplit=1)[0]), **own.get(name, {})} for name in names}
    return {name: replace(choices, properties=found or None) for name, found in each.items()}


def load_pool(
    directory: Path,
    device: str,
    choices: EncoderChoices,
    max_waiting: int,
    options: PoolOptions,
    on_progress: OnProgress = lambda event: None,
) -> LoadedPool:
    """Load an instance on each device, and put a queue manager before them.

    ``on_progress`` gets the parts of loading in this process, and ``ready`` once.

    Raises:
        ModelError, ConfigError, DeviceError: as for ``load_encoder`` and ``devices_of``.
    """
    begin = time.perf_counter()
    found = devices_of(device, options.is_heterogeneous, get_core().available_devices)
    chosen = choices_by_device(choices, options, [used.name for used in found.devices])

    def choices_of(used: UsedDevice) -> EncoderChoices:
        return chosen[used.name]

    def tell(event: ProgressEvent) -> None:
        if event.stage != "ready":  # that of one instance; others may still load
            on_progress(event)

    loaded = load_instances(directory, found.devices, choices_of, tell, options.is_apart)
    try:
        found = _without_slow(found, loaded, options.limit_s)
        used_names = {used.name for used in found.devices}
        kept = [instance for instance in loaded.instances if instance.name in used_names]
        for instance in loaded.instances:
            if instance.name not in used_names:
                instance.close()
        estimates = _estimates(directory, kept, choices, options)
        state = make_state(kept, options.policy_name, options.limit_s, max_waiting, estimates)
        on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    except BaseException:
        loaded.close()
        raise
    for line in found.left_out:
        warnings.warn(line, stacklevel=3)
    return LoadedPool(EmbeddingPool(state), loaded.tokenizer, loaded.files, loaded.info, found.left_out)


def _without_slow(found: Detection, loaded: LoadedInstances, limit_s: float | None) -> Detection:
    if limit_s is None:
        return found
    instances = {instance.name: instance for instance in loaded.instances}

    def seconds_of_one(used: UsedDevice) -> float:
        instance = instances[used.name]
        load = load_of(instance.costs, instance.info.is_packable)()
        return load.seconds_with(min(LENGTH, instance.info.max_length))

    return without_slow_cpu(found, limit_s, seconds_of_one)


def make_state(
    instances: Sequence[Instance],
    policy: PolicyName,
    limit_s: float | None,
    max_waiting: int,
    estimates: Sequence[Estimate] = (),
    new_manager: Callable[[Sequence[DeviceQueue], QueuePolicy], QueueManager] = QueueManager,
) -> PoolState:
    """Return the state of a pool of these instances. ``estimates`` give the queue depths that ``windve`` needs."""
    depths = [found.depth for found in estimates] or [0] * len(instances)
    queues = [
        DeviceQueue(instance.name, load_of(instance.costs, instance.info.is_packable), depth)
        for instance, depth in zip(instances, depths, strict=True)
    ]
    chosen: QueuePolicy
    if policy in ("windve", "windve_q"):
        chosen = Windve() if policy == "windve" else WindveQueued()
    elif policy == "plain" or limit_s is None:
        chosen = Plain(1 << 62)  # the state compares the waiting texts of whole requests
    else:
        chosen = Predicted(limit_s, 1 << 62)
    return PoolState(
        instances, new_manager(queues, chosen), max_waiting, recalibrations=[Recalibration(e) for e in estimates]
    )


def _estimates(
    directory: Path, instances: Sequence[Instance], choices: EncoderChoices, options: PoolOptions
) -> tuple[Estimate, ...]:
    """Return the queue depths of ``windve``: those of the file, or measured ones, which are then written to it."""
    if options.policy_name not in ("windve", "windve_q") or options.limit_s is None:
        return ()
    key = depths_key(directory, [instance.name for instance in instances], choices, options.device_properties)
    known = {found.name: found for found in read_estimates(options.depths, key)} if options.depths else {}
    if all(instance.name in known for instance in instances):
        return tuple(known[instance.name].for_limit(options.limit_s) for instance in instances)
    found = tuple(regress(instance, options.limit_s) for instance in instances)
    if options.depths is not None:
        _keep(options.depths, key, found)
    return found


def _keep(path: Path, key: str, estimates: Sequence[Estimate]) -> None:
    """Write queue depths to their file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_estimates(path, key, estimates)
    except OSError as error:
        raise ConfigError(
            f"QUEUE_DEPTHS {str(path)!r}: cannot be written ({error.strerror or error}): give a file in a folder that can be"
        ) from None


def measure_model(
    directory: Path,
    device: str,
    properties: Mapping[str, object],
    limit_s: float,
    path: Path | None = None,
    on_stage: OnStage = lambda _: None,
) -> list[MeasuredDepth]:
    """Return the queue depths of a model on one or more devices, and write them to ``path``, which ``QUEUE_DEPTHS`` reads.

    Raises:
        ModelError, ConfigError, DeviceError: as for ``load_pool``.
    """
    check_model_dir(directory)
    choices = EncoderChoices(properties=dict(properties) or None)
    devices = devices_of(device, False, get_core().available_devices).devices
    loaded = load_instances(directory, devices, lambda _: choices)
    try:
        found = measure_depths(loaded.instances, limit_s, on_stage)
    finally:
        loaded.close()
    if path is not None:
        key = depths_key(directory, [used.name for used in devices], choices)
        _keep(path, key, [each.estimate for each in found])
    return found


def depths_key(
    directory: Path,
    names: Sequence[str],
    choices: EncoderChoices,
    own: Mapping[str, Mapping[str, object]] | None = None,
) -> str:
    """Return what queue depths depend on, as a digest: the model, the devices and the options.

    ``own`` has the properties for one device each.
    """
    core = get_core()
    graph = (directory / MODEL_XML).read_bytes()
    devices = [str(core.get_property("CPU", "FULL_DEVICE_NAME")) if "CPU" in core.available_devices else "", *names]
    common = _with_effect(choices.properties or {})
    changed = {name: {**common, **_with_effect((own or {}).get(name, {}))} for name in names}
    values = [*devices, ov.__version__, str(sorted(common.items())), str(choices.sizes)]
    values += [f"{name}: {sorted(found.items())}" for name, found in sorted(changed.items()) if found != common]
    return hashlib.sha256(graph + "\n".join(values).encode()).hexdigest()[:32]


def _with_effect(properties: Mapping[str, object]) -> dict[str, object]:
    """Return the properties that can change the seconds of a batch."""
    return {name: value for name, value in properties.items() if name.lower() not in _WITHOUT_EFFECT}
