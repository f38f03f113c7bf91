"""Loads a model in the daemon, in place of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ConfigError, ModelError, pipeline_closed, shown
from staticllm.model_dir import model_in_memory
from staticllm.system.heap import return_free_memory
from staticllm.system.long_calls import attended, told
from staticllm.wire.messages import Kind, Message

from ..launch.arguments import Candidate
from ..launch.draft_origin import DraftOrigin
from ..launch.genai_properties import plain_properties
from ..scheduling.interface import Policy
from .daemon_link import DaemonLink
from .engine_connection import EngineConnection, OnLost
from .remote_engine import DaemonHome, RemoteEngine, UserDaemon

SECRETS = ("cache_encryption_callbacks", "weights_decryption_callback", "integrity_key")
"""Fields of the config that do not leave this process."""
KEPT = ("vocab_size", "kv_type", "max_prompt_len", "min_response_len", "num_cross_windows", "bands", "columns")
"""What the next daemon must say of a model as the one before it."""
STAYS = "cannot be sent to the daemon, only used in this program (daemon=False, STATICLLM_ATTACH=auto)"


@dataclass(frozen=True)
class RemoteSpeech:
    """How a speech model is loaded: the windows that are decoded together, and the attention heads that find words, if wanted."""

    num_windows: int
    heads: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class RemoteLaunched:
    """A model that the daemon serves on ``device``; the counterpart of ``Launched``."""

    engine: RemoteEngine
    config: StaticLLMConfig
    device: str
    vocab_size: int
    kv_type: str
    has_mapped_weights: bool
    features_shape: tuple[int, int] = (0, 0)
    """Bands and columns of a window, of a speech model."""
    background: None = None

    def close(self, drain: bool = False) -> None:
        """End this program's requests and give the model back. A second call does nothing."""
        self.engine.close(drain)


Launch = Callable[[Path, Sequence[Candidate], Policy, OnProgress], RemoteLaunched]


def check_home(daemon: object) -> None:
    """Check the argument ``daemon`` of a pipeline.

    Raises:
        ConfigError: it is something else than a bool or a home.
    """
    if not isinstance(daemon, bool) and not hasattr(daemon, "adopt"):
        raise ConfigError(f"daemon={shown(daemon)}: must be True, False or a DaemonHome")


def remote_launcher(
    daemon: bool | DaemonHome,
    draft: DraftOrigin | None = None,
    has_own_tokenizer: bool = False,
    speech: RemoteSpeech | None = None,
) -> Launch:
    """Return a function that loads a model in a daemon; True stands for the one that the programs of this user share.

    The daemon reads the adapters and the draft model from their files. The function raises ``ConfigError`` if a property cannot
    be sent to another process, ``DeviceError`` if no daemon can be reached, and another ``StaticLLMError`` if the daemon refuses
    the model; the message says why.

    Args:
        daemon: True, or the home of a daemon.
        draft: The draft model; None without one.
        has_own_tokenizer: Whether the pipeline has another tokenizer than that of the model's directory, which the
            daemon uses.
        speech: How a speech model is loaded; None for a language model.

    Raises:
        ConfigError: ``daemon`` is something else.
    """
    check_home(daemon)
    home = UserDaemon() if isinstance(daemon, bool) else daemon
    return partial(_launch, home, draft, has_own_tokenizer, speech)


def _launch(
    home: DaemonHome,
    draft: DraftOrigin | None,
    has_own_tokenizer: bool,
    speech: RemoteSpeech | None,
    directory: Path,
    candidates: Sequence[Candidate],
    policy: Policy,
    on_progress: OnProgress,
) -> RemoteLaunched:
    del policy  # its name is in the config; an object of this process is refused before
    if model_in_memory(directory) is not None:
        raise ConfigError(f"a model in memory {STAYS}")
    begin = time.perf_counter()
    model = _RemoteModel(directory, candidates, home, draft, speech)
    event = ProgressEvent("compile", 1, 1, 0.0, is_done=False, message="in the daemon")
    on_progress(event)
    make = partial(RemoteEngine, model.connect, model.give_up, home.resumes_requests, home.on_lost, has_own_tokenizer)
    with told(on_progress, event):
        engine = attended(make, on_leave=model.give_up, drop=RemoteEngine.close)
    try:
        home.adopt(engine)
        answer = model.described
        config = replace(
            next(each.config for each in candidates if each.device == answer["device"]),
            max_prompt_len=answer["max_prompt_len"],
            min_response_len=answer["min_response_len"],
        )
        on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))  # the tokenizer has been read
        return_free_memory()
    except BaseException:
        engine.close()
        raise
    return RemoteLaunched(
        engine, config, answer["device"], answer["vocab_size"], answer["kv_type"], answer["has_mapped_weights"],
        (answer.get("bands", 0), answer.get("columns", 0)),
    )  # fmt: skip


