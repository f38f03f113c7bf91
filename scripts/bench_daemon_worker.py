"""One program of ``bench_daemon.py``: it loads a model, says ``ready``, waits for a line, works, and prints one JSON object."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

PROMPT = "Tell me a long story about a small robot that wanted to see the sea."


def ready() -> None:
    """Say that the model is loaded, and wait for the start."""
    print("ready", flush=True)
    sys.stdin.readline()


def load(options: dict[str, Any]) -> Any:
    """Return a pipeline with GenAI's methods."""
    if options["engine"] == "genai":
        import openvino_genai

        return openvino_genai.LLMPipeline(options["model"], "CPU")
    from staticllm import StaticLLMPipeline

    return StaticLLMPipeline(options["model"], "CPU", daemon=options["engine"] == "daemon", MAX_PROMPT_LEN=1024)


def decode(options: dict[str, Any]) -> dict[str, Any]:
    """Decode, and measure the time of each token."""
    import openvino_genai

    pipe, times = load(options), list[float]()
    count = options["num_tokens"]
    pipe.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    ready()
    start = time.time()

    class Clock(openvino_genai.StreamerBase):
        """Notes the time of each token; random weights often make no text of one."""

        def write(self, tokens: int | list[int]) -> Any:
            times.extend([time.time()] * (len(tokens) if isinstance(tokens, list) else 1))
            return openvino_genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    pipe.generate(PROMPT, max_new_tokens=count, ignore_eos=True, streamer=Clock())
    gaps = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    return {
        "tokens": count, "start": start, "end": time.time(), "gap_ms": max(gaps), "tpot_ms": statistics.median(gaps),
    }  # fmt: skip


def prefill(options: dict[str, Any]) -> dict[str, Any]:
    """Compute different prompts of about 1000 tokens for some seconds."""
    import numpy as np
    import openvino as ov

    pipe, count = load(options), 0
    rng = np.random.default_rng(os.getpid())  # other prompts in each round: a daemon keeps those of the rounds before
    ids = rng.integers(5, 2000, (64, options["prompt_tokens"]))
    pipe.generate(ov.Tensor(ids[:1]), max_new_tokens=1, ignore_eos=True)
    ready()
    start = time.time()
    while time.time() < start + 4.0:
        count += 1
        pipe.generate(ov.Tensor(ids[count % 64 : count % 64 + 1]), max_new_tokens=1, ignore_eos=True)
    return {"prompts": count, "start": start, "end": time.time()}


def memory(options: dict[str, Any]) -> dict[str, Any]:
    """Return the private memory in bytes after an answer."""
    import psutil

    pipe = load(options)
    pipe.generate(PROMPT, max_new_tokens=4, ignore_eos=True)
    ready()
    return {"private": psutil.Process().memory_full_info().uss}


def calls(options: dict[str, Any]) -> dict[str, Any]:
    """Run small calls of a plain model, as sentence-transformers does for a query."""
    import numpy as np
    import openvino as ov
    import openvino.opset13 as op

    if options["engine"] == "daemon":
        import staticllm.attach  # noqa: F401 - attaches this program
    rows = op.parameter([-1, 64], np.float32, name="rows")
    weights = op.constant(np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32))
    model = ov.Model([op.matmul(rows, weights, False, False)], [rows], "plain")
    compiled = ov.Core().compile_model(model, "CPU")
    request, given = compiled.create_infer_request(), np.ones((4, 64), np.float32)
    times = []
    for _ in range(300):
        request.infer([given], share_inputs=True, share_outputs=True)
    ready()
    for _ in range(2000):
        start = time.perf_counter()
        request.infer([given], share_inputs=True, share_outputs=True)
        times.append((time.perf_counter() - start) * 1e6)
    return {"p50": statistics.median(times), "p95": sorted(times)[int(0.95 * len(times))]}


def optimum(options: dict[str, Any]) -> dict[str, Any]:
    """Run optimum-intel as its README does, but for the tokenizer: the bench model has only OpenVINO's."""
    import torch
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(options["model"])
    ids, count = torch.arange(5, 37)[None], options["num_tokens"]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    for _ in range(2):
        model.generate(**inputs, max_new_tokens=4, min_new_tokens=4)
    ready()
    start = time.time()
    model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return {"tokens": count, "start": start, "end": time.time()}


def serve(options: dict[str, Any]) -> dict[str, Any]:
    """Send requests to the daemon, in a Poisson process of ``rate`` per second or all at once, and time each token.

    The moments are those of ``time.perf_counter``, which is one clock for all processes on Linux.
    """
    import bench_serving
    import numpy as np

    from staticllm import StaticLLMPipeline

    num_prompt, num_new, seed = options["num_prompt"], options["num_new"], options["seed"]
    length, count = num_prompt + num_new, options["count"]
    sizes = {
        "MAX_NUM_SEQS": options["num_seqs"], "MAX_WAITING": 1000, "MAX_PROMPT_LEN": num_prompt, "MIN_RESPONSE_LEN": num_new,
        "KV_SLOTS": (options["num_seqs"] + 2) * length, "HOST_KV_SLOTS": 200 * length, "PREFIX_CACHING": False,
    }  # fmt: skip
    prompts = [*np.random.default_rng([seed, num_prompt, num_new]).integers(8, 1000, (count, num_prompt))]
    with StaticLLMPipeline(options["model"], "CPU", daemon=True, SCHEDULER=options["engine"], **sizes) as pipe:
        bench_serving.serve(pipe, prompts[:8], num_new)
        ready()
        runs = bench_serving.serve(pipe, prompts, num_new, options["rate"], seed)
    return {"runs": [[run.arrival, run.times] for run in runs]}


KINDS = {"decode": decode, "prefill": prefill, "memory": memory, "calls": calls, "optimum": optimum, "serve": serve}

if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    print(json.dumps(KINDS[told["kind"]](told)), flush=True)
