"""Compiling in blocks that an error stops: what nobody takes is not compiled."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from staticllm.compiler_passes.compiling.compile import compile_each
from staticllm.core import Variant


def test_an_error_of_the_callback_ends_the_programs_that_wait():
    ended = []

    def chains(programs):
        try:
            yield from programs
        finally:
            ended.append(True)

    variants = tuple(Variant(rows, 64, 1, 1) for rows in (1, 16))
    group = SimpleNamespace(properties={})
    options = SimpleNamespace(layout="blocks", mode="separate", device="CPU", program_group=lambda variant: group)
    plan = SimpleNamespace(
        options=options, variants=variants, lowered=SimpleNamespace(specialise=lambda variant: None),
        chains=SimpleNamespace(compile_each=chains), weights=SimpleNamespace(num_bytes=0),
    )  # fmt: skip

    def on_progress(event):
        if event.is_done:
            raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="is gone") as caught:
        dict(compile_each(plan, on_progress))
    assert ended == [True], "while the error is kept, and with it the frames that it passed"
    del caught
