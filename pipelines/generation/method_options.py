"""Reads the options of decoding methods from merged options: beam search, and drafts, with GenAI's rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.config import whole
from staticllm.errors import GenerationConfigError, shown
from staticllm.pipelines.generation.beam_search import BeamParams, StopCriteria
from staticllm.pipelines.generation.config_values import DRAFTING, WIDE
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.extra_options import number

UNLIMITED = 2**64 - 1
MAX_BEAMS = 64
LONGEST_DRAFT = 64
"""Larger values of the options of drafts count as this one: no call checks more."""
_STOP_CRITERIA: dict[str, StopCriteria] = {"early": "early", "heuristic": "heuristic", "never": "never"}


def beams_of(options: Mapping[str, Any]) -> BeamParams | None:
    """Return the parameters of a beam search, with GenAI's rules; None without one."""
    num_beams = whole("num_beams", options["num_beams"], 1, MAX_BEAMS)
    if num_beams == 1:
        return None
    groups = whole("num_beam_groups", options["num_beam_groups"], 1, num_beams)
    if num_beams % groups:
        raise GenerationConfigError(
            f"num_beams={num_beams} cannot be divided into num_beam_groups={groups} equal groups"
        )
    for name, needed in (
        ("do_sample", False),
        ("frequency_penalty", 0),
        ("presence_penalty", 0),
        ("repetition_penalty", 1),
    ):
        if options[name] != needed:
            raise GenerationConfigError(
                f"{name}={shown(options[name])} with num_beams={num_beams}: leave one of them out"
            )
    diversity = _wide(options, "diversity_penalty")
    if (diversity != 0.0) != (groups > 1):
        remedy = "set a penalty" if groups > 1 else "raise num_beam_groups"
        raise GenerationConfigError(f"diversity_penalty={diversity:g} with num_beam_groups={groups}: {remedy}")
    ngram = whole("no_repeat_ngram_size", options["no_repeat_ngram_size"], 1, UNLIMITED)
    criteria = getattr(options["stop_criteria"], "name", options["stop_criteria"])
    if not isinstance(criteria, str) or criteria.lower() not in _STOP_CRITERIA:
        raise GenerationConfigError(f"stop_criteria={shown(criteria)}: must be EARLY, HEURISTIC or NEVER")
    return BeamParams(
        num_beams,
        groups,
        diversity,
        _wide(options, "length_penalty"),
        None if ngram == UNLIMITED else ngram,
        _STOP_CRITERIA[criteria.lower()],
    )


def _wide(options: Mapping[str, Any], name: str) -> float:
    return number(options, name, WIDE[name].least, WIDE[name].most)


def drafts_of(options: Mapping[str, Any]) -> DraftParams | None:
    """Return how tokens are drafted, without what the pipeline adds; None if no option asks for drafts."""
    ngram_size = whole("max_ngram_size", options["max_ngram_size"], 0, UNLIMITED)
    max_tokens = whole("num_assistant_tokens", options["num_assistant_tokens"] or 0, 0, UNLIMITED)  # may be None
    confidence = number(options, "assistant_confidence_threshold", 0.0, 1.0)
    asked = [name for name in DRAFTING if options[name]]
    if not asked:
        return None
    for name in ("num_beams", "num_return_sequences"):
        if options[name] != 1:
            raise GenerationConfigError(
                f"{asked[0]}={shown(options[asked[0]])} with {name}={shown(options[name])}: "
                "drafts are for single answers; leave one out"
            )
    if max_tokens and confidence:
        raise GenerationConfigError(
            f"num_assistant_tokens={max_tokens} with assistant_confidence_threshold={confidence:g}: a draft ends by its length "
            "or by its confidence; leave one out"
        )
    return DraftParams(min(ngram_size, LONGEST_DRAFT), min(max_tokens, LONGEST_DRAFT), confidence=confidence)
