"""Memory of the host that a device reads in place: weights and KV slots are in it, so that no call copies them."""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.devices import kind

from ...kvcache.arena import Allocate

_DEVICES = frozenset({"NPU"})
"""Kinds of devices whose plugin would copy an input of other memory in each call."""


def device_allocator(core: ov.Core, device: str) -> Allocate | None:
    """Return a function that allocates bytes which the device reads in place; None if memory of any kind is as good.

    The arrays that it returns hold the plugin's tensors, which are freed with them. It raises ``MemoryError``.
    """
    if kind(device) not in _DEVICES:
        return None
    try:
        context = core.get_default_context(device)
    except RuntimeError:  # a driver without it: the plugin copies
        return None

    def allocate(num_bytes: int) -> NDArray[np.uint8]:
        try:
            tensor = context.create_host_tensor(ov.Type.u8, ov.Shape([max(num_bytes, 1)]))
        except RuntimeError as error:
            raise MemoryError(f"{device} has no {num_bytes / 1e9:.1f} GB left") from error
        data: NDArray[np.uint8] = tensor.data
        return data[:num_bytes]

    return allocate
