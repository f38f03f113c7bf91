"""Loads a model directory: compiles the programs, or imports them from a blob set or a cache."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.errors import DeviceError, StaticLLMError, last_line
from staticllm.pipelines.loading.cached import load_through_cache
from staticllm.pipelines.loading.decoder_kind import LoadedDecoder, job_of
from staticllm.pipelines.loading.exported import load_and_export
from staticllm.pipelines.loading.imported import load_blob_set
from staticllm.pipelines.loading.kind import Job, R
from staticllm.pipelines.loading.loaded import Loaded
from staticllm.pipelines.loading.staged import load_compiled
from staticllm.pipelines.programs.lowered import S, V


def load(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    explicit: Collection[str] | None = None,
) -> LoadedDecoder:
    """Load a decoder and warm it up. The graph and the weights that were read with it are released.

    ``explicit``: names of the config's fields that the user gave; a blob set decides the others. If it is None, the fields
    whose values differ from their defaults.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, refused a program, or has not enough memory.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
        BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else, or exported blobs failed verification.
    """
    with _explained(device):
        return load_job(job_of(models_path, device, config, on_progress, explicit))


def load_job(job: Job[V, S, R]) -> Loaded[V, S, R]:
    """Load a model of any kind: import its programs from ``BLOB_PATH`` or ``CACHE_DIR``, or compile them; write a wanted set.

    Raises:
        As ``load``.
    """
    config = job.config
    if config.export_blob:
        return load_and_export(job)
    if config.blob_path:
        return load_blob_set(job, Path(config.blob_path))
    return load_through_cache(job, config.cache_dir) if config.cache_dir else load_compiled(job)


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """Turn exceptions of OpenVINO, for example if memory runs out, into a ``DeviceError`` of one line."""
    try:
        yield
    except StaticLLMError:
        raise
    except MemoryError as error:
        raise DeviceError(
            f"{device} has not enough memory for this model: lower MAX_PROMPT_LEN, KV_SLOTS or MAX_NUM_SEQS"
        ) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or not _is_openvinos(error):
            raise  # a callback raised it
        raise DeviceError(f"{device} failed while the model was loaded: {last_line(error)}") from error


def _is_openvinos(error: RuntimeError) -> bool:
    """Return whether an extension raised it. Extensions have no Python frames, so the last frame is ours or OpenVINO's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(("staticllm.", "openvino"))
