"""Serves an encoder on one device behind a queue, in its own or a shared engine, or on several devices behind a pool."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import openvino_genai as genai

from staticllm.config import is_whole, one_of
from staticllm.core import OnProgress
from staticllm.devices import DISTRIBUTING, get_core, is_present, named_devices
from staticllm.errors import ConfigError, shown
from staticllm.system.load_progress import LoadProgress, check_receiver

from ...engine.job_engine import JobEngine
from ...engine.jobs import JobHost, checked_host
from ..encoder_files import EncoderFiles
from ..encoder_job import LoadedEncoder, load_encoder
from ..encoder_kind import EncoderChoices
from ..queue.drivers import JobDriver, QueueDriver
from ..text_tokenizer import Overflow
from .instances import EncoderInfo
from .pool_loader import load_pool
from .pool_plan import PoolOptions, choices_by_device, needs_pool


@dataclass(frozen=True)
class ServingOptions:
    """How an encoder is served, whatever the model.

    Raises:
        ConfigError: an option is impossible.
    """

    engine: JobHost | None
    """The engine of another pipeline on the same device; None for a device of its own."""
    overflow: Overflow
    max_waiting: int
    on_progress: OnProgress | None

    def __post_init__(self) -> None:
        one_of("overflow", self.overflow, get_args(Overflow))
        if not is_whole(self.max_waiting, 1):
            raise ConfigError(f"max_waiting={shown(self.max_waiting)}: must be a whole number from 1")
        check_receiver(self.on_progress)


@dataclass(frozen=True)
class ServedEncoder:
    """An encoder that takes requests by its ``driver``."""

    info: EncoderInfo
    files: EncoderFiles
    driver: QueueDriver
    engine: JobHost | None
    """Owns the only device, or the first one of a pool; None for a pool all of whose devices are its own."""
    release: Callable[[], None]
    """Drops the programs; texts that wait get a ``ClosedError``. A second call does nothing."""


def serve_encoder(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    serving: ServingOptions,
    options: PoolOptions,
) -> tuple[ServedEncoder, genai.Tokenizer]:
    """Load an encoder with its tokenizer, on several devices if ``device`` and ``options`` say so, and serve it.

    Raises:
        ModelError, DeviceError, BlobError: as for ``load_encoder``.
        ConfigError: as for ``load_encoder`` and ``load_pool``, or a process of its own cannot have the engine that is given.
    """
    host = None if serving.engine is None else checked_host(serving.engine)
    if not isinstance(device, str):
        raise ConfigError(f"device is a {type(device).__name__}: must be the name of a device, for example CPU")
    device = _actual(device)
    if not needs_pool(device, options):
        own = choices_by_device(choices, options, [device.upper()])[device.upper()]
        loaded = load_encoder(models_path, device, own, LoadProgress(serving.on_progress))
        return _serve_one(loaded, device.upper(), host, serving.max_waiting), loaded.tokenizer
    if host is not None and options.is_apart:
        raise ConfigError("SEPARATE_PROCESS with engine=: an engine runs in this process, leave one of them out")
    driver, found = load_pool(models_path, device, choices, serving.max_waiting, options, serving.on_progress, host)
    return ServedEncoder(found.info, found.files, driver, host, driver.close), found.tokenizer


def _serve_one(loaded: LoadedEncoder, device: str, host: JobHost | None, max_waiting: int) -> ServedEncoder:
    """Serve an encoder on one device, in ``host`` or in an engine of its own.

    Raises:
        ClosedError: the host was closed.
    """
    driver = JobDriver(loaded.runner, max_waiting, device)
    engine: JobHost = host or JobEngine()
    engine.add_jobs(driver)

    def release() -> None:
        engine.remove_jobs(driver)
        if host is None:
            engine.close()

    return ServedEncoder(EncoderInfo.of(loaded), loaded.files, driver, engine, release)


def _actual(device: str) -> str:
    """Return the device that OpenVINO's ``AUTO``, ``HETERO`` or ``BATCH`` would use first, or all of ``MULTI``."""
    distributing = device.split(":", maxsplit=1)[0].strip().upper()
    if distributing not in DISTRIBUTING:
        return device
    available = get_core().available_devices
    names = named_devices(device, available)
    if distributing == "MULTI":
        return ",".join(names)
    return next((name for name in names if is_present(get_core(), name)), names[0])
