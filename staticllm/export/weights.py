"""Which types an exported model's weights get: the defaults of each device, and what may be asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from staticllm.errors import ConfigError, shown

WeightType = Literal["int4", "int8", "f16", "f32"]
TYPES: tuple[WeightType, ...] = get_args(WeightType)
BY_CHANNEL = -1
GROUP_SIZES = (BY_CHANNEL, 16, 32, 64, 128, 256, 512, 1024)
GROUP_SIZE = 128
DEVICES = ("NPU", "CPU", "GPU")


@dataclass(frozen=True)
class WeightFormat:
    """The type of the weights.

    With 4 bits, embeddings and the head have 8, symmetric like the others or not. If a group size does not divide the rows of a
    matrix, the largest smaller one that does is taken.
    """

    kind: WeightType
    group_size: int = BY_CHANNEL
    """Weights that share a scale; -1 for those of a channel."""
    is_symmetric: bool = False

    @property
    def compression(self) -> dict[str, Any] | None:
        """The arguments of optimum's ``OVWeightQuantizationConfig``; None for weights that are not compressed."""
        if self.kind not in ("int4", "int8"):
            return None
        common = {"sym": self.is_symmetric, "group_size": self.group_size, "ratio": 1.0}
        if self.kind == "int8":
            return {"bits": 8, **common}
        backup = "int8_sym" if self.is_symmetric else "int8_asym"
        return {"bits": 4, **common, "backup_precision": backup, "group_size_fallback": "adjust"}

    @property
    def dtype(self) -> str | None:
        """Optimum's name of the type of weights that are not compressed."""
        return {"f16": "fp16", "f32": "fp32"}.get(self.kind)

    def __str__(self) -> str:
        if self.compression is None:
            return self.kind
        size = "by channel" if self.group_size == BY_CHANNEL else f"groups of {self.group_size}"
        return f"{self.kind}, {'symmetric' if self.is_symmetric else 'asymmetric'}, {size}"


def weights_for(
    device: str,
    is_decoder: bool,
    kind: WeightType | None = None,
    group_size: int | None = None,
    is_symmetric: bool | None = None,
) -> WeightFormat:
    """Return the weights for a device; what is None is chosen.

    - NPU: symmetric, because zero points cost it time; int4 in groups of 128, because channels in 4 bits without calibration
      change small models too much, and groups cost a decode step 13 to 38 % in the compiler's prediction (docs/npu.md).
    - CPU and GPU: int8 with zero points, which is close to the original and what the benchmarks measure; int4 if it is asked for.
    - Encoders: f16, because a call computes many rows with the same weights, so that their size does not decide its time.

    Raises:
        ConfigError: a value that is impossible, or that does not go with the type.
    """
    chosen = kind or (("int4" if device == "NPU" else "int8") if is_decoder else "f16")
    if chosen in ("f16", "f32"):
        for name, value in (("--group-size", group_size), ("--symmetric or --asymmetric", is_symmetric)):
            if value is not None:
                raise ConfigError(f"{name} needs weights of int4 or int8, and these have {chosen}: leave it out")
        return WeightFormat(chosen)
    if group_size is not None and group_size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES[1:]))
        raise ConfigError(
            f"--group-size {shown(group_size)} is impossible: give {sizes}, or -1 for one group per channel"
        )
    if chosen == "int8" and group_size not in (None, BY_CHANNEL):
        raise ConfigError(f"--group-size {group_size} is for int4, int8 has one group per channel: leave it out")
    default = GROUP_SIZE if chosen == "int4" else BY_CHANNEL
    return WeightFormat(
        chosen,
        default if group_size is None else group_size,
        device == "NPU" if is_symmetric is None else is_symmetric,
    )
