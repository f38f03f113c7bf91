"""Checks that a blob computes what its program computes, when it is exported and before it is ever loaded.

OpenVINO does not check this. On its CPU plugin (2026.4) a blob without weights read changed constants from the weights file
again, so that short convolutions had other shapes. A whole blob of a mixture of experts gave other tokens than its program.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.devices import get_core
from staticllm.errors import BlobError
from staticllm.pipelines.artifacts.blob_set import ImportTarget, import_blob
from staticllm.pipelines.programs.dry_run import run_apart

TOLERANCE = 1e-3
"""Largest difference, as a share of the range of the program's own output. In practice both outputs are bitwise equal."""


def matches(compiled: ov.CompiledModel, feeds: Mapping[str, NDArray[Any]], blob: bytes, target: ImportTarget) -> bool:
    """Return whether ``blob``, imported for ``target``, computes what ``compiled`` computes from ``feeds``, by port name."""
    try:
        imported = import_blob(get_core(), blob, target)
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
