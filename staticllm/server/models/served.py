"""One model that the server can load: its name, what kind it is, and its pipeline while it is loaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast

from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ClosedError, ConfigError, quoted
from staticllm.model_dir import demo_model_path
from staticllm.model_files.hub import located
from staticllm.model_paths.arguments import expanded
from staticllm.pipelines.daemon_client.remote_engine import DaemonHome
from staticllm.pipelines.embedding.queue.device_queue import DeviceState
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.grammars.vocabulary import Vocabulary, read_vocabulary
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from staticllm.pipelines.text_rerank_pipeline import StaticRerankPipeline
from staticllm.pipelines.whisper_pipeline import StaticWhisperPipeline
from staticllm.server.models.admission import Admission
from staticllm.server.models.device_engines import DeviceEngine, DeviceEngines
from staticllm.server.models.homes import ModelHome
from staticllm.server.models.kinds import Pipeline, ServedKind, Wanted, estimated_size, found_model, served_kinds

LoadPipeline: TypeAlias = Callable[..., Pipeline]
"""Loads a model, with the arguments of ``load_pipeline``."""
DEMO_NAME = "demo"


@dataclass(frozen=True)
class ModelSpec:
    """A model that is served: the name that clients use, its directory, and its kind, one of ``served_kinds``.

    ``device`` and ``properties`` are its own options; None and no properties for those of the server. ``work_class``: that of
    requests that do not say it; None for reactive. ``system``: the system message of conversations without one; None for none.
    ``sampling``: options of ``StaticLLMPipeline.submit`` that requests have unless they say others.
    """

    name: str
    path: Path
    kind: str
    device: str | None = field(default=None, compare=False)
    properties: Mapping[str, object] = field(default_factory=dict, compare=False)
    work_class: str | None = field(default=None, compare=False)
    system: str | None = field(default=None, compare=False)
    sampling: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Return the messages of a conversation, behind the model's own system message if they begin with none."""
        if self.system is None or (messages and messages[0].get("role") in ("system", "developer")):
            return messages
        return [{"role": "system", "content": self.system}, *messages]


def model_spec(argument: str) -> ModelSpec:
    """Return the model of ``NAME=PATH`` or ``PATH``; of a path alone, the name is that of the folder, and
    of a name on Hugging Face that one.

    Raises:
        ModelError: the directory is missing, half-written, or holds no model that can be served.
        ConfigError: the name is empty.
    """
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).is_dir():
        path = argument
        name = located(expanded(path)).name
    if not name.strip():
        raise ConfigError(f"{quoted(argument)}: a model is NAME=PATH or PATH")
    return ModelSpec(name, *found_model(expanded(path)))  # shells leave the ~ of NAME=~/folder as it is


def kind_of(spec: ModelSpec) -> ServedKind:
    """Return what kind of model it is."""
    return served_kinds()[spec.kind]


def demo_spec() -> ModelSpec:
    """Return the embedded model."""
    return ModelSpec(DEMO_NAME, demo_model_path(), "chat")


@dataclass(frozen=True)
class Unloaded:
    """The state of a model that uses no memory."""


@dataclass(frozen=True)
class Loading:
    """The state of a model that is being loaded. ``progress`` is the last part of it that is known."""

    progress: ProgressEvent | None = None


@dataclass(frozen=True)
class ReadyModel:
    """The state of a model that can be used, unless its process ``is_lost``.

    ``num_seqs``: the answers that run at once. ``home``: the other process in which its engine runs; None for this one.
    ``is_apart``: whether it has a worker process without an engine. ``proactive``: the admission of proactive requests,
    which take no places of the others; None if they share ``admission``.
    """

    kind: ServedKind
    pipeline: Pipeline
    admission: Admission
    num_seqs: int
    home: ModelHome | None = None
    is_apart: bool = False
    proactive: Admission | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the other process has ended, and is not started again by itself."""
        if self.home is not None:
            return self.home.is_lost
        return self.is_apart and not self.kind.is_usable(self.pipeline)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens of a chat model; the first caller reads them."""
        return read_vocabulary(cast(StaticLLMPipeline, self.pipeline).get_tokenizer())


UNLOADED = Unloaded()


