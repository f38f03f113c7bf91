"""Measures what LoRA adapters cost: the time of calls with none, one and several loaded, and with other ones in each call.

python scripts/bench_adapters.py MODEL                       # rank 16 at all linear layers, 1 and 4 adapters, all threads
python scripts/bench_adapters.py MODEL --only q_proj,v_proj --rank 8 --threads 1

The programs run in turn, so that whatever else the machine does slows all of them, and the fastest of each counts.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from staticllm import StaticLLMConfig, Variant
from staticllm.adapters.adapter_set import AdapterSet
from staticllm.adapters.lora import LoraAdapter, LoraLayer
from staticllm.compiler_passes.graph.linear_layers import find_linear_layers
from staticllm.devices import get_core
from staticllm.model_dir import read_model
from staticllm.pipelines.loading.load import load
from staticllm.pipelines.programs.model_runner import ModelRunner

CALLS = ((1, 1), (4, 4), (16, 16), (128, 1))
"""Rows and sequences of the calls that are timed: decoding of one and of several requests, and a prompt."""
KV_LEN = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="model directory")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--count", type=int, default=4, help="adapters of the largest set")
    parser.add_argument(
        "--only", default="", help="ends of the layers' names, with commas between; all linear layers without"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of the CPU plugin; 0 for its own choice")
    parser.add_argument("--seconds", type=float, default=10.0, help="time for each size of call")
    options = parser.parse_args()
    sizes = sorted({0, 1, options.count})
    adapters = [make_adapter(options, seed) for seed in range(options.count)]
    runners = {size: load_runner(options, adapters[:size]) for size in sizes}
    print(f"{adapters[0].num_bytes / 1e6:.1f} MB per adapter in f32, load average {os.getloadavg()[0]:.1f}")
    print("| rows | " + " | ".join(f"{size} adapters, ms" for size in sizes) + " | changed in each call, ms | ratios |")
    print("|" + "---|" * (len(sizes) + 3))
    for rows, sequences in CALLS:
        fastest = time_calls(runners, rows, sequences, options.seconds)
        ratios = ", ".join(f"{fastest[size] / fastest[0]:.2f}" for size in sizes[1:])
        print(f"| {rows} | " + " | ".join(f"{value:.1f}" for value in fastest.values()) + f" | {ratios} |", flush=True)


def make_adapter(options: argparse.Namespace, seed: int) -> LoraAdapter:
    """Return an adapter with random numbers for the layers that were chosen."""
    random, layers = np.random.default_rng(seed), dict[str, LoraLayer]()
    ends = tuple(options.only.split(",")) if options.only else ("",)
    for layer in find_linear_layers(read_model(get_core(), options.model)):
        path = layer.names[0].split("/")[0]
        if path.endswith(ends) and "lm_head" not in path:
            a = random.standard_normal((options.rank, layer.in_size), np.float32) / np.float32(layer.in_size)
            b = random.standard_normal((layer.out_size, options.rank), np.float32)
            layers[path] = LoraLayer(a, b)
    return LoraAdapter(str(seed), layers, "random")


def load_runner(options: argparse.Namespace, adapters: list[LoraAdapter]) -> ModelRunner:
    """Load the model with these adapters; the CPU's own precision, one program for all sizes."""
    given = AdapterSet.of([(adapter, 1.0) for adapter in adapters]) if adapters else None
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads} if options.threads else {}
    config = StaticLLMConfig(programs="shared", measure_costs=False, device_properties=properties, adapters=given)
    return load(options.model, "CPU", config).runner


def time_calls(runners: dict[int, ModelRunner], rows: int, sequences: int, seconds: float) -> dict[int | str, float]:
    """Return the ms of the fastest call with each number of adapters, and with other factors in each call (``changed``)."""
    timed: dict[int | str, ModelRunner] = {**{key: runners[key] for key in runners}, "changed": runners[max(runners)]}
    found = dict.fromkeys(timed, np.inf)
    until, turn = time.perf_counter() + seconds, 0
    while turn < 3 or time.perf_counter() < until:
        turn += 1
        for name, runner in timed.items():
            program = runner.programs[variant_of(runner, rows, sequences)]
            scales = program.buffers.adapter_scales
            if scales.size:
                scales[...] = np.roll(np.eye(1, scales.shape[-1], dtype=np.float32), turn if name == "changed" else 0)
            taken = program.run() * 1e3
            if turn > 1:  # the first call of a size prepares it
                found[name] = min(found[name], taken)
    return found


def variant_of(runner: ModelRunner, rows: int, sequences: int) -> Variant:
    fitting = (v for v in runner.programs if v.rows == rows and v.sequences >= sequences and v.kv_len >= KV_LEN)
    return min(fitting, key=lambda variant: (variant.sequences, variant.kv_len))


if __name__ == "__main__":
    main()
