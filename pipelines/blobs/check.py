"""Does a blob say what its program says? Asked when it is exported, before anybody loads it.

OpenVINO does not. On its CPU plugin (2026.4) a blob without weights took changed constants back from the weights file (short
convolutions came out in other shapes), and a whole blob of a mixture of experts gave other words than its program.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import Variant
from staticllm.errors import BlobError
from staticllm.pipelines.blobs.blob_set import import_blob
from staticllm.pipelines.programs.dry_run import random_feeds, run_apart

TOLERANCE = 1e-3
"""Of the range of the program's own answer; they come out equal to the bit."""


def matches(
    core: ov.Core,
    program: tuple[ov.CompiledModel, Variant],
    data: bytes,
    target: tuple[str, Mapping[str, Any], Path | None],
) -> bool:
    """Whether ``data``, imported for ``target`` (device, properties, weights), answers random rows as ``program`` does, one that
    has this variant."""
    compiled, variant = program
    device, properties, weights = target
    try:
        imported = import_blob(core, data, device, properties, weights)
        feeds = random_feeds(compiled, variant)
        expected, found = run_apart(compiled, feeds), run_apart(imported, feeds)
    except (BlobError, RuntimeError, ValueError):
        return False
    return expected.keys() == found.keys() and all(_is_close(expected[name], found[name]) for name in expected)


def _is_close(expected: NDArray[Any], found: NDArray[Any]) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    expected, found = (np.asarray(array, np.float64) for array in (expected, found))
    spread = float(np.ptp(expected)) if expected.size else 0.0
    return bool(np.all(np.abs(expected - found) <= TOLERANCE * spread)) or np.array_equal(
        expected, found, equal_nan=True
    )
