"""What programs are made of, whatever kind of model it is: a lowered model, and the types that stand for its sizes and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import openvino as ov

from staticllm.compiler_passes.pass_pipeline import PassReport
from staticllm.core import ProgramVariant

V = TypeVar("V", bound=ProgramVariant)
"""The sizes of a program."""
S = TypeVar("S")
"""What the host must know of a lowered model: its inputs, outputs and states."""
S_co = TypeVar("S_co", covariant=True)
V_contra = TypeVar("V_contra", bound=ProgramVariant, contravariant=True)


class Lowered(Protocol[V_contra, S_co]):
    """A model after its passes, with any sizes."""

    @property
    def shape(self) -> S_co:
        """The contract between the passes and the host."""
        ...

    @property
    def reports(self) -> Sequence[PassReport]:
        """What each pass did, in their order."""
        ...

    def specialise(self, variant: V_contra, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program. ``is_static``: check that every shape in it is static."""
        ...

    def share(self, variants: tuple[V_contra, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, with bounded dynamic sizes."""
        ...
