"""Language models with an engine in the daemon: programs submit requests, and share calls, weights and cached prefixes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import openvino_genai as genai

from staticllm.core import OnProgress
from staticllm.daemon.bodies import Claim, Snapshot
from staticllm.daemon.models.client_models import LanguageOrigin
from staticllm.daemon.sharing.device_scheduler import EngineId
from staticllm.daemon.sharing.device_use import DeviceUse
from staticllm.daemon.sharing.devices import Devices
from staticllm.errors import ClosedError, ConfigError, ModelError, PromptError, StaticLLMError, last_line
from staticllm.pipelines.daemon_client.request_checks import check_fields, check_scales
from staticllm.pipelines.engine.client import SnapshotTarget
from staticllm.pipelines.engine.request import EngineRequest, EngineText
from staticllm.pipelines.grammars.compiler import GrammarCompiler
from staticllm.pipelines.grammars.vocabulary import read_vocabulary
from staticllm.pipelines.launch.arguments import read_tokenizer
from staticllm.pipelines.launch.draft_origin import use_draft
from staticllm.pipelines.launch.engine import Launched, launch
from staticllm.pipelines.scheduling.interface import SHARED_BOUND
from staticllm.pipelines.scheduling.planner import make_policy


class LanguageModel:
    """A language model that an engine of the daemon serves. Its steps take turns with the other calls on its device."""

    mode = "engine"

    def __init__(self, id: int, launched: Launched, devices: Devices, num_bytes: int = 0) -> None:
        self.id = id
        self.launched = launched
        self.device = launched.device
        self.engine = launched.engine
        self.engine.steps.device_use = DeviceUse(devices.scheduler(launched.device), EngineId(id), num_bytes)

    def describe(self) -> dict[str, Any]:
        """Return what a client's pipeline must know of the model, as JSON types."""
        config = self.launched.config
        return {
            "device": self.launched.device, "vocab_size": self.launched.vocab_size, "kv_type": self.launched.kv_type,
            "has_mapped_weights": self.launched.has_mapped_weights,
            "max_prompt_len": config.max_prompt_len, "min_response_len": config.min_response_len,
        }  # fmt: skip

    def request_of(self, values: Mapping[str, Any]) -> EngineRequest:
        """Return the checked request of a client. Raises ``PromptError`` and ``ConfigError``."""
        try:
            request = EngineRequest.from_dict(values)
            check_fields(request, self._num_adapters)
        except StaticLLMError:
            raise
        except ValueError as error:
            raise ConfigError(f"a request with wrong fields: {error}") from None
        limit = self.launched.config.max_seq_len
        ids = request.prompt
        if not 0 < len(ids) <= limit or not self.are_tokens(ids):
            last = self.launched.vocab_size - 1
            raise PromptError(f"a prompt of {len(ids)} ids: must be 1 to {limit} ids from 0 to {last}")
        return request

    def check_window(self, window: int) -> None:
        """Check whether a request may see a window; 0 is none. Raises ``PromptError``."""
        if window:
            raise PromptError("the request names a window, and the model is no speech model")

    def are_tokens(self, ids: Sequence[object]) -> bool:
        """Return whether all ids are tokens of the model."""
        vocab = self.launched.vocab_size
        return all(type(id) is int and 0 <= id < vocab for id in ids)

    @property
    def _num_adapters(self) -> int:
        """The number of adapters that requests can choose from."""
        adapters = self.launched.config.adapters
        return 0 if adapters is None or adapters.is_fused else len(adapters.adapters)

    def get_property(self, name: str) -> object:
        """Raise an error: an engine has several programs, with properties of their own. Raises ``ConfigError``."""
        raise ConfigError(f"a language model with an engine has no property {name!r}")

    def snapshot(self, asked: Snapshot) -> int:
        """Save or load a snapshot, and return its number of tokens.

        Raises:
            ConfigError: a field is wrong.
            SnapshotError: it cannot be saved or loaded.
        """
        path = Path(asked.path)
        if not path.is_absolute():
            raise ConfigError("SNAPSHOT: path must be absolute")
        check_scales(asked.adapters, self._num_adapters)
        target = SnapshotTarget(path, asked.identity, bytes.fromhex(asked.key), tuple(asked.adapters))
        return (
            self.engine.save_snapshot(asked.tokens, target)
            if asked.action == "save"
            else self.engine.load_snapshot(target)
        )

    def claim(self, client: str, asked: Claim) -> None:
        """Keep a conversation of a session of ``client`` longer than others.

        Raises:
            ConfigError: a field is wrong.
        """
        if not self.are_tokens(asked.tokens):
            raise ConfigError("CLAIM: tokens must be those of the model")
        check_scales(asked.adapters, self._num_adapters)
        self.engine.claim(asked.session, asked.tokens, tuple(asked.adapters), owner=client)

    def drop_claims(self, client: str) -> None:
        """Drop what the sessions of ``client`` have claimed."""
        with contextlib.suppress(ClosedError):
            self.engine.drop_claims(client)

    def close(self) -> None:
        self.launched.close()


def compile_language_model(
    origin: LanguageOrigin, id: int, devices: Devices, on_progress: OnProgress = lambda event: None
) -> LanguageModel:
    """Load a language model on the first of its devices that can run it, with its draft model, and start its engine.

    Raises:
        ModelError, UnsupportedModelError, ConfigError, AdapterError, BlobError, DeviceError: as for ``StaticLLMPipeline``.
    """
    candidates = origin.loadable()
    policy = make_policy(candidates[0].config.scheduler)
    tokenizer = LazyTokenizer(origin.directory)
    launched = launch(origin.directory, candidates, policy, on_progress, tokenizer.engine_text, SHARED_BOUND)
    if origin.draft is not None:
        use_draft(origin.draft, launched, tokenizer.read(), on_progress)
    return LanguageModel(id, launched, devices, origin.num_bytes)


class LazyTokenizer:
    """The tokenizer in a model directory, read when it is first needed. Any thread may call the methods."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._tokenizer: genai.Tokenizer | None = None

    def read(self) -> genai.Tokenizer:
        """Return the tokenizer.

        Raises:
            ModelError: it cannot be read.
        """
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = read_tokenizer(self._directory)
            return self._tokenizer

    def engine_text(self) -> EngineText:
        """Return what an engine needs of the tokenizer."""
        return EngineText(self.decode, GrammarCompiler(lambda: read_vocabulary(self.read())))

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens.

        Raises:
            ModelError: the tokenizer cannot be read, or cannot decode them.
        """
        try:
            text: str = self.read().decode(tokens)
        except RuntimeError as error:
            raise ModelError(f"the tokenizer cannot decode {len(tokens)} tokens: {last_line(error)}") from error
        return text