class ServedModel:
    """A model by its name: its state, and who uses it. Belongs to the event loop; other threads may read it.

    ``num_users`` counts requests that use it or wait for it, ``last_used`` is a moment of ``time.monotonic``, ``created`` one in
    seconds since 1970. ``keep_alive``: seconds without a request after which it is unloaded, as its last client said; None for
    the server's own. ``size``: its bytes, by estimate; None before one was made.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state: Unloaded | Loading | ReadyModel = UNLOADED
        self._lock = threading.Lock()  # held while the state changes
        self.num_users = 0
        self.last_used = time.monotonic()
        self.keep_alive: float | None = None
        self.created = int(time.time())
        self.size: int | None = None

    @property
    def kind(self) -> ServedKind:
        """What kind of model it is."""
        return kind_of(self.spec)

    def become(self, state: Unloaded | Loading | ReadyModel) -> None:
        """Change the state. A model that begins to load forgets what its last client said."""
        if isinstance(state, Loading) and isinstance(self.state, Unloaded):
            self.keep_alive = None
        elif isinstance(state, ReadyModel):
            self.created = int(time.time())
            self.last_used = time.monotonic()
        with self._lock:
            self.state = state

    def note_progress(self, event: ProgressEvent) -> None:
        """Note a part of loading. Any thread may call, also after the end: parts may be compiled in the background."""
        with self._lock:
            if isinstance(self.state, Loading):
                self.state = Loading(event)

    def enter(self) -> None:
        """Count a user."""
        self.num_users += 1

    def leave(self) -> None:
        """Count a user less."""
        self.num_users -= 1
        self.last_used = time.monotonic()

    def keep_for(self, seconds: float | None) -> None:
        """Set ``keep_alive``."""
        self.keep_alive = seconds

    def estimate(self, device: str, properties: Mapping[str, object]) -> int:
        """Return the bytes that it needs, by estimate. The first call takes seconds.

        Raises:
            StaticLLMError: it cannot be lowered for the device.
        """
        if self.size is None:
            self.size = estimated_size(self.kind, self.spec.path, device, properties)
        return self.size

    @property
    def loaded(self) -> ReadyModel | None:
        """The state of a model that is loaded."""
        state = self.state  # read once: it may change meanwhile
        return state if isinstance(state, ReadyModel) else None

    @property
    def progress(self) -> ProgressEvent | None:
        """The last part of its loading, while it is being loaded."""
        state = self.state
        return state.progress if isinstance(state, Loading) else None

    @property
    def is_ready(self) -> bool:
        """Whether it is loaded and can be used now."""
        loaded = self.loaded
        return loaded is not None and not loaded.is_lost

    @property
    def is_lost(self) -> bool:
        """Whether it was loaded in another process that has ended, and is not started again by itself."""
        loaded = self.loaded
        return loaded is not None and loaded.is_lost

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline of a model that is loaded."""
        loaded = self.loaded
        return None if loaded is None else loaded.pipeline

    @property
    def admission(self) -> Admission | None:
        """Which requests enter a model that is loaded."""
        loaded = self.loaded
        return None if loaded is None else loaded.admission

    @property
    def admissions(self) -> tuple[Admission, ...]:
        """Which requests of each class enter a model that is loaded; empty while it is not."""
        loaded = self.loaded
        if loaded is None:
            return ()
        return (loaded.admission,) if loaded.proactive is None else (loaded.admission, loaded.proactive)

    def admission_of(self, is_proactive: bool) -> Admission:
        """Return which requests of a class enter a model that is loaded."""
        loaded = self.loaded
        assert loaded is not None, "it is not loaded"
        return loaded.proactive if is_proactive and loaded.proactive is not None else loaded.admission

    @property
    def home(self) -> ModelHome | None:
        """The other process in which a chat model is loaded."""
        loaded = self.loaded
        return None if loaded is None else loaded.home

    @property
    def chat(self) -> StaticLLMPipeline:
        """The pipeline of a chat model that is loaded."""
        return cast(StaticLLMPipeline, self._loaded())

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of a chat model that is loaded. Reading them takes about a second per 150,000, so use a thread."""
        loaded = self.loaded
        assert loaded is not None, "it is not loaded"
        return loaded.vocabulary

    @property
    def embedding(self) -> StaticEmbeddingPipeline:
        """The pipeline of an embedding model that is loaded."""
        return cast(StaticEmbeddingPipeline, self._loaded())

    @property
    def rerank(self) -> StaticRerankPipeline:
        """The pipeline of a reranker that is loaded."""
        return cast(StaticRerankPipeline, self._loaded())

    @property
    def speech(self) -> StaticWhisperPipeline:
        """The pipeline of a speech model that is loaded."""
        return cast(StaticWhisperPipeline, self._loaded())

    def _loaded(self) -> Pipeline:
        loaded = self.loaded
        assert loaded is not None, "it is not loaded"
        return loaded.pipeline

    @property
    def local_engine(self) -> Engine | None:
        """The engine of a chat model that is loaded; None if it is in another process."""
        loaded = self.loaded
        assert loaded is not None, "it is not loaded"
        return cast(StaticLLMPipeline, loaded.pipeline).engine if loaded.home is None else None

    @property
    def devices(self) -> tuple[DeviceState, ...]:
        """The queues of the devices of an encoder that is loaded; none for a chat model. Any thread may call."""
        pipeline = self.pipeline
        return pipeline.devices() if isinstance(pipeline, EncoderPipeline) else ()

    @property
    def engine_owner(self) -> str | None:
        """The name of the chat model whose engine runs an encoder or a speech model; None if none does."""
        pipeline = self.pipeline
        engine = pipeline.shared_engine if isinstance(pipeline, (EncoderPipeline, StaticWhisperPipeline)) else None
        return engine.owner if isinstance(engine, DeviceEngine) else None

    def calls_after(self, number: int) -> dict[str, Any]:
        """Return what the engine of a chat model has done since the call or answer of this number. Any thread may call.

        Raises:
            ClosedError: it is not loaded, or its process has ended.
        """
        loaded = self.loaded
        if loaded is None:
            raise ClosedError("the model is not loaded")
        engine = cast(StaticLLMPipeline, loaded.pipeline).engine if loaded.home is None else loaded.home.engine
        return engine.calls_after(number)


def load_pipeline(
    spec: ModelSpec,
    device: str,
    properties: Mapping[str, object],
    on_progress: OnProgress,
    daemon: bool | DaemonHome = False,
    is_apart: bool = False,
    engines: DeviceEngines | None = None,
) -> Pipeline:
    """Load a model; the arguments are those of ``Wanted``.

    Raises:
        StaticLLMError: it cannot be loaded.
    """
    return kind_of(spec).load(Wanted(spec.path, device, properties, on_progress, daemon, is_apart, spec.name, engines))
