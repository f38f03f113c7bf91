"""What is known about the served models, also about those that are not loaded, and LM Studio's and llamacpp's lists of it."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import openvino_genai as genai
from starlette.requests import Request
from starlette.responses import Response

from staticllm.errors import ClosedError, ModelError, StaticLLMError
from staticllm.model_dir import weights_of
from staticllm.model_files.converted import given_as
from staticllm.model_files.gguf_header import GGUFHeader, read_gguf_header
from staticllm.model_files.hub_files import quant_of
from staticllm.pipelines.conversation.formats import find_format, shows_tools
from staticllm.pipelines.generation.options.table import UNLIMITED
from staticllm.pipelines.launch.arguments import read_tokenizer, read_tool_template
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.endpoint import Answer, bodiless
from staticllm.server.http.errors import ApiError, json_response, model_missing
from staticllm.server.models.model_options import options_of
from staticllm.server.models.served import ModelSpec, ServedModel, kind_of
from staticllm.server.settings import ServerSettings
from staticllm.server.state import ServerState
from staticllm.system.files import read_regular
from staticllm.system.ir_file import MAX_XML, Constant, read_ir
from staticllm.version import __version__
from staticllm.wire.file_stamp import stamp_of

MAX_CONFIG = 1 << 20
ARCHITECTURE = "openvino"
"""What clients get as the architecture of every model: nothing here depends on what a model is called."""
_log = logging.getLogger("staticllm.server")
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))
STATES = {"loaded": "loaded", "loading": "loading", "unloaded": "not-loaded"}
FORMAT = "gguf"
"""Our models are not GGUF files, but Zed refuses lists with other formats than those that LM Studio runs."""
_PARAMS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
MODELS = "/api/v0/models"


@dataclass(frozen=True)
class ModelFacts:
    """What a model directory says.

    ``num_bytes`` is the size of the weights file, ``precision`` the element type of most weights (``u4``, ``f16`` …), and
    ``num_parameters`` counts its weights. Of a model that was made of a GGUF file, ``format`` is ``gguf``, and parameters and
    ``quantization`` are those of the file (``Q4_K_M``). ``digest`` (SHA-256, hexadecimal) identifies the graph and the size
    of the weights. ``modified`` is in seconds since 1970. ``template`` is the Jinja chat template, "" without one, and
    ``tool_template`` that for conversations with tools, if it is another.
    """

    num_parameters: int
    precision: str
    num_bytes: int
    digest: str
    modified: float
    hidden_size: int | None
    template: str
    tool_template: str = ""
    format: str = "openvino"
    quantization: str = ""

    @property
    def level(self) -> str:
        """How the weights are kept, in capitals: the quantization of a GGUF file, else the type of most of them."""
        return self.quantization or self.precision.upper()

    @property
    def size_label(self) -> str:
        """The number of parameters as people write it: ``7.6B``."""
        for unit, name in _UNITS:
            if self.num_parameters >= unit:
                number = self.num_parameters / unit
                return f"{number:.0f}{name}" if number >= 100 else f"{number:.1f}{name}"
        return str(self.num_parameters)

    @property
    def has_tools(self) -> bool:
        """Whether the chat template shows tools to the model."""
        return shows_tools(self.tool_template or self.template)

    @property
    def has_calls(self) -> bool:
        """Whether calls of these tools are found in answers."""
        return self.has_tools and bool(find_format(self.tool_template or self.template).syntax)

    @property
    def has_reasoning(self) -> bool:
        """Whether the chat template separates reasoning from the answer."""
        found = find_format(self.template)
        return bool(found.reasoning[0]) or found.syntax == "harmony"


UNKNOWN = ModelFacts(0, "unknown", 0, "", 0.0, None, "")
"""The facts of a model whose files are gone or damaged."""


def facts_of(spec: ModelSpec) -> ModelFacts:
    """Return what the files of a model say. The first call for a model takes up to seconds; any thread may call.

    Raises:
        ApiError: its files are gone (503).
        ModelError: its files are not those that the server started with, and are damaged.
    """
    try:
        graphs = [stamp_of(spec.path / name) for name in kind_of(spec).model_files]
        weights = [stamp_of(weights_of(spec.path, model_file=name)) for name in kind_of(spec).model_files]
        stamps = (*graphs, *weights)
        modified = max(content for _, content, _, _ in stamps)
        return _read(spec, (modified, sum(size for size, _, _, _ in weights), hash(stamps)))
    except OSError:
        raise model_missing(spec.name) from None


@lru_cache(64)
def _read(spec: ModelSpec, stamp: tuple[int, int, int]) -> ModelFacts:
    """``stamp``: when its files were changed last, ns, the bytes of its weights, and what changes with any of its files."""
    graphs = [read_regular(spec.path / name, MAX_XML) for name in kind_of(spec).model_files]
    config = _config_of(spec.path)
    hidden = config.get("hidden_size")
    constants = [constant for xml in graphs for constant in read_ir(xml).constants.values()]
    matrices = [constant for constant in constants if len(constant.shape) > 1 and constant.shape[-1] > 1]
    gguf = _gguf_of(spec.path)
    return ModelFacts(
        num_parameters=sum(math.prod(constant.shape) for constant in matrices) if gguf is None else gguf.num_parameters,
        format="openvino" if gguf is None else "gguf",
        quantization="" if gguf is None else quant_of(f"{gguf.path.parent.name}/{gguf.path.name}") or gguf.file_type,
        precision=_main_type(matrices),
        num_bytes=stamp[1],
        digest=hashlib.sha256(b"".join(graphs) + b"%d" % stamp[1]).hexdigest(),
        modified=stamp[0] / 1e9,
        hidden_size=hidden if type(hidden) is int and hidden > 0 else None,
        template=_template_of(spec),
        tool_template=read_tool_template(spec.path) if kind_of(spec).has_chats else "",
    )


def _gguf_of(directory: Path) -> GGUFHeader | None:
    """Return the header of the GGUF file that a model directory was made of; None if it is of another kind, or is gone.

    The graph that was made of it says less: a shared matrix is in it twice, and with the numbers that scale it.
    """
    given = Path(given_as(directory))
    if given == directory or given.suffix.lower() != ".gguf":
        return None
    try:
        return read_gguf_header(given)
    except (ModelError, OSError):
        return None


def _main_type(matrices: list[Constant]) -> str:
    sizes: Counter[str] = Counter()
    for constant in matrices:
        sizes[constant.element_type] += constant.size
    return sizes.most_common(1)[0][0] if sizes else "unknown"


def _config_of(directory: Path) -> Mapping[str, object]:
    try:
        config = json.loads(read_regular(directory / "config.json", MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _template_of(spec: ModelSpec) -> str:
    if not kind_of(spec).has_chats:
        return ""
    try:
        return str(read_tokenizer(spec.path).chat_template or "")
    except StaticLLMError:
        return ""


def current_facts(model: ServedModel) -> ModelFacts:
    """Return the facts of a model; of a loaded chat model with the template that is in use, even if its files are gone.

    Raises:
        ApiError: it is not loaded, and its files are gone (503).
        ModelError: it is not loaded, and its files are damaged.
    """
    pipeline = model.pipeline
    try:
        found = facts_of(model.spec)
    except (ApiError, ModelError):
        if pipeline is None:
            raise
        found = UNKNOWN
    if not isinstance(pipeline, StaticLLMPipeline):
        return found
    try:
        template = str(pipeline.get_tokenizer().chat_template or "")
    except ClosedError:  # it is being unloaded
        return found
    return found if template == found.template else replace(found, template=template, tool_template="")


def listed_facts(model: ServedModel) -> ModelFacts:
    """Return the facts of a model for a list of models, ``UNKNOWN`` if its files are gone or damaged: the others are listed."""
    try:
        return current_facts(model)
    except (ApiError, ModelError) as error:
        _log.warning("nothing is known about the model %r: %s", model.spec.name, error)
        return UNKNOWN


def context_length(model: ServedModel, settings: ServerSettings) -> int | None:
    """Return the most tokens of a prompt with its answer, or of a text; None if that is known only once the model is loaded."""
    pipeline = model.pipeline
    try:
        if pipeline is not None:
            return model.kind.max_len(pipeline)
        options = options_of(model.spec, settings)
        return model.kind.planned_len(model.spec.path, options.device, options.properties)
    except StaticLLMError:
        return None


def model_list(state: ServerState) -> dict[str, Any]:
    """Return all models: ``data`` as OpenAI's API has them, ``models`` those of chats as TypeSafe's has them."""
    models = state.hub.models.values()
    asked = [
        {
            "name": model.spec.name,
            "description": f"{model.kind.what} that answers questions",
            "release_date": time.strftime("%Y-%m-%d", time.gmtime(model.created)),
        }
        for model in models
        if model.spec.kind == "chat"
    ]
    return {"object": "list", "data": [describe(state, model) for model in models], "models": asked}


def describe(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return one model. ``status`` is ``loaded``, ``loading`` or ``unloaded``; ``max_model_len`` is known while it is loaded."""
    described: dict[str, Any] = {
        "id": model.spec.name,
        "object": "model",
        "created": model.created,
        "owned_by": "staticllm",
        "type": model.spec.kind,
        "status": state.hub.status(model),
    }
    return {**described, **model.kind.described(model.pipeline)}


