"""The NPU platforms that programs can be compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.errors import ConfigError, shown


@dataclass(frozen=True)
class Platform:
    """A generation of Intel's NPU.

    ``number`` is the value of ``NPU_PLATFORM``. ``tiles`` is the largest useful ``NPU_TILES``, and ``default_tiles`` what the
    compiler takes without a device. ``prices_4_bit_as_16`` says that the compiler's cost model charges reads of 4-bit weights as
    if they had 16 bits (docs/npu.md). ``dma_bytes_per_us``: how fast that model reads memory, with all DMA engines, in large
    transfers.
    """

    number: str
    name: str
    tiles: int
    default_tiles: int
    prices_4_bit_as_16: bool
    dma_bytes_per_us: float

    def __str__(self) -> str:
        return f"{self.number} ({self.name})"


PLATFORMS = {
    platform.number: platform
    for platform in (
        Platform("3720", "Meteor Lake", 2, 2, True, 53.2e3),
        Platform("4000", "Lunar Lake", 6, 4, True, 64.3e3),
        Platform("5010", "Panther Lake", 3, 3, False, 145.6e3),
    )
}
"""The platforms by number, oldest first. The tiles were found by compiling one program with each ``NPU_TILES``, the rates in
schedules of large products."""


def platform_of(number: object) -> Platform:
    """Return the platform of a number such as ``"4000"``; ``NPU4000`` is the same, as some of OpenVINO's properties have it.

    Raises:
        ConfigError: it is no known platform.
    """
    found = PLATFORMS.get(str(number).upper().removeprefix("NPU")) if isinstance(number, (str, int)) else None
    if found is None:
        known = ", ".join(map(str, PLATFORMS.values()))
        raise ConfigError(f"platform {shown(number)} is not known: use one of {known}")
    return found
