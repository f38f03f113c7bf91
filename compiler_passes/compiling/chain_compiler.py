"""Compiles programs in blocks: each part once, for all programs of a model that have it in common."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import openvino as ov

from staticllm.devices import get_core, with_exact_f32
from staticllm.errors import DeviceError, last_line
from staticllm.system.long_calls import LOOK_SECONDS, attended, checkpoint
from staticllm.system.threads import ThreadPool

from ...kvcache.arena import Allocate
from ..blocks.chain_model import ChainPart
from ..blocks.split import Splitter
from .chain import ChainPlan, CompiledChain, CompiledPart, HostPart, plan_chain
from .weight_bank import WeightBank

HOST_DEVICE = "CPU"
HOST_PROPERTIES: Mapping[str, Any] = with_exact_f32(HOST_DEVICE, {"INFERENCE_PRECISION_HINT": "f32"})
"""Where and how the host's part of a chain runs: embeddings and positions, in f32."""


@dataclass(frozen=True)
class UncompiledChain:
    """A program that will be compiled in blocks: ``make`` returns its static model, of ``rows`` rows; ``what`` is its name."""

    make: Callable[[], ov.Model]
    rows: int
    device: str
    properties: Mapping[str, Any]
    what: str


CompilePart = Callable[[ChainPart, str, Mapping[str, Any], str], CompiledPart]
"""Takes a part, a device, properties and what the part belongs to. Raises ``DeviceError``."""


def compile_model(
    core: ov.Core, model: ov.Model, device: str, properties: Mapping[str, Any], what: str
) -> ov.CompiledModel:
    """Compile one model.

    Raises:
        DeviceError: the device refused it.
    """
    try:
        return core.compile_model(model, device, dict(properties))
    except RuntimeError as error:
        raise DeviceError(f"{device} refused {what}: {last_line(error)}") from error


def compile_for_host(model: ov.Model, what: str = "the host's part") -> HostPart:
    """Compile the host's part of a chain.

    Raises:
        DeviceError: OpenVINO refused it.
    """
    return HostPart(model, compile_model(get_core(), model, HOST_DEVICE, HOST_PROPERTIES, what))


def compile_here(part: ChainPart, device: str, properties: Mapping[str, Any], what: str) -> CompiledPart:
    """Compile a part for a device of this machine.

    Raises:
        DeviceError: the device refused it.
    """
    if part.place == "host":
        return compile_for_host(part.model, f"{part.name} of {what}")
    return compile_model(get_core(), part.model, device, properties, f"{part.name} of {what}")


@dataclass(frozen=True)
class PendingChain:
    """A chain whose parts are being compiled, or will be when they are asked for."""

    plan: ChainPlan
    parts: tuple[Future[CompiledPart], ...]


class ChainCompiler:
    """Splits and compiles the programs of one model. All of them read one bank of weights.

    ``compile_part`` compiles a part; up to ``num_parallel`` threads call it. ``allocate`` gives memory that the device reads in
    place, if it has such memory. One thread uses it at a time.
    """

    def __init__(
        self, compile_part: CompilePart = compile_here, num_parallel: int = 1, allocate: Allocate | None = None
    ) -> None:
        self.bank = WeightBank(allocate)
        self._compile_part = compile_part
        self._num_parallel = num_parallel
        self._splitter = Splitter()
        self._known: dict[Hashable, Future[CompiledPart]] = {}

    def compile_each(self, programs: Sequence[UncompiledChain]) -> Generator[CompiledChain, None, None]:
        """Compile static programs, and yield them in their order. Raises ``DeviceError`` (the device refused a part).

        Programs of many rows take longest, so that their parts are compiled first.
        """
        if self._num_parallel == 1:
            for program in programs:
                yield self._finished(self._pending(program, _run_now))
            return
        pool = ThreadPool(self._num_parallel, "staticllm-compile")

        def submit(function: Callable[..., CompiledPart], *arguments: Any) -> Future[CompiledPart]:
            return pool.submit(function, *arguments)

        try:
            order = sorted(programs, key=lambda program: -program.rows)
            pending = {program.what: self._pending(program, submit) for program in order}
            for program in programs:
                yield self._finished(pending.pop(program.what))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._known = {key: part for key, part in self._known.items() if _is_compiled(part)}

    def compile(self, program: UncompiledChain) -> CompiledChain:
        """Compile one static program.

        Raises:
            DeviceError: the device refused a part.
        """
        (chain,) = self.compile_each([program])
        return chain

    def _pending(self, program: UncompiledChain, submit: Callable[..., Future[CompiledPart]]) -> PendingChain:
        chain = self._splitter.split(program.make())
        asked = tuple(sorted((name, str(value)) for name, value in program.properties.items()))
        parts = list[Future[CompiledPart]]()
        for part in chain.parts:
            key = part.key, asked
            if key not in self._known:
                self._known[key] = submit(self._compile_part, part, program.device, program.properties, program.what)
            parts.append(self._known[key])
        return PendingChain(plan_chain(chain, self.bank), tuple(parts))

    def _finished(self, pending: PendingChain) -> CompiledChain:
        for part in pending.parts:
            while not part.done():  # compiled on the threads of a pool
                wait([part], LOOK_SECONDS)
                checkpoint()
        return CompiledChain(pending.plan, [part.result() for part in pending.parts], self.bank)


def _is_compiled(part: Future[CompiledPart]) -> bool:
    """Return whether a part is there. One that was refused or cancelled is compiled again when it is next needed."""
    return part.done() and not part.cancelled() and part.exception() is None


def _run_now(function: Callable[..., CompiledPart], *arguments: Any) -> Future[CompiledPart]:
    """Call a function, and return its result like that of a thread."""
    done = Future[CompiledPart]()
    done.set_result(attended(partial(function, *arguments)))
    return done
