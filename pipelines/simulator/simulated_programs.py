"""Programs that take their predicted time on a virtual clock and compute nothing, and the runner and KV cache around them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staticllm.core import MAX_ANSWERS, ModelShape, Variant
from staticllm.errors import ConfigError

from ...kvcache.cache import KVCache
from ...kvcache.sequence import KVSequence
from ...kvcache.step import BufferPool, Segment, Step, StepBuffers
from ...kvcache.stored import StoredSequence
from ..costs.model import CostModel
from ..engine.speculation.draft_model import PACKED_TOKENS, DraftModel
from ..generation.drafts import DraftParams
from ..generation.filters import Logits
from ..programs.in_flight import Between
from ..programs.model_runner import Accept, ModelRunner, Runnable, StepResult
from .cost_model import Blocks, Cost, HostCost
from .workload import Arrival

VOCAB_SIZE = MAX_ANSWERS + 2
"""The number of token ids, so that each of the most beams has a token of its own."""
ANSWER_TOKEN, PROMPT_TOKEN = 0, VOCAB_SIZE - 1
"""Every token of an answer, unless it is a beam, and every token of a prompt but the first."""
SHAPE = ModelShape((), (), VOCAB_SIZE, position_rank=0)
"""A model without keys and values: slots are counted, and take no memory."""
LEAST_SECONDS = 1e-9
"""The least cost that a policy sees; 0 would be an unknown one."""

Tokens = NDArray[np.int64]
NextLogits = Callable[[Tokens], Logits]
"""Returns logits ``[n, vocab]`` after tokens ``[n]``."""


class VirtualClock:
    """A clock that stands still until somebody moves it; the simulated engine reads its moments from it, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self.now += seconds


class SimulatedProgram:
    """A program that takes ``seconds`` on ``clock``, in blocks and a tail."""

    def __init__(
        self, buffers: StepBuffers, seconds: float, clock: VirtualClock, logits: NextLogits, blocks: Blocks
    ) -> None:
        self.buffers = buffers
        self.num_blocks = blocks.num_blocks
        self._seconds = seconds
        self._tail_seconds = min(blocks.tail(buffers.variant), seconds)
        self._clock = clock
        self._next_logits = logits

    def run(self, meanwhile: Callable[[], None] | None = None, between: Callable[[], None] | None = None) -> float:
        """Let the time of a call pass, and return it in seconds, with that of ``between``."""
        if meanwhile is not None:
            meanwhile()
        if between is None:
            self._clock.advance(self._seconds)
            paused = 0.0
        else:
            paused = self._run_blocks(between)
        self.buffers.logits[0] = self._next_logits(self.buffers.input_ids[0, self.buffers.logit_rows])
        return self._seconds + paused

    def _run_blocks(self, between: Callable[[], None]) -> float:
        """Let the time of blocks and tail pass, and return the seconds that ``between`` took."""
        paused = 0.0
        for number in range(self.num_blocks):
            self._clock.advance((self._seconds - self._tail_seconds) / self.num_blocks)
            begin = self._clock()
            if number < self.num_blocks - 1:
                between()
            paused += self._clock() - begin
        self._clock.advance(self._tail_seconds)
        return paused


class SimulatedCache(KVCache):
    """A KV cache of ``num_slots`` slots without contents. Copies to and from the host pool take ``swap_seconds`` per slot."""

    def __init__(self, kv_lens: Sequence[int], num_slots: int, clock: VirtualClock, swap_seconds: float) -> None:
        super().__init__(SHAPE, kv_lens)
        self.num_slots = num_slots
        self.slots = self._make_slots()
        self._clock = clock
        self._swap_seconds = swap_seconds

    def copy_out(self, sequence: KVSequence) -> StoredSequence:
        self._clock.advance(len(sequence) * self._swap_seconds)
        return super().copy_out(sequence)

    def bring_back(self, stored: StoredSequence, length: int) -> KVSequence:
        self._clock.advance(length * self._swap_seconds)
        return super().bring_back(stored, length)


class SimulatedRunner(ModelRunner):
    """Runs simulated programs: before each call, the host takes its time.

    ``num_calls`` counts the calls. ``is_waking``: whether the device was idle before the next one.
    """

    def __init__(
        self,
        cache: KVCache,
        programs: Mapping[Variant, SimulatedProgram],
        costs: CostModel[Variant],
        clock: VirtualClock,
        host: HostCost,
        inserted: Mapping[Variant, SimulatedProgram],
    ) -> None:
        super().__init__(cache, programs, costs, clock=clock, inserted=inserted)
        self._virtual_clock = clock
        self._host = host
        self.num_calls = 0
        self.is_waking = True

    def run_step(
        self,
        program: Runnable,
        step: Step,
        meanwhile: Callable[[], None] | None = None,
        accept: Accept | None = None,
        between: Between | None = None,
    ) -> StepResult:
        self.num_calls += 1
        self._virtual_clock.advance(self._lead(step.segments))
        self.is_waking = False
        result = super().run_step(program, step, meanwhile, accept, between)
        self._virtual_clock.advance(self._host.answer)
        return result

    def _lead(self, segments: Sequence[Segment]) -> float:
        """Return the host's time before a call; a part of that between two calls has passed when tokens were chosen."""
        host = self._host
        if self.is_waking and host.wake is not None:
            return host.wake
        seconds = host(sum(len(segment.tokens) for segment in segments), len(segments))
        return seconds if self.is_waking else max(0.0, seconds - host.answer)


