"""Loads the other programs of a model, or those of another device, on one thread while the pipeline already serves."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar, Generic, Protocol

from staticllm.core import OnProgress, ProgressEvent
from staticllm.errors import ClosedError
from staticllm.system.file_lock import Lease
from staticllm.system.long_calls import unless, wait_for_left
from staticllm.system.threads import LazyThread

from ...compiler_passes.compiling.chain import AnyProgram
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, S, V, compile_each
from ..costs.model import CostModel

CLOSE_TIMEOUT = 5.0
"""How long closing waits for the thread, in seconds. It leaves long calls of native code at once, and they end alone."""


class BackgroundWork(Protocol):
    """The work of a ``BackgroundLoader``: it runs the parts in order, and the release at the end, also after an error."""

    def parts(self) -> Iterable[Callable[[], None]]:
        """Return the parts of the work, in order. The next one is asked for when the previous one has run."""
        ...

    def release(self) -> None:
        """Release what the work holds; called once, on the thread that ran the parts."""
        ...


class BackgroundLoader:
    """Runs the parts of some work on a thread of its own, stops at the first one that raises, and keeps the exception."""

    def __init__(self, work: BackgroundWork, on_progress: OnProgress) -> None:
        self._work: BackgroundWork | None = work
        self._on_progress = on_progress
        self._is_closing = False
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._thread = LazyThread("staticllm-background")

    def start(self) -> None:
        """Start the thread.

        Raises:
            StaticLLMError: the thread cannot be started.
        """
        self._thread.start(self._run)

    @property
    def is_done(self) -> bool:
        """Whether the thread has ended: everything is loaded, or a part has failed."""
        return self._thread.has_begun and not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until everything is loaded; return False after ``timeout`` seconds.

        Raises:
            StaticLLMError: what stopped the work.
        """
        if self._thread.has_begun:
            self._thread.join(timeout)
        if not self.is_done:
            return False
        if self._error is not None:
            raise self._error
        return True

    def close(self) -> None:
        """Start no further part, and let the thread leave the running one."""
        self._is_closing = True
        self._thread.join(CLOSE_TIMEOUT)
        if self._error is not None:
            self._error.__traceback__ = None  # if it was raised, that leads to the pipeline, whose finalizer holds this

    def _run(self) -> None:
        work = self._work  # the work holds graphs and weights, which are freed when this ends
        self._work = None
        assert work is not None, "started twice"
        try:
            with unless(lambda: self._is_closing):
                wait_for_left()
                for part in work.parts():
                    if self._is_closing:
                        return
                    part()
            self._on_progress(ProgressEvent("complete", 1, 1, time.perf_counter() - self._started))
        except ClosedError:
            return  # the pipeline was closed: the remaining programs are not needed
        except BaseException as error:  # raised by a program or by the user's callback; ``wait`` raises it again
            _clear_frames(error)
            self._error = error
            message = f"{type(error).__name__}: {error}"
            text = f"background loading failed; the loaded programs keep serving: {message}"
            warnings.warn(text, RuntimeWarning, stacklevel=1)
            try:
                self._on_progress(ProgressEvent("error", 1, 1, time.perf_counter() - self._started, message=message))
            except Exception:  # the callback failed before; one report is enough
                return
        finally:
            work.release()
            del work  # the traceback of an error leads here


def _clear_frames(error: BaseException) -> None:
    """Free what the frames that an error has left hold, such as programs: the error may be kept as long as the pipeline."""
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


