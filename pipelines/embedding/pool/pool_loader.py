"""Loads a pool: an instance on each device of its plan, the queue before them, and the queue depths of WINDVE."""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import openvino as ov
import openvino_genai as genai

from staticllm.core import OnProgress, ProgressEvent
from staticllm.devices import get_core, kind
from staticllm.errors import ConfigError, as_ours, quoted
from staticllm.model_files.model_at import check_model_dir
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.system.load_progress import LoadProgress
from staticllm.system.long_calls import attended, told
from staticllm.system.signal_stack import kept_signal_stack

from ...engine.jobs import JobHost
from ..encoder_files import EncoderFiles, read_encoder_files
from ..encoder_job import OPTIONS, load_encoder
from ..encoder_kind import EncoderChoices
from ..queue.device_queue import DeviceQueue
from ..queue.loads import LENGTH, load_of
from ..queue.policies import Plain, Predicted, QueuePolicy, Windve, WindveQueued
from ..queue.text_queue import TextQueue
from ..windve.detector import Detection, UsedDevice, without_slow_cpu
from ..windve.queue_depth import Estimate, Recalibration, read_estimates, write_estimates
from .engine_instance import EngineInstance
from .failures import HANG_SECONDS, DevicePool
from .instances import EncoderInfo, Instance, LocalInstance
from .measured_depths import MeasuredDepth, OnStage, measure_depths, regress
from .pool_plan import PolicyName, PoolOptions, PoolPlan, plan_pool
from .thread_driver import ThreadDriver
from .worker_instance import WorkerInstance, WorkerSpec, can_start_workers

_WITHOUT_EFFECT = OPTIONS - {"programs"}
"""Options of caches and blobs: the depths that a command without them measured are good for a pipeline with them."""

LOADING_APART = ProgressEvent("compile", 1, 1, 0.0)
"""What is shown while worker processes load."""


@dataclass(frozen=True)
class LoadedInstances:
    """Instances that are ready to run, in order of preference; the tokenizer, and what the model's files say."""

    instances: tuple[Instance, ...]
    tokenizer: genai.Tokenizer
    files: EncoderFiles
    info: EncoderInfo

    def close(self) -> None:
        for instance in self.instances:
            instance.close()


def load_instances(
    directory: Path, plan: PoolPlan, on_progress: OnProgress = lambda event: None, host: JobHost | None = None
) -> LoadedInstances:
    """Load an instance on each device. Processor cores get a worker process each, and so does a CPU beside other devices.

    ``on_progress`` gets the parts of loading in this process.

    Args:
        host: The engine that owns the device that was named first; its instance is in this process.

    Raises:
        ModelError, ConfigError, DeviceError: as for ``load_encoder``.
    """
    found: dict[str, Instance] = {}
    workers: list[WorkerInstance] = []
    tokenizer: genai.Tokenizer | None = None
    try:
        for used in plan.devices:
            if not _is_shared(used, plan, host) and _runs_apart(used, plan):
                choices = _with_threads(used, plan.choices[used.name])
                workers.append(WorkerInstance(WorkerSpec(used.name, directory, used.device, used.cores, choices)))
                found[used.name] = workers[-1]
        for used in plan.devices:
            if used.name not in found:
                choices = _with_threads(used, plan.choices[used.name])
                loaded = load_encoder(directory, used.device, choices, on_progress)
                found[used.name] = (
                    EngineInstance(used.name, loaded.runner, EncoderInfo.of(loaded), host)
                    if host is not None and _is_shared(used, plan, host)
                    else LocalInstance(used.name, loaded.runner, EncoderInfo.of(loaded))
                )
                tokenizer = loaded.tokenizer
        for worker in workers:
            with told(on_progress, LOADING_APART):
                attended(worker.wait_ready, on_leave=worker.interrupt)
        instances = tuple(found[name] for name in plan.names)
        shortest = min(instance.info.max_length for instance in instances)
        info = replace(instances[0].info, max_length=shortest)
        with kept_signal_stack():
            tokenizer = tokenizer or genai.Tokenizer(directory)
        return LoadedInstances(instances, tokenizer, read_encoder_files(directory), info)
    except BaseException as error:
        for instance in {*workers, *found.values()}:
            instance.close()
        if isinstance(error, Exception):
            raise as_ours(error) from error
        raise


def _is_shared(used: UsedDevice, plan: PoolPlan, host: JobHost | None) -> bool:
    return host is not None and used.name == plan.named