def prompt_of(arrival: Arrival) -> tuple[int, ...]:
    """Return the tokens of a prompt. The first one is its own, outside the vocabulary, so that prompts begin differently."""
    return (VOCAB_SIZE + arrival.id, *(PROMPT_TOKEN,) * (arrival.num_prompt - 1))


def next_logits(tokens: Tokens) -> Logits:
    """Return the logits ``[n, vocab]`` of the simulated model: any token of answers follows a prompt, and each of them follows
    itself.
    """
    return _LOGITS.take(tokens, 0, mode="clip")


def simulated_runner(
    variants: Iterable[Variant],
    cost: Cost,
    num_slots: int,
    clock: VirtualClock,
    host: HostCost,
    known: Mapping[Variant, float] | None = None,
    logits: NextLogits = next_logits,
    *,
    blocks: Blocks | None = None,
) -> SimulatedRunner:
    """Return a runner of programs with these costs. The engine knows them, or begins with the measurements ``known``."""
    variants = tuple(variants)
    parts = blocks or Blocks()

    def programs_of(variants: Sequence[Variant]) -> dict[Variant, SimulatedProgram]:
        pool = BufferPool(variants, SHAPE)
        return {v: SimulatedProgram(StepBuffers(v, pool), cost(v), clock, logits, parts) for v in variants}

    programs = programs_of(variants)
    decoding = [variant for variant in variants if variant.phase == "generate"]
    inserted = programs_of(decoding) if decoding and parts.num_blocks > 1 else {}
    costs = CostModel(known)
    for variant in variants if known is None else ():
        costs.set(variant, max(cost(variant), LEAST_SECONDS))
    cache = SimulatedCache([variant.kv_len for variant in variants], num_slots, clock, host.swap)
    return SimulatedRunner(cache, programs, costs, clock, host, inserted)


def _logits_after_each() -> Logits:
    """Return the logits ``[vocab, vocab]`` after each token: beams begin with different tokens, and each goes on by itself."""
    found = np.diag(np.full(VOCAB_SIZE, 100.0, np.float32))
    found[PROMPT_TOKEN] = 100.0
    found[PROMPT_TOKEN, PROMPT_TOKEN] = 0.0
    return found


_LOGITS = _logits_after_each()


LONGEST_CHUNK = 256
"""The most tokens of a prompt in one call of the draft model."""
WRONG = np.eye(1, VOCAB_SIZE, PROMPT_TOKEN, dtype=np.float32)
"""The logits of a token that is never accepted, since answers have no token of a prompt."""


@dataclass(frozen=True)
class Drafting:
    """How drafts come about; the engine decides when they pay, as for a real draft model.

    Raises:
        ConfigError: a value is impossible.
    """

    most: int
    """The most tokens of a draft."""
    accept: float
    """The probability that a token is accepted if all before it were."""
    seconds: float = 0.0
    """What the draft model takes for each token of the drafts of a call, all requests together, and for each chunk of a prompt
    that it reads; 0 stands for prompt lookup."""

    def __post_init__(self) -> None:
        if self.most < 1 or not 0 <= self.accept <= 1 or not 0 <= self.seconds < float("inf"):
            raise ConfigError(
                f"drafts of {self.most} tokens, accepted with {self.accept:g}, {self.seconds:g} s each: must be at least one "
                "token, a probability from 0 to 1, and 0 s or more"
            )

    @property
    def params(self) -> DraftParams:
        return DraftParams(max_tokens=self.most, uses_model=True)

    def model(self, max_num_seqs: int, max_seq_len: int, clock: VirtualClock) -> DraftModel:
        """Return a draft model for ``max_num_seqs`` sequences of ``max_seq_len`` tokens."""
        num_slots = max_num_seqs * max_seq_len
        sizes = range(1, max_num_seqs + 1)
        variants = {Variant(min(max_seq_len, LONGEST_CHUNK), num_slots)}
        variants |= {Variant(n * rows, num_slots, n) for n in sizes for rows in (1, PACKED_TOKENS)}
        rng = np.random.default_rng(0)

        def guess(tokens: Tokens) -> Logits:
            logits = next_logits(tokens)
            logits[rng.random(len(tokens)) >= self.accept] = WRONG
            return logits

        runner = simulated_runner(variants, lambda variant: self.seconds, num_slots, clock, HostCost(), None, guess)
        return DraftModel(runner, sys.maxsize)  # it knows the tokens of every prompt