class _RemoteModel:
    """A model that a daemon loads, and the next daemon after a loss. ``described``: the answer of the first one."""

    def __init__(
        self,
        directory: Path,
        candidates: Sequence[Candidate],
        home: DaemonHome,
        draft: DraftOrigin | None,
        speech: RemoteSpeech | None,
    ) -> None:
        self._home = home
        self._body = {
            "directory": str(directory.absolute()),
            "candidates": [
                {"device": each.device, "config": plain_config(each.config), "explicit": sorted(each.explicit)}
                for each in candidates
            ],
            "adapters": _plain_adapters(candidates[0].config.adapters),
            "draft": _plain_draft(draft),
            "speech": None if speech is None else {"num_windows": speech.num_windows, "heads": list(speech.heads)},
        }
        self.described: dict[str, Any] = {}
        self._link: DaemonLink | None = None  # on which the model is being loaded
        self._is_given_up = False

    def give_up(self) -> None:
        """Let a thread that waits in ``connect`` raise an error soon, and every later call. Any thread may call."""
        self._is_given_up = True
        if (link := self._link) is not None:
            link.shut()

    def connect(self, on_lost: OnLost) -> EngineConnection:
        """Load the model, and return a connection to its engine.

        Raises:
            DeviceError: no daemon can be reached.
            ClosedError: ``give_up`` was called.
            ModelError: the daemon serves the model with other limits than the one before.
            StaticLLMError: the daemon refused the model.
        """
        link = DaemonLink(self._home)
        self._link = link
        try:
            if self._is_given_up:
                raise pipeline_closed()
            answer = link.ask(Message(Kind.MODEL, body=self._body)).body
            self.described = self.described or answer
            for name in KEPT:
                if answer.get(name) != self.described.get(name):
                    raise ModelError(
                        f"another daemon serves the model on {answer['device']} with {name} {answer.get(name)} instead of "
                        f"{self.described.get(name)}: load the pipeline again"
                    )
            return EngineConnection(link, answer["model"], on_lost, answer.get("num_cross_windows", 0))
        except BaseException:
            link.close()
            raise
        finally:
            self._link = None


def check_sendable(scheduler: object) -> None:
    """Check that the policy of a pipeline can be sent to the daemon.

    Raises:
        ConfigError: it cannot.
    """
    if not (scheduler is None or isinstance(scheduler, str)):
        raise ConfigError("scheduler is an object of this program: the daemon takes a name, such as 'dynamic'")


def plain_config(config: StaticLLMConfig) -> dict[str, Any]:
    """Return the fields of a config as JSON types, with absolute paths. Raises ``ConfigError``."""
    values = asdict(replace(config, adapters=None))
    for name in SECRETS:
        if values.pop(name) is not None:
            raise ConfigError(f"{name.upper()} {STAYS}")
    for name in ("cache_dir", "blob_path", "weights_path"):
        values[name] = None if values[name] is None else str(Path(values[name]).absolute())
    for name in ("device_properties", "prefill_config", "generate_config"):
        values[name] = {key: _value(key, value) for key, value in values[name].items()}
    return values


def _plain_adapters(adapters: AdapterSet | None) -> dict[str, Any] | None:
    """Return path, name and alpha of each adapter, and whether they are folded into the weights. Raises ``ConfigError``."""
    if adapters is None:
        return None
    members = []
    for adapter, alpha in zip(adapters.adapters, adapters.alphas, strict=True):
        if adapter.path is None:
            raise ConfigError(
                "an adapter made of a tensor cannot be sent to the daemon: write it to a file, and give its path"
            )
        members.append([str(adapter.path), adapter.name, alpha])
    return {"members": members, "is_fused": adapters.is_fused}


def _plain_draft(draft: DraftOrigin | None) -> dict[str, Any] | None:
    """Return the fields of a draft model as JSON types.

    Raises:
        ConfigError: a property cannot be sent.
    """
    if draft is None:
        return None
    properties = plain_properties(draft.properties)
    for name, value in properties.items():
        if not isinstance(value, (str, int, float, bool, Path)):
            raise ConfigError(f"draft_model: {name} is a {type(value).__name__}, which cannot be sent to the daemon")
        properties[name] = str(value) if isinstance(value, Path) else value
    return {"directory": str(draft.models_path.absolute()), "device": draft.device, "properties": properties}


def _value(name: str, value: object) -> object:
    if isinstance(value, (str, int, float, bool)):
        return value
    text = getattr(value, "get_type_name", lambda: str(value))()
    if not isinstance(text, str):
        raise ConfigError(f"{name}={value!r} cannot be sent to the daemon")
    return text
