"""Serves a stateful language model to programs that run it themselves: their requests share the calls of our engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from staticllm.compiler_passes.compiling.chain import device_models
from staticllm.compiler_passes.compiling.compile import StartWith
from staticllm.config import StaticLLMConfig
from staticllm.core import MaskKind, Variant
from staticllm.daemon.packed.replay import Array, Caller, OriginalModel, Replay
from staticllm.daemon.packed.request import EngineLimits, PackedRequest
from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceScheduler, EngineId
from staticllm.daemon.sharing.device_use import DeviceUse
from staticllm.daemon.sharing.devices import Devices, is_virtual, real_device
from staticllm.devices import get_core, supported_properties
from staticllm.errors import UnsupportedModelError, pipeline_closed
from staticllm.model_dir import DECODER_POSITIONS, forget_in_memory, keep_in_memory, max_positions, read_model
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.options import options_of
from staticllm.pipelines.loading.decoder_kind import DecoderJob, DecoderKind, DecoderPlan, job_of
from staticllm.pipelines.loading.kind import OpenedModel
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.scheduling.interface import SHARED_BOUND, Policy
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, LOGITS, POSITION_IDS
from staticllm.properties import resolve

log = logging.getLogger(__name__)
MAX_LEN = 4096
"""The most tokens of a sequence in our engine."""
MAX_RESPONSE = 128
"""The tokens of ``MAX_LEN`` that are kept free of the prompt."""
MAX_LOGIT_ROWS = 64
"""The most rows of a call with logits after every row: each takes 4 bytes per token of the vocabulary."""
TAKEN_INPUTS = frozenset((INPUT_IDS, ATTENTION_MASK, POSITION_IDS, BEAM_IDX))


class PackedKind(DecoderKind):
    """The kind of a decoder whose prompts can have logits after every row, as the original's calls have."""

    compiles_in_background = False

    def lower(self, job: DecoderJob, opened: OpenedModel, start: StartWith) -> DecoderPlan:
        """Lower the model and add variants with all logits.

        Raises:
            UnsupportedModelError: a pass cannot lower it, or it has recurrent states, or the length of each call
                decides its RoPE factors.
        """
        plan = super().lower(job, opened, "all programs")
        if plan.lowered.shape.needs_real_rows:
            raise UnsupportedModelError("packed", "it has recurrent states, which cannot be shared or cut")
        if plan.lowered.shape.rope_limits:
            raise UnsupportedModelError(
                "packed", "the length of each call decides its RoPE factors, so calls cannot be cut or share keys"
            )
        return replace(plan, variants=(*plan.variants, *with_all_logits(plan.variants)))

    def asked(self, job: DecoderJob) -> dict[str, str]:
        """Return the resolved layout, and that there are more variants than other decoders have."""
        return {**super().asked(job), "logits": "of every row"}