def lm_studio_list(state: ServerState) -> dict[str, Any]:
    """Return all models. Reads their files; runs in a thread."""
    listed = [lm_studio_model(state, model) for model in state.hub.models.values() if model.kind.lm_studio_type]
    return {"object": "list", "data": listed}


def lm_studio_model(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return one model. ``max_context_length`` is that of the server's settings; it is left out while it is unknown."""
    facts = listed_facts(model)
    length = context_length(model, state.settings)
    found: dict[str, Any] = {
        "id": model.spec.name,
        "object": "model",
        "type": model.kind.lm_studio_type or model.spec.kind,
        "publisher": "local",
        "arch": ARCHITECTURE,
        "compatibility_type": FORMAT,
        "quantization": facts.level,
        "state": STATES[state.hub.status(model)],
        "capabilities": ["tool_use"] if facts.has_tools else [],
    }
    if length is not None:
        found["max_context_length"] = length
        if model.pipeline is not None:
            found["loaded_context_length"] = length
    return found


def props(state: ServerState, model: ServedModel) -> dict[str, Any]:
    """Return the properties of a chat model; those of its generation config only while it is loaded. Runs in a thread.

    ``model_path`` is the model's name: clients learn no paths of this machine.
    """
    facts = current_facts(model)
    length = context_length(model, state.settings)
    pipeline = model.pipeline
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
    loaded = model.loaded
    if isinstance(pipeline, StaticLLMPipeline) and loaded is not None and tokenizer is not None:
        config = pipeline.get_generation_config()
        params = {name: getattr(config, name) for name in _PARAMS}
        if params["top_k"] == UNLIMITED:
            params["top_k"] = 0  # llamacpp's value for all tokens
        found["default_generation_settings"]["params"] = params if config.do_sample else {**params, "temperature": 0.0}
        found["total_slots"] = loaded.num_seqs
        found["bos_token"] = tokenizer.get_bos_token()
        found["eos_token"] = tokenizer.get_eos_token()
    return found


def _tokenizer_of(pipeline: object) -> genai.Tokenizer | None:
    """Return the tokenizer of a chat model; None if it is not loaded, or is being unloaded."""
    try:
        return pipeline.get_tokenizer() if isinstance(pipeline, StaticLLMPipeline) else None
    except ClosedError:
        return None


def gets(state: ServerState) -> dict[str, Answer]:
    """Return the functions of the paths, none of which has a body."""

    def in_thread(describe: Callable[[Request], Callable[[], dict[str, Any]]]) -> Answer:
        async def run(request: Request) -> Response:
            work = describe(request)
            return await state.workers.run(lambda: json_response(work()))

        return bodiless(state, run)

    def one(request: Request) -> Callable[[], dict[str, Any]]:
        model = state.hub.named(request.path_params["name"])
        return lambda: lm_studio_model(state, model)

    def properties(request: Request) -> Callable[[], dict[str, Any]]:
        model = state.hub.find(request.query_params.get("model"), "chat")
        return lambda: props(state, model)

    return {
        MODELS: in_thread(lambda _: lambda: lm_studio_list(state)),
        MODELS + "/{name:path}": in_thread(one),
        "/props": in_thread(properties),
    }
