"""A job describes what is loaded: one model for one device."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.devices import check_device, default_kv_type, get_core
from staticllm.model_dir import check_model_dir, weights_of
from staticllm.pipelines.blobs.measurements import probes_in
from staticllm.pipelines.programs.autotune import ProbeMemory, ProbeTimes
from staticllm.pipelines.programs.compile_plan import phase_properties, with_kv_slots
from staticllm.pipelines.programs.layout import with_host_slots


@dataclass(frozen=True)
class LoadJob:
    """One model for one device. ``explicit``: the fields of the config that the user gave; a blob set decides the others."""

    directory: Path
    device: str
    config: StaticLLMConfig
    on_progress: OnProgress
    explicit: frozenset[str] = frozenset()

    @property
    def weights(self) -> Path:
        """The weights file."""
        return weights_of(self.directory, self.config.weights_path)

    @property
    def key(self) -> bytes:
        """The key that signs blob sets; empty if they are not signed."""
        return self.config.integrity_key or b""


def job_of(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    explicit: Collection[str] | None = None,
) -> LoadJob:
    """Check directory and device, resolve ``KV_CACHE_GB`` to a number of KV slots, and fit the host pool to ``MEMORY_LIMIT_MB``.

    ``explicit``: names of the config's fields that the user gave. If it is None, the fields whose values differ from their
    defaults.

    Raises:
        ModelError: the directory is missing or incomplete.
        DeviceError: the device is not on this machine.
        ConfigError: the model does not fit into ``MEMORY_LIMIT_MB``.
    """
    is_encrypted = config.weights_decryption_callback is not None
    directory = check_model_dir(models_path, False, config.weights_path, is_encrypted)
    core, name = get_core(), check_device(get_core(), device)
    kv_type = config.kv_cache_precision or default_kv_type(core, name, *phase_properties(name, config).values())
    resolved = with_host_slots(name, directory, with_kv_slots(config, directory, kv_type), kv_type)
    given = frozenset(config.non_default if explicit is None else explicit)
    return LoadJob(directory, name, resolved, on_progress, given | ({"kv_slots"} if config.kv_cache_gb else set()))


def probes_of(job: LoadJob) -> ProbeTimes:
    """Return the times of probes that need not run again: those in the job's cache, if it has one."""
    if job.config.cache_dir is None:
        return ProbeMemory()
    return probes_in(Path(job.config.cache_dir), get_core(), job.device, job.key)