def _runs_apart(used: UsedDevice, plan: PoolPlan) -> bool:
    is_apart = plan.is_apart or bool(used.cores) or (kind(used.device) == "CPU" and plan.detection.is_heterogeneous)
    if is_apart and (plan.is_apart or used.cores) and not can_start_workers():
        what = "its cores are not kept apart" if used.cores else "a crash of its device ends this process too"
        warnings.warn(f"{used.name}: no worker process can be started here, {what}", stacklevel=4)
    return is_apart and can_start_workers()


def _with_threads(used: UsedDevice, choices: EncoderChoices) -> EncoderChoices:
    """Return the choices with one thread per core of a group, unless the user chose another number."""
    if not used.cores:
        return choices
    return replace(choices, properties={"INFERENCE_NUM_THREADS": len(used.cores), **(choices.properties or {})})


def load_pool(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    max_waiting: int,
    options: PoolOptions,
    on_progress: OnProgress | None = None,
    host: JobHost | None = None,
) -> tuple[ThreadDriver, LoadedInstances]:
    """Load an instance on each device, and put a queue manager before them; return what serves, and what it serves.

    ``on_progress`` gets the parts of loading in this process, and ``ready`` once.

    Args:
        host: The engine that owns the device that was named first.

    Raises:
        ModelError, ConfigError, DeviceError: as for ``load_encoder`` and ``devices_of``.
    """
    begin = time.perf_counter()
    plan = plan_pool(device, choices, options)
    shown = LoadProgress(on_progress, num_loads=len(plan.devices))
    directory = check_model_dir(models_path, on_progress=shown)

    def tell(event: ProgressEvent) -> None:
        if event.stage != "ready":  # that of one instance; others may still load
            shown(event)

    loaded = load_instances(directory, plan, tell, host)
    try:
        used = _without_slow(plan.detection, loaded, options.limit_s)
        names = {device.name for device in used.devices}
        kept = [instance for instance in loaded.instances if instance.name in names]
        for instance in loaded.instances:
            if instance.name not in names:
                instance.close()
        pool = make_pool(
            kept, options.policy_name, options.limit_s, max_waiting, estimates_of(directory, kept, choices, options)
        )
        shown.finish(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    except BaseException:
        loaded.close()
        raise
    for line in used.left_out:
        warnings.warn(line, stacklevel=3)
    return ThreadDriver(pool), loaded


def _without_slow(found: Detection, loaded: LoadedInstances, limit_s: float | None) -> Detection:
    if limit_s is None:
        return found
    instances = {instance.name: instance for instance in loaded.instances}

    def seconds_of_one(used: UsedDevice) -> float:
        instance = instances[used.name]
        load = load_of(instance.costs, instance.info.is_packable)()
        return load.seconds_with(min(LENGTH, instance.info.max_length))

    return without_slow_cpu(found, limit_s, seconds_of_one)


def make_pool(
    instances: Sequence[Instance],
    policy: PolicyName,
    limit_s: float | None,
    max_waiting: int,
    estimates: Sequence[Estimate] = (),
    hang_seconds: float = HANG_SECONDS,
) -> DevicePool:
    """Return the pool of these instances, and its queue. ``estimates`` give the queue depths that ``windve`` needs."""
    depths = [found.depth for found in estimates] or [0] * len(instances)
    queues = [
        DeviceQueue(instance.name, load_of(instance.costs, instance.info.is_packable), depth)
        for instance, depth in zip(instances, depths, strict=True)
    ]
    for instance, queue in zip(instances, queues, strict=True):
        queue.is_shared = isinstance(instance, EngineInstance)
    chosen: QueuePolicy
    if policy in ("windve", "windve_q"):
        chosen = Windve() if policy == "windve" else WindveQueued()
    elif policy == "plain" or limit_s is None:
        chosen = Plain()
    else:
        chosen = Predicted(limit_s)
    recalibrations = [Recalibration(found) for found in estimates]
    return DevicePool(instances, TextQueue(queues, chosen, max_waiting), recalibrations, hang_seconds)


def estimates_of(
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
            f"QUEUE_DEPTHS {quoted(path)}: cannot be written ({error.strerror or error}): give a file in a folder that can be"
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
    plan = plan_pool(device, choices, PoolOptions())
    loaded = load_instances(directory, plan)
    try:
        found = measure_depths(loaded.instances, limit_s, on_stage)
    finally:
        loaded.close()
    if path is not None:
        key = depths_key(directory, plan.names, choices)
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
