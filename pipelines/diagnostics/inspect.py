"""Describes a lowered model as plain data, for ``staticllm inspect``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape
from staticllm.devices import check_known
from staticllm.kvcache.step import buffer_bytes
from staticllm.model_dir import MODEL_XML
from staticllm.pipelines.programs.compile import first_variants
from staticllm.pipelines.programs.compile_plan import CompilePlan, prepare, with_kv_slots


def inspect_model(models_path: str | os.PathLike[str], device: str, config: StaticLLMConfig) -> dict[str, Any]:
    """Lower a model and describe its states, layers, masks, passes, variants and bytes in JSON types.

    An NPU or GPU need not be on this machine.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is not on this machine, and is neither an NPU nor a GPU.
        ConfigError: an option is impossible for this model.
    """
    _, plan = prepare(models_path, device, config, check=check_known)
    shape = plan.lowered.shape
    config = with_kv_slots(config, Path(models_path), plan.options.kv_type)
    num_slots = config.num_kv_slots(plan.options.mode)
    bytes_a_token = shape.slot_bytes
    return {
        "model": str(models_path),
        "device": device,
        "programs": plan.options.layout,
        "weights_bytes": (Path(models_path) / MODEL_XML).with_suffix(".bin").stat().st_size,
        "vocab_size": shape.vocab_size,
        "num_states": len(shape.kv_states),
        "states": [
            {"name": s.past_name, "variable": s.variable_id, "heads": s.heads, "head_dim": s.head_dim}
            for s in shape.kv_states
        ],
        "recurrent": _recurrent(shape),
        "num_programs": len(first_variants(plan.variants, plan.options)),
        "is_packable": shape.is_packable,
        "layers": _layers(plan),
        "masks": [kind.label for kind in shape.masks],
        "kv": {
            "type": plan.options.kv_type,
            "num_slots": num_slots,
            "bytes_a_token": bytes_a_token,
            "bytes": bytes_a_token * num_slots,
            "host_bytes": bytes_a_token * config.num_host_slots,
        },
        "buffers_bytes": buffer_bytes(plan.variants, shape),
        "passes": [
            {"name": r.name, "nodes_before": r.nodes_before, "nodes_after": r.nodes_after, "notes": list(r.notes)}
            for r in plan.lowered.reports
        ],
        "max_num_seqs": config.num_seqs(plan.options.mode),
        "variants": [
            {"phase": v.phase, "rows": v.rows, "kv_len": v.kv_len, "sequences": v.sequences} for v in plan.variants
        ],
    }


def _recurrent(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_states": len(shape.recurrent_states),
        "bytes_a_sequence": sum(state.num_bytes for state in shape.recurrent_states),
        "states": [
            {"name": s.past_name, "variable": s.variable_id, "shape": list(s.shape), "type": s.dtype}
            for s in shape.recurrent_states
        ],
    }


def _layers(plan: CompilePlan) -> list[dict[str, Any]]:
    graph = plan.lowered.graph
    keys = [state for state in graph.kv_states if state.role == "key" and not state.is_scale]
    return [
        {"layer": key.layer, "query_heads": query_heads, "kv_heads": key.heads, "head_dim": key.head_dim, "mask": mask}
        for key, query_heads, mask in zip(keys, graph.query_heads, graph.layer_masks, strict=True)
    ]
