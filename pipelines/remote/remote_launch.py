"""Loads a model in the daemon, in place of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import openvino_genai as genai

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ConfigError, ModelError
from staticllm.pipelines.engine.fed.beam_requests import Decode
from staticllm.pipelines.model_loader.arguments import Candidate
from staticllm.pipelines.remote.daemon_home import DaemonHome, UserDaemon
from staticllm.pipelines.remote.daemon_link import DaemonLink
from staticllm.pipelines.remote.engine_connection import EngineConnection, OnLost
from staticllm.pipelines.remote.remote_engine import RemoteEngine
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.wire.messages import Kind, Message

SECRETS = ("cache_encryption_callbacks", "weights_decryption_callback", "integrity_key")
"""Fields of the config that do not leave this process."""


@dataclass(frozen=True)
class RemoteLaunched:
    """A model that the daemon serves on ``device``; the counterpart of ``Launched``."""

    engine: RemoteEngine
    config: StaticLLMConfig
    device: str
    vocab_size: int
    kv_type: str
    has_mapped_weights: bool
    background: None = None

    def use_tokenizer(self, tokenizer: genai.Tokenizer, decode: Decode, *, is_models_own: bool) -> None:
        """Note whether the pipeline has the tokenizer of the model's directory, which the daemon uses."""
        del tokenizer, decode
        self.engine.has_own_tokenizer = not is_models_own

    def close(self, drain: bool = False) -> None:
        """End this program's requests and give the model back. A second call does nothing."""
        self.engine.close(drain)


Launch = Callable[[Path, Sequence[Candidate], Policy, OnProgress], RemoteLaunched]


def remote_launcher(daemon: bool | DaemonHome) -> Launch:
    """Return a function that loads a model in a daemon; True stands for the one that the programs of this user share.

    It raises ``ConfigError`` if a property cannot be sent to another process, ``DeviceError`` if no daemon can be reached,
    and another ``StaticLLMError`` if the daemon refuses the model; the message says why.
    """
    home = UserDaemon() if isinstance(daemon, bool) else daemon
    return partial(_launch, home)


def _launch(
    home: DaemonHome, directory: Path, candidates: Sequence[Candidate], policy: Policy, on_progress: OnProgress
) -> RemoteLaunched:
    del policy  # its name is in the config; an object of this process is refused before
    begin = time.perf_counter()
    model = _RemoteModel(directory, candidates, home)
    on_progress(ProgressEvent("compile", 1, 1, 0.0, is_done=False, message="in the daemon"))
    engine = RemoteEngine(model.connect)
    try:
        home.adopt(engine)
        answer = model.described
        config = replace(
            next(each.config for each in candidates if each.device == answer["device"]),
            max_prompt_len=answer["max_prompt_len"],
            min_response_len=answer["min_response_len"],
        )
        on_progress(ProgressEvent("ready", 1, 1, time.perf_counter() - begin))
    except BaseException:
        engine.close()
        raise
    return RemoteLaunched(
        engine, config, answer["device"], answer["vocab_size"], answer["kv_type"], answer["has_mapped_weights"]
    )


class _RemoteModel:
    """A model that a daemon loads, as often as a daemon ends. ``described``: what the first one said of it."""

    def __init__(self, directory: Path, candidates: Sequence[Candidate], home: DaemonHome) -> None:
        self._home = home
        self._body = {
            "directory": str(directory.absolute()),
            "candidates": [
                {"device": each.device, "config": _plain(each.config), "explicit": sorted(each.explicit)}
                for each in candidates
            ],
        }
        self.described: dict[str, Any] = {}

    def connect(self, on_lost: OnLost) -> EngineConnection:
        """Load the model, and return a connection to its engine.

        Raises:
            DeviceError: no daemon can be reached.
            ModelError: the daemon serves the model with other limits than the one before.
            StaticLLMError: the daemon refused the model.
        """
        link = DaemonLink(self._home)
        try:
            answer = link.ask(Message(Kind.MODEL, body=self._body)).body
            self.described = self.described or answer
            for name in ("vocab_size", "kv_type", "max_prompt_len", "min_response_len"):
                if answer[name] != self.described[name]:
                    raise ModelError(
                        f"another daemon serves the model on {answer['device']} with {name} {answer[name]} instead of "
                        f"{self.described[name]}: load the pipeline again"
                    )
            return EngineConnection(link, answer["model"], on_lost)
        except BaseException:
            link.close()
            raise


def check_sendable(scheduler: object, draft_model: object) -> None:
    """Check that these arguments of a pipeline can be sent to the daemon.

    Raises:
        ConfigError: one cannot.
    """
    if not (scheduler is None or isinstance(scheduler, str)):
        raise ConfigError("scheduler is an object of this program: the daemon takes a name, such as 'dynamic'")
    if draft_model is not None:
        raise ConfigError("draft_model with daemon=True: the daemon loads no draft models, leave one of them out")


def _plain(config: StaticLLMConfig) -> dict[str, Any]:
    """Return the fields of a config as JSON types, with absolute paths.

    Raises:
        ConfigError: one is a secret or a function of this process.
    """
    if config.adapters is not None:
        raise ConfigError("adapters cannot be sent to the daemon: load the model without daemon=True")
    values = asdict(config)
    for name in SECRETS:
        if values.pop(name) is not None:
            raise ConfigError(f"{name.upper()} cannot be sent to the daemon: load the model without daemon=True")
    for name in ("cache_dir", "blob_path", "weights_path"):
        values[name] = None if values[name] is None else str(Path(values[name]).absolute())
    for name in ("device_properties", "prefill_config", "generate_config"):
        values[name] = {key: _value(key, value) for key, value in values[name].items()}
    return values


def _value(name: str, value: object) -> object:
    if isinstance(value, (str, int, float, bool)):
        return value
    text = getattr(value, "get_type_name", lambda: str(value))()
    if not isinstance(text, str):
        raise ConfigError(f"{name}={value!r} cannot be sent to the daemon")
    return text
