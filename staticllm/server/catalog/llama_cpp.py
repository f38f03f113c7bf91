"""llamacpp's ``/props``: the settings of a chat model, its template, and how many answers run at once."""

from __future__ import annotations

from typing import Any

import openvino_genai as genai

from staticllm.errors import ClosedError
from staticllm.pipelines.generation.options import UNLIMITED
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.catalog.facts import context_length, current_facts
from staticllm.server.served_model import ServedModel
from staticllm.server.state import ServerState
from staticllm.version import __version__

_PARAMS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def props(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return the properties of a chat model; those of its generation config only while it is loaded. Runs in a thread.

    ``model_path`` is the model's name: clients learn no paths of this machine.
    """
    facts, length, pipeline = current_facts(model), context_length(model, state.settings), model.pipeline
    found: dict[str, Any] = {
        "default_generation_settings": {"n_ctx": length, "params": {}},
        "model_alias": model.spec.name,
        "model_path": model.spec.name,
        "chat_template": facts.template,
        "chat_template_caps": {"supports_tools": facts.has_tools, "supports_tool_calls": facts.has_calls},
        "modalities": {"vision": False, "audio": False},
        "build_info": f"staticllm-{__version__}",
        "is_sleeping": pipeline is None,
    }
    tokenizer = _tokenizer_of(pipeline)
    if isinstance(pipeline, StaticLLMPipeline) and tokenizer is not None:
        config = pipeline.get_generation_config()
        params = {name: getattr(config, name) for name in _PARAMS}
        if params["top_k"] == UNLIMITED:
            params["top_k"] = 0  # llamacpp's value for all tokens
        found["default_generation_settings"]["params"] = params if config.do_sample else {**params, "temperature": 0.0}
        found["total_slots"] = model.num_seqs(state.settings.device)
        found["bos_token"], found["eos_token"] = tokenizer.get_bos_token(), tokenizer.get_eos_token()
    return found


def _tokenizer_of(pipeline: object) -> genai.Tokenizer | None:
    """Return the tokenizer of a chat model; None if it is not loaded, or is being unloaded."""
    try:
        return pipeline.get_tokenizer() if isinstance(pipeline, StaticLLMPipeline) else None
    except ClosedError:
        return None
