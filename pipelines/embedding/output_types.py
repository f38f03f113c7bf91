"""Converts vectors to the output types of sentence-transformers' ``quantize_embeddings``: float32, int8, uint8, packed bits."""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from staticllm.config import one_of
from staticllm.errors import MAX_SHOWN, ConfigError, last_line

OutputType = Literal["float32", "int8", "uint8", "binary", "ubinary"]
"""One value per dimension in the first three; one bit in the others, eight to a value, as int8 and as uint8."""
OUTPUT_TYPES: tuple[OutputType, ...] = get_args(OutputType)
Embeddings: TypeAlias = NDArray[Any]
"""Vectors ``[n, values]`` of float32, int8 or uint8."""
Ranges = NDArray[np.float32]
"""The least and the greatest value of each dimension, ``[2, width]``."""
ENOUGH_VECTORS = 100
"""sentence-transformers warns about ranges of fewer vectors."""


def as_vectors(given: Any) -> NDArray[Any]:
    """Return an array of numbers: what is given, if it is one, else what numpy makes of it.

    Raises:
        ConfigError: numpy makes no array of real numbers of it.
    """
    try:
        found = np.asarray(given)
        if found.dtype.kind in "biuf":
            return found
        if found.dtype.kind not in "cmM":  # complex numbers and times would lose what they are
            return found.astype(np.float32)
        reason = f"it holds {found.dtype}"
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        reason = last_line(error)[:MAX_SHOWN]
    raise ConfigError(
        f"calibration is a {type(given).__name__} of which numpy makes no array of numbers ({reason}): give vectors [n, width]"
    ) from None


def check_output_type(output_type: str, calibration: NDArray[Any] | None, width: int) -> None:
    """Check an output type and its calibration ``[n, width]``, before any text is embedded.

    Raises:
        ConfigError: the type is unknown, or the calibration does not fit it.
    """
    one_of("output_type", output_type, OUTPUT_TYPES)
    if calibration is None:
        return
    if not has_ranges(output_type):
        raise ConfigError(f"calibration is for int8 and uint8, output_type is {output_type}: leave one of them out")
    shape = np.shape(calibration)
    if len(shape) != 2 or shape[0] < 2 or shape[1] != width:
        raise ConfigError(f"calibration has the shape {list(shape)}: must be [n, {width}], with at least 2 vectors")


def has_ranges(output_type: str) -> bool:
    """Return whether values of this type are steps within the range of their dimension."""
    return output_type in ("int8", "uint8")


def ranges_of(vectors: NDArray[Any]) -> Ranges:
    """Return the least and the greatest value of each dimension of ``vectors [n, width]``.

    Raises:
        ConfigError: there are fewer than 2 vectors, or values that are not finite numbers.
    """
    if len(vectors) < 2:
        raise ConfigError(f"int8 and uint8 need ranges, and {len(vectors)} vectors have none: give a calibration")
    with np.errstate(over="ignore"):  # what float32 does not hold is infinite, and refused
        ranges = np.stack((vectors.min(axis=0), vectors.max(axis=0))).astype(np.float32)
    if not np.isfinite(ranges).all():
        raise ConfigError("calibration holds values that are not finite: leave those vectors out")
    return ranges


def own_ranges(vectors: NDArray[np.float32]) -> Ranges:
    """Return the ranges of the vectors ``[n, width]`` that they are to divide, and warn if these are few.

    Raises:
        ConfigError: there are fewer than 2 vectors.
    """
    warn_about_few(len(vectors))
    return ranges_of(vectors)


def warn_about_few(count: int) -> None:
    """Warn if ranges are taken from fewer vectors than sentence-transformers deems enough."""
    if 2 <= count < ENOUGH_VECTORS:
        warnings.warn(
            f"the ranges of int8 and uint8 are those of {count} vectors: give a calibration of {ENOUGH_VECTORS} or more",
            stacklevel=2,
        )


def convert(vectors: NDArray[np.float32], output_type: OutputType, ranges: Ranges | None = None) -> Embeddings:
    """Return ``vectors [n, width]`` in another type.

    ``int8`` and ``uint8``: the step of 255 in which a value lies between the least and the greatest value of its dimension, from
    -128 and from 0. Values outside the range get the first or the last step. A dimension without a range has one step. ``binary``
    and ``ubinary``: ``[n, ceil(width / 8)]``, a bit for each value that is above 0, the first in the highest bit; ``binary`` is
    128 less.

    Raises:
        ConfigError: no ranges are given for int8 or uint8, and those of the vectors cannot be used.
    """
    if output_type == "float32":
        return vectors
    if output_type in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if output_type == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    if not len(vectors):
        return np.zeros(vectors.shape, output_type)
    least, greatest = own_ranges(vectors) if ranges is None else ranges
    steps = (greatest - least) / 255
    values = np.clip(np.floor((vectors - least) / np.where(steps == 0, 1, steps)), 0, 255)
    shifted: Embeddings = (values if output_type == "uint8" else values - 128).astype(output_type)
    return shifted
