"""Serves an encoder: on one device behind a queue, in an engine of its own or a shared one, or on several behind a pool."""

from __future__ import annotations

import os
from dataclasses import dataclass

import openvino_genai as genai

from staticllm.core import OnProgress
from staticllm.devices import DISTRIBUTING, get_core, is_present, named_devices
from staticllm.errors import ConfigError
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.embedding.encoder_files import EncoderFiles
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.load import LoadedEncoder, load_encoder
from staticllm.pipelines.embedding.pool.instances import EncoderInfo
from staticllm.pipelines.embedding.pool.pool_loader import load_pool
from staticllm.pipelines.embedding.pool.pool_plan import PoolOptions, choices_by_device, needs_pool
from staticllm.pipelines.embedding.queue.drivers import JobDriver, QueueDriver
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.jobs import JobHost, checked_host


@dataclass
class ServedEncoder:
    """An encoder that takes requests by its ``driver``. ``engine`` owns the only device; None for a pool of devices.

    ``tokenizer`` is None after ``close``. ``own_engine`` ends with the encoder; None if the engine was given.
    """

    info: EncoderInfo
    tokenizer: genai.Tokenizer | None
    files: EncoderFiles
    driver: QueueDriver
    engine: JobHost | None
    own_engine: JobEngine | None = None

    def close(self) -> None:
        """Release the device and drop the programs; texts that wait get a ``ClosedError``. A second call does nothing."""
        if self.engine is not None and isinstance(self.driver, JobDriver):
            self.engine.remove_jobs(self.driver)
        if self.own_engine is not None:
            self.own_engine.close()
        if self.engine is None:
            self.driver.close()
        self.tokenizer = None


def serve_encoder(
    models_path: str | os.PathLike[str],
    device: str,
    choices: EncoderChoices,
    *,
    engine: JobHost | None,
    max_waiting: int,
    options: PoolOptions,
    on_progress: OnProgress,
) -> ServedEncoder:
    """Load an encoder, on several devices if ``device`` and ``options`` say so, and serve it.

    Raises:
        ModelError, DeviceError, BlobError: as for ``load_encoder``.
        ConfigError: as for ``load_encoder`` and ``load_pool``, or an engine is given for several devices.
    """
    host = None if engine is None else checked_host(engine)
    if not isinstance(device, str):
        raise ConfigError(f"device is a {type(device).__name__}: must be the name of a device, for example CPU")
    device = _actual(device)
    if not needs_pool(device, options):
        own = choices_by_device(choices, options, [device.upper()])[device.upper()]
        return serve_loaded(load_encoder(models_path, device, own, on_progress), host, max_waiting)
    if host is not None:
        raise ConfigError(
            f"device {device!r} with engine=: a shared engine has one device, without HETEROGENEOUS, LATENCY_MS and "
            "SEPARATE_PROCESS"
        )
    found = load_pool(check_model_dir(models_path), device, choices, max_waiting, options, on_progress)
    return ServedEncoder(found.info, found.tokenizer, found.files, found.driver, None)


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


def serve_loaded(loaded: LoadedEncoder, host: JobHost | None, max_waiting: int) -> ServedEncoder:
    """Serve an encoder that was loaded, in ``host`` or in an engine of its own.

    Raises:
        ClosedError: the host was closed.
    """
    driver = JobDriver(loaded.runner, max_waiting)
    own = JobEngine() if host is None else None
    engine: JobHost = own or checked_host(host)
    engine.add_jobs(driver)
    return ServedEncoder(EncoderInfo.of(loaded), loaded.tokenizer, loaded.files, driver, engine, own)
