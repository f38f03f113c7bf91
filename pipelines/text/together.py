"""Runs several prompts of one call together, and returns all their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from staticllm.errors import BusyError
from staticllm.pipelines.text.handle import GenerationHandle
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.pipelines.text.tokenization import Prompt

Begin = Callable[[Prompt], GenerationHandle]
"""Submits one prompt."""


def run_together(begin: Begin, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """Submit all prompts, at most ``MAX_WAITING`` at a time, and wait for their answers, in the order of the prompts.

    Raises:
        BusyError: the queue is full of other requests.
        StaticLLMError: a request failed; all are cancelled then.
    """
    handles: list[GenerationHandle] = []
    try:
        for prompt in prompts:
            handles.append(_begin_when_possible(begin, prompt, handles))
        return [output for handle in handles for output in handle.outputs()]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise


def _begin_when_possible(begin: Begin, prompt: Prompt, before: Sequence[GenerationHandle]) -> GenerationHandle:
    """Submit a prompt. If the queue is full and holds prompts of this call, wait for the first of them."""
    while True:
        try:
            return begin(prompt)
        except BusyError:
            unfinished = [handle for handle in before if not handle.is_done]
            if not unfinished:
                raise
            unfinished[0].outputs()