class PackedModel:
    """A stateful language model that serves infer requests of the original's form. Any thread may call.

    ``reason`` says why every request runs on the original model; None if requests run in ``engine``. ``limits`` are those
    of the engine; calls beyond them go on in the original model. ``id`` is the model's number, ``input_names`` the names of
    its inputs in their order, and ``device`` the one that runs it.

    Args:
        xml: The IR. Its directory needs no tokenizer.
        device: A device of OpenVINO.
        config: OpenVINO's properties, as a program would pass them to ``compile_model``, and properties of ours. The programs
            are kept in ``CACHE_DIR``, if it is given.
        weights: The weights file, if it is not beside the IR.
        policy: A scheduling policy; None for ``dynamic``.
        id: The model's number.
        devices: The devices that are shared; None for one of its own.

    Raises:
        ModelError: a file is missing or damaged.
        ConfigError: a property is unknown or impossible.
        DeviceError: the device is missing, or refused a program.
    """

    mode = "packed"

    def __init__(
        self,
        xml: str | Path,
        device: str,
        config: Mapping[str, Any],
        weights: str | Path | None = None,
        policy: Policy | None = None,
        *,
        id: int = 1,
        devices: Devices | None = None,
    ) -> None:
        self.id = id
        self.engine: Engine | None = None
        self.reason: str | None = None
        self.limits = EngineLimits(0, 0)
        self._config = dict(config)
        self._program: ov.CompiledModel | None = None
        core = get_core()
        xml = Path(xml)
        weights = Path(weights) if weights is not None else xml.with_suffix(".bin")
        self._weights = None if xml.name == MODEL_XML else np.memmap(weights, np.uint8, "c")
        directory = _directory_of(xml, self._weights)
        try:
            model = read_model(core, directory, str(weights))
            self.reason = _reason_against(model)
            if self.reason is None:
                self._start(directory, device, _config_of(directory, device, config, weights), policy)
        finally:
            forget_in_memory(directory)
        try:
            self.original = self._share(
                model, device, weights.stat().st_size, Devices() if devices is None else devices
            )
        except BaseException:
            if self.engine is not None:
                self.engine.close()
            raise
        if self.reason is not None:
            log.info("%s runs as it is: %s", xml, self.reason)

    def describe(self) -> dict[str, Any]:
        """Return nothing: a program that runs the model itself knows it."""
        return {}

    def get_property(self, name: str) -> object:
        """Return a property as the client set it, or of the engine's program.

        Raises:
            RuntimeError: the property is unknown.
            ClosedError: the model is closed.
        """
        if name in self._config:
            return self._config[name]
        if self._program is None:
            raise pipeline_closed()
        value: object = self._program.get_property(name)
        return value

    def open(self, client: ClientId | None = None) -> PackedRequest:
        """Return a new infer request; ``client`` pays for its device time."""
        return PackedRequest(self, client)

    def replay(self, caller: Caller) -> Replay:
        """Return a request on the original model, for which ``caller`` pays. Compiles the model if it is the first one.

        Raises:
            RuntimeError: the device refuses the model.
            ClosedError: the model was closed.
        """
        return Replay(self.original, caller)

    def close(self) -> None:
        """End the engine and release the programs. Waiting calls end with a ``ClosedError``."""
        if self.engine is not None:
            self.engine.close()
        self.original.close()
        self._weights = None
        self._program = None

    def _share(self, model: ov.Model, device: str, num_bytes: int, devices: Devices) -> OriginalModel:
        """Let the engine take turns with the other users of its device, and return the original model, which does the same."""
        self.input_names = tuple(port.get_any_name() for port in model.inputs)
        self.device = device if self._program is None else real_device(self._program, device)
        known = supported_properties(get_core(), device)  # raises if there is no such device
        native = {name: value for name, value in self._config.items() if name in known}
        is_hidden = self._program is None and is_virtual(device)  # the device behind it is not known yet
        scheduler = DeviceScheduler() if is_hidden else devices.scheduler(self.device)
        engine = EngineId(self.id)
        if self.engine is not None:
            self.engine.steps.device_use = DeviceUse(scheduler, engine, num_bytes)
        return OriginalModel(
            model,
            device,
            native,
            scheduler=scheduler,
            compiling=devices.compiling,
            engine=engine,
            num_bytes=num_bytes,
        )

    def _start(self, directory: Path, device: str, config: StaticLLMConfig, policy: Policy | None) -> None:
        """Load the programs and start the engine, or note why the model cannot run in it."""
        try:
            loaded = load_job(replace(job_of(directory, device, config), kind=PackedKind()))
        except UnsupportedModelError as error:
            self.reason = str(error)
            return
        loaded.keep_costs()
        programs = loaded.programs
        shape = programs.shape
        (self._program, *_) = device_models(next(iter(programs.compiled.values())))
        self.limits = EngineLimits(config.max_seq_len, shape.vocab_size, _reach_of(shape.masks))
        options = options_of(config, shape, programs.options.mode, SHARED_BOUND)
        self.engine = Engine(loaded.runner, policy or make_policy(config.scheduler), options)


def with_all_logits(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants of prompts again, with logits after every row; in a shared program they cost nothing."""
    return tuple(
        replace(variant, extra_logits=variant.rows - variant.sequences)
        for variant in variants
        if variant.sequences < variant.rows <= MAX_LOGIT_ROWS
    )


def _reach_of(masks: Sequence[MaskKind]) -> int | None:
    """Return how many columns a row may have before a token does not see all before it; None if it always does."""
    limits = [0 if mask.window is None else mask.window for mask in masks if not mask.sees_all]
    return min(limits, default=None)


def _reason_against(model: ov.Model) -> str | None:
    """Return why a model cannot run in our engine, by its ports; None if it may."""
    inputs = {port.get_any_name() for port in model.inputs}
    outputs = [port.get_any_name() for port in model.outputs]
    if not {INPUT_IDS, ATTENTION_MASK, BEAM_IDX} <= inputs or not inputs <= TAKEN_INPUTS:
        return f"its inputs are {', '.join(sorted(inputs))}: must be {', '.join(sorted(TAKEN_INPUTS))}"
    if outputs != [LOGITS]:
        return f"its outputs are {', '.join(outputs)}: must be {LOGITS} alone"
    return None if model.get_variables() else "it has no states"


def _directory_of(xml: Path, data: Array | None) -> Path:
    """Return a model directory for an IR of any name: its own folder, or a name for the model in memory.

    ``data [n]`` u8 are its weights. They must outlive the graph, which refers to them.
    """
    if data is None:
        return xml.parent
    return keep_in_memory(xml.read_text(encoding="utf-8"), ov.Tensor(data, shared_memory=True))


def _config_of(directory: Path, device: str, config: Mapping[str, Any], weights: Path) -> StaticLLMConfig:
    """Return the config of the engine: the client's properties, and lengths that the model was made for."""
    properties = dict(config)
    longest = min(max_positions(directory, DECODER_POSITIONS) or MAX_LEN, MAX_LEN)
    response = min(MAX_RESPONSE, max(1, longest // 8))
    properties.setdefault("MIN_RESPONSE_LEN", response)
    properties.setdefault("MAX_PROMPT_LEN", max(1, longest - response))
    resolved = resolve(properties, supported_properties(get_core(), device)).config
    path = str(weights) if directory.is_dir() else resolved.weights_path
    return replace(resolved, weights_path=path, blob_path=None, export_blob=False)
