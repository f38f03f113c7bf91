"""From a model directory to what can run: where the programs come from is decided here."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.errors import DeviceError, StaticLLMError, last_line
from staticllm.pipelines.model_loader.cached import load_through_cache
from staticllm.pipelines.model_loader.exported import load_and_export
from staticllm.pipelines.model_loader.imported import load_blob_set
from staticllm.pipelines.model_loader.loaded import Loaded
from staticllm.pipelines.model_loader.staged import load_compiled
from staticllm.pipelines.programs.job import job_of


def load(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    explicit: Collection[str] | None = None,
) -> Loaded:
    """Load a model and warm it up. The graph, and with it the weights as they were read, is released.

    ``explicit``: names of the config's fields that the user gave; a blob set decides the others. Without it, the fields whose
    values differ from their defaults.

    Raises:
        ModelError, UnsupportedModelError, DeviceError, ConfigError
        BlobError: ``BLOB_PATH`` names a set that is damaged, or for something else.
    """
    job = job_of(models_path, device, config, on_progress, explicit)
    with _explained(device):
        if config.export_blob:
            return load_and_export(job)
        if config.blob_path:
            return load_blob_set(job, Path(config.blob_path))
        return load_through_cache(job, config.cache_dir) if config.cache_dir else load_compiled(job)


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """Turn what OpenVINO raises, where memory runs out for instance, into one line of ours."""
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
    """Whether an extension raised it: such code has no Python frames, so that the last frame is ours or OpenVINO's wrapper."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(("staticllm.", "openvino"))
