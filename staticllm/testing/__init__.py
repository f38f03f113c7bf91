"""Provides fakes for tests, with which nothing is compiled: a pipeline, an engine and a device.

Your application gets a pipeline that answers what you say, through the real tokenizer, engine, scheduler and KV cache:

    with fake_pipeline(reply="It is sunny.") as pipe:
        assert pipe.generate("How is the weather?") == "It is sunny."

Your own policy runs in an engine without a thread:

    engine = fake_engine(MyPolicy(), max_num_seqs=2)
    requests = [fake_request([5, 6, 7], 4), fake_request([8, 9], 4)]
    run_to_end(engine, requests)
    assert requests[0].tokens == fake_answer([5, 6, 7], 4)

Your own way to run programs uses a runner over the fake device:

    runner = fake_runner([Variant(16, 0), Variant(1, 64), Variant(1, 128)])
    sequence = runner.cache.open()
    logits = runner.prefill(sequence, [5, 6, 7])
    assert int(logits.argmax()) == fake_next_token([5, 6, 7])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from staticllm.testing.device import (
    CAUSAL,
    POISON,
    VOCAB_SIZE,
    FakeProgram,
    FakePrograms,
    NextToken,
    add_program,
    checksum_of,
    fake_answer,
    fake_next_token,
    fake_runner,
    fake_shape,
    fold,
)
from staticllm.testing.engine import (
    FAKE_VARIANTS,
    FakeRequest,
    assert_empty,
    fake_engine,
    fake_request,
    run_to_end,
    run_until,
)

if TYPE_CHECKING:
    from staticllm.testing.pipeline import FakePipeline, fake_pipeline

__all__ = [
    "CAUSAL",
    "FAKE_VARIANTS",
    "POISON",
    "VOCAB_SIZE",
    "FakePipeline",
    "FakeProgram",
    "FakePrograms",
    "FakeRequest",
    "NextToken",
    "add_program",
    "assert_empty",
    "checksum_of",
    "fake_answer",
    "fake_engine",
    "fake_next_token",
    "fake_pipeline",
    "fake_request",
    "fake_runner",
    "fake_shape",
    "fold",
    "run_to_end",
    "run_until",
]


def __getattr__(name: str) -> object:
    """Import the fake pipeline, and OpenVINO with it, only when it is used."""
    if name in ("FakePipeline", "fake_pipeline"):
        from staticllm.testing import pipeline

        return getattr(pipeline, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
