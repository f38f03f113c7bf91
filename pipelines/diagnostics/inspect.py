"""Describes a lowered model and its programs, for ``staticllm inspect``."""

from __future__ import annotations

import os
from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape
from staticllm.devices import check_known, get_core
from staticllm.kvcache.step import buffer_bytes
from staticllm.model_paths.path_kind import MODEL_XML
from staticllm.pipelines.diagnostics.reports import (
    KVReport,
    LayerReport,
    ModelReport,
    RecurrentReport,
    RecurrentStateReport,
    StateReport,
    VariantReport,
)
from staticllm.pipelines.diagnostics.settings import planned_settings
from staticllm.pipelines.programs.compile import first_variants
from staticllm.pipelines.programs.compile_plan import DecoderPlan, prepare, with_kv_slots


def inspect_model(models_path: str | os.PathLike[str], device: str, config: StaticLLMConfig) -> ModelReport:
    """Lower a model and describe its states, layers, masks, passes, variants and bytes. Nothing is compiled.

    An NPU or GPU need not be on this machine.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, and is neither an NPU nor a GPU.
        ConfigError: an option is impossible for this model.
    """
    plan = prepare(models_path, device, config, check=check_known)
    shape = plan.lowered.shape
    config = with_kv_slots(config, Path(models_path), plan.kv_type)
    return ModelReport(
        model=str(models_path),
        device=device,
        programs=plan.options.layout,
        settings=planned_settings(get_core(), plan.options),
        weights_bytes=(Path(models_path) / MODEL_XML).with_suffix(".bin").stat().st_size,
        vocab_size=shape.vocab_size,
        num_states=len(shape.kv_states),
        states=tuple(StateReport(s.past_name, s.variable_id, s.heads, s.head_dim) for s in shape.kv_states),
        recurrent=_recurrent(shape),
        num_programs=len(first_variants(plan.variants, plan.options)),
        is_packable=shape.is_packable,
        layers=_layers(plan),
        masks=tuple(kind.label for kind in shape.masks),
        kv=_kv(plan, config),
        buffers_bytes=buffer_bytes(plan.variants, shape),
        passes=tuple(plan.lowered.reports),
        max_num_seqs=config.num_seqs(plan.options.mode),
        variants=tuple(VariantReport(v.phase, v.rows, v.kv_len, v.sequences) for v in plan.variants),
    )


def _kv(plan: DecoderPlan, config: StaticLLMConfig) -> KVReport:
    num_slots, slot_bytes = config.num_kv_slots(plan.options.mode), plan.lowered.shape.slot_bytes
    return KVReport(
        type=plan.kv_type,
        num_slots=num_slots,
        bytes_a_token=slot_bytes,
        bytes=slot_bytes * num_slots,
        host_bytes=slot_bytes * config.num_host_slots,
    )


def _recurrent(shape: ModelShape) -> RecurrentReport:
    states = shape.recurrent_states
    return RecurrentReport(
        num_states=len(states),
        bytes_a_sequence=sum(state.num_bytes for state in states),
        states=tuple(RecurrentStateReport(s.past_name, s.variable_id, tuple(s.shape), s.dtype) for s in states),
    )


def _layers(plan: DecoderPlan) -> tuple[LayerReport, ...]:
    graph = plan.lowered.graph
    keys = [state for state in graph.kv_states if state.role == "key" and not state.is_scale]
    return tuple(
        LayerReport(key.layer, query_heads, key.heads, key.head_dim, mask)
        for key, query_heads, mask in zip(keys, graph.query_heads, graph.layer_masks, strict=True)
    )
