"""Beam searches for tests: a request that runs one, and a step of one whose logits are all there."""

from staticllm.pipelines.engine.beams import BeamRequest
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.beam_search import BeamParams
from staticllm.testing.device import VOCAB_SIZE


def advanced(search, logits, masks=()):
    """Give a search the logits after each beam in progress, with what forbids tokens there, and return the next beams."""
    for index, line in enumerate(logits):
        search.take(index, line, masks[index] if masks else None)
    return search.advance()


def beam_request(prompt, num_new, num_beams=3, num_sequences=2, **options):
    params = BeamParams(
        num_beams, **{name: options.pop(name) for name in ("num_beam_groups", "diversity_penalty") if name in options}
    )
    asked = EngineRequest(tuple(prompt), max_new_tokens=num_new, num_sequences=num_sequences, beams=params, **options)
    return BeamRequest(asked, VOCAB_SIZE)
