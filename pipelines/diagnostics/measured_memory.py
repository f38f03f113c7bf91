"""Measures where the private memory of a pipeline goes: loads the model in a process of its own, and runs its largest calls."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgramVariant, ProgressEvent, Variant
from staticllm.errors import StaticLLMError

from ..programs.bind import BoundPrograms
from .process_memory import (
    IS_DETAILED,
    MeasuredMemory,
    MemoryStage,
    divide,
    mapped_bytes,
    private_bytes,
    written_bytes,
)

if TYPE_CHECKING:
    from ..llm_pipeline import StaticLLMPipeline

INTERPRETER, TOKENIZER, GRAPH = "Python, OpenVINO and their libraries", "tokenizer", "model graph and passes"
PROGRAM = "program: packed weights and code"
LARGEST_CHUNK, DECODING = "activations of the largest chunk", "activations of decode steps"
KV_SLOTS, BUFFERS, HOST_POOL, WEIGHTS_FILE = "KV slots", "masks and step buffers", "host pool", "mapped weights file"
UNKNOWN = (
    "this system does not tell which pages are in memory: KV slots, buffers and the weights file are counted with the part that "
    "first used them"
)
NUM_NEW, SHORT_PROMPT = 16, 16


def measure_memory(directory: Path, device: str, config: StaticLLMConfig) -> MeasuredMemory:
    """Load a model in a process of its own, run its longest prompt and some decode steps, and divide its private memory.

    A script that calls this needs the guard ``if __name__ == "__main__"``, as any that uses ``multiprocessing``.

    Raises:
        StaticLLMError: loading or running failed; the message is that of the process.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, str(directory), device, config), daemon=True)
    with ours:
        process.start()
        theirs.close()
        try:
            found = ours.recv()
        except EOFError:
            process.join()
            raise StaticLLMError(
                f"the process that loads the model ended with code {process.exitcode}: there may be too little memory; lower "
                "MAX_PROMPT_LEN, KV_SLOTS or MAX_NUM_SEQS"
            ) from None
        finally:
            if process.is_alive():
                process.join(5)
            process.terminate()
            process.join()
    if isinstance(found, str):
        raise StaticLLMError(found)
    assert isinstance(found, MeasuredMemory)
    return found


def _run(results: Connection, path: str, device: str, config: StaticLLMConfig) -> None:
    """Measure in this process, and send the result or the text of an error."""
    try:
        results.send(_measure(path, device, config))
    except StaticLLMError as error:
        results.send(str(error))


def _measure(path: str, device: str, config: StaticLLMConfig) -> MeasuredMemory:
    from staticllm.devices import get_core
    from staticllm.model_dir import weights_of
    from staticllm.model_files.model_at import check_model_dir

    from ..launch.arguments import read_tokenizer
    from ..llm_pipeline import StaticLLMPipeline

    directory = check_model_dir(path, True, config.weights_path)
    stages = Stages(weights_of(directory, config.weights_path))
    get_core().get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin
    stages.add("start", INTERPRETER)
    tokenizer = read_tokenizer(directory)
    stages.add("tokenizer", TOKENIZER)
    quiet = replace(config, measure_costs=False, background_compile=False)  # so that each program is a stage
    with StaticLLMPipeline(directory, device, config=quiet, tokenizer=tokenizer, on_progress=stages.note) as pipe:
        stages.count_in(pipe)
        stages.add("ready", stages.found[-1].part)  # the buffers that its programs used are counted from now on
        vocab_size = pipe.engine.runner.cache.layout.vocab_size
        ids = np.random.default_rng(0).integers(
            0, vocab_size, config.max_prompt_len
        )  # touch the embeddings as text does
        pipe.generate(ids, max_new_tokens=1, ignore_eos=True)
        stages.add(f"prompt of {config.max_prompt_len} tokens", LARGEST_CHUNK)
        pipe.generate(ids[::-1][:SHORT_PROMPT], max_new_tokens=min(NUM_NEW, config.min_response_len), ignore_eos=True)
        stages.add("decode steps", DECODING)
        stages.add("at rest", None)
    found = tuple(stages.found)
    return MeasuredMemory(path, device, found, divide(found), found[-1].private, "" if IS_DETAILED else UNKNOWN)


class Stages:
    """The readings of this process after each stage; once ``count_in`` was called, parts of a pipeline are counted apart."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        self._pipe: StaticLLMPipeline | None = None
        self._are_several = False
        self.found: list[MemoryStage] = []

    def count_in(self, pipe: StaticLLMPipeline) -> None:
        """Count KV slots, buffers and the host pool of a pipeline from now on."""
        self._pipe = pipe

    def note(self, event: ProgressEvent) -> None:
        """Take a reading after a part of loading."""
        if event.stage in ("compile", "import"):
            self._are_several = event.total > 1
        part = GRAPH if event.stage in ("read", "passes") else self._program(event.variant)
        if event.stage in ("read", "passes", "compile", "import", "warm-up") and self._pipe is None:
            when = "" if event.is_done else "before "
            self.add(f"{when}{event.stage} {event.variant or ''}".strip(), part)

    def _program(self, variant: ProgramVariant | None) -> str:
        """Return the name of a variant's program. Several programs are told apart by phase, as they are compiled."""
        return f"{variant.phase} {PROGRAM}" if self._are_several and isinstance(variant, Variant) else PROGRAM

    def add(self, name: str, part: str | None) -> None:
        """Take a reading; what grew belongs to ``part``."""
        counted = {} if self._pipe is None else self._pipe.engine.run_between_steps(self._count)
        counted[WEIGHTS_FILE] = mapped_bytes(self._weights)
        self.found.append(MemoryStage(name, part, private_bytes(), counted))

    def _count(self) -> dict[str, int]:
        assert self._pipe is not None
        runner = self._pipe.engine.runner
        pool = self._pipe.engine.core.device.kv_manager.host_pool
        blocks = runner.cache.arena.blocks
        slot_bytes = runner.cache.arena.num_bytes // max(runner.cache.num_slots, 1)
        return {
            KV_SLOTS: sum(written_bytes(block.ctypes.data, block.nbytes) for block in blocks),
            BUFFERS: _buffer_bytes(runner.programs),
            HOST_POOL: (pool.num_kept_slots + pool.num_swapped_slots) * slot_bytes,
        }


def _buffer_bytes(programs: Mapping[Variant, object]) -> int:
    """Return the bytes in memory of the buffers that the bound programs share."""
    assert isinstance(programs, BoundPrograms), "a loaded model has bound programs"
    sizes: dict[int, int] = {}
    for program in programs.bound:
        buffers = program.buffers
        for array in (buffers.logits, *buffers.masks.values(), *buffers.presents):
            address = array.ctypes.data
            sizes[address] = max(sizes.get(address, 0), array.nbytes)
    return sum(written_bytes(address, num_bytes) for address, num_bytes in sizes.items())