class ProgramStore(Protocol[V, S]):
    """A place for compiled programs, for example a blob set that does not exist yet."""

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export and write ``programs``, which are all programs of a model."""


class DeferredPrograms(Generic[V, S]):
    """Variants that are compiled while the model serves.

    One thread calls ``choose``, then ``compile`` for each of ``variants``, both in blocks of ``released``, then ``store`` with
    all programs of the model. It calls ``release`` at the end, also after an error. The cache entry that will be written is
    locked until then.
    """

    waits_for_rest: ClassVar[bool] = False
    """Whether that begins when the engine is idle, or has several requests."""

    def __init__(
        self,
        plan: CompilePlan[V, S],
        variants: Iterable[V],
        on_progress: OnProgress,
        store: ProgramStore[V, S] | None = None,
    ) -> None:
        self.variants = tuple(variants)
        self._plan = plan
        self._on_progress = on_progress
        self._store = store
        self._lease: Lease | None = None
        self._compiled: dict[V, AnyProgram] = {}

    def choose(self) -> None:
        """Choose ``variants``, if that was left for later. The compiling thread calls this first."""

    def released(self) -> AbstractContextManager[None]:
        """Return a block in which weights are read, and their pages given up."""
        return self._plan.weights.released()

    def note_costs(self, costs: CostModel[V], variants: Iterable[V]) -> None:
        """Tell a cost model what is known of ``variants``, whose program was installed: their costs are measured again."""
        for variant in variants:
            costs.doubt(variant)

    @property
    def programs(self) -> list[tuple[V, ...]]:
        """The variants of each program that will be compiled."""
        if self._plan.options.mode == "separate":
            return [(variant,) for variant in self.variants]
        return [self.variants] if self.variants else []

    def compile(self, variant: V) -> AnyProgram:
        """Return the program of one of ``variants``, compiled together with those that share it.

        Raises:
            DeviceError: the device refused it.
        """
        if variant not in self._compiled:
            together = (variant,) if self._plan.options.mode == "separate" else self.variants
            plan = self._plan.restricted(together)
            self._compiled.update(compile_each(plan, self._on_progress))
        return self._compiled[variant]

    def store(self, programs: CompiledPrograms[V, S]) -> None:
        """Write all programs of the model to the requested blob set, if there is one."""
        if self._store is not None:
            self._store.write(programs)

    def hold(self, lease: Lease) -> None:
        """Keep the cache entry locked until ``release``, which the compiling thread calls."""
        lease.hand_over()
        self._lease = lease

    def release(self) -> None:
        """Unlock the cache entry. A second call does nothing."""
        if self._lease is not None:
            self._lease.release()


class SecondProgram(DeferredPrograms[V, S]):
    """The variants that get a program of their own while one program for all variants serves. A probe may choose them."""

    def __init__(self, plan: CompilePlan[V, S], on_progress: OnProgress) -> None:
        super().__init__(plan, (), on_progress)

    def choose(self) -> None:
        """Choose the options of the second program, and the variants that get it."""
        assert self._plan.later is not None, "all programs are there"
        options = self._plan.later()
        self._plan = replace(self._plan, options=options, later=None)
        apart = (variant for variant in self._plan.variants if options.program_group(variant).part)
        self.variants = tuple(variant for variant in apart if options.program_group(variant).part != "prefill")


class DeferredImports(DeferredPrograms[V, S]):
    """Programs of a blob set that are imported while those that any prompt needs serve. Their blobs were verified before.

    They wait for an idle engine: the first answer would run slower beside an import, and a short program ends without one.
    ``files`` are the variants of each file, ``import_file`` imports one. ``costs`` (seconds per call) are known of an earlier
    process, and ``kept_costs`` are stable ones.
    """

    waits_for_rest = True

    def __init__(
        self,
        files: Mapping[str, tuple[V, ...]],
        import_file: Callable[[str], AnyProgram],
        costs: Mapping[V, float],
        kept_costs: Mapping[V, float],
    ) -> None:
        self.variants = tuple(variant for variants in files.values() for variant in variants)
        self._files = files
        self._import_file = import_file
        self._costs = costs
        self._kept_costs = kept_costs
        self._store = None
        self._lease = None
        self._compiled = {}

    @property
    def programs(self) -> list[tuple[V, ...]]:
        """The variants of each program that will be imported."""
        return list(self._files.values())

    def released(self) -> AbstractContextManager[None]:
        """Return an empty block: the memory of blobs is not mapped."""
        return nullcontext()

    def compile(self, variant: V) -> AnyProgram:
        """Return the program of one of ``variants``, imported for all variants of its file.

        Raises:
            BlobError: refused.
        """
        if variant not in self._compiled:
            file, variants = next((file, each) for file, each in self._files.items() if variant in each)
            self._compiled |= dict.fromkeys(variants, self._import_file(file))
        return self._compiled[variant]

    def note_costs(self, costs: CostModel[V], variants: Iterable[V]) -> None:
        for variant in variants:
            if variant in self._costs and variant not in costs.measured:
                costs.update(variant, self._costs[variant])
        costs.adopt({variant: self._kept_costs[variant] for variant in variants if variant in self._kept_costs})
