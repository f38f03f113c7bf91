"""Decides how many drafted tokens a call checks: by what a row costs on this device, and by what was accepted lately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from staticllm.core import Variant

from ...costs.model import averaged
from ...generation.drafts import NO_DRAFT, AcceptanceRates, AnswerDrafts, Draft
from ...programs.model_runner import ModelRunner
from ...programs.variant_index import VariantIndex
from ..state import AnswerState
from .draft_model import KIND, DraftModel

ALLOWANCE = 0.01
"""Credit per decode step, in decode steps: the share of the decode time that drafts may lose."""
FIRST_CREDIT = 1.0
"""Credit of a new engine, in decode steps."""
MAX_CREDIT = 1.5
"""Largest credit, in decode steps."""
MAX_DEBT = 4.0
"""Largest debt, in decode steps."""
MAX_SURPLUS = 8.0
"""Most decode steps that one answer may lose again of what drafts have gained for it."""
MOST_LOST = 1.0
"""Credit that is enough for any draft, and the most that the first runs at a size are charged, in decode steps."""
HOPED_ROW_COST = 0.1
"""Most decode steps that a drafted row is taken to cost while the cost of its variant is not stable."""
MIN_GAIN = 1.02
"""Least expected speed-up; a smaller one is within the error of the costs."""
LEAST_CHANCE = 0.05
"""Least probability of acceptance of a token that is checked."""
PROBE_AFTER = 32
"""Decode steps without a draft after which one is checked that promises at least ``PROBE_GAIN``."""
PROBE_RARELY_AFTER = 256
"""Decode steps without a draft after which any draft is checked."""
PROBE_GAIN = 0.75
"""Least expected speed of a draft that is checked to find out whether the text has changed."""
CATCH_UP_SHARE = 0.1
"""Share of the rest of an answer that the draft model may take to read its beginning."""
FORESEEN_TOKENS = 256
"""Most tokens that the rest of an answer counts for."""
FIRST_PLAIN = 3
"""Steps without drafts before the first draft: what a plain step costs must be known."""
REFRESH_AFTER = 48
"""Steps with drafts before the next one without."""
OVERHEAD_WEIGHT = 0.2
"""Weight of a new call in the averages of what calls take beyond their costs."""
SLOWER_WEIGHT = 0.05
"""Weight of a slower call there, which other work may have delayed."""
MOST_OVERHEAD = 3.0
"""Cap on one call's contribution, in units of a plain call."""
NO_DRAFT_SECONDS = 3e-5
"""Time to find that there is no draft, in seconds."""
DRAFT_SECONDS = 1e-4
"""Time to find that a draft does not pay, in seconds."""
OVERHEAD = 0.01
"""Share of a decode step that the search for drafts may take; where steps are shorter, answers are asked less often."""
MAX_KEPT = 1024
"""Sizes of calls whose variants are remembered."""


@dataclass(frozen=True)
class PlainCall:
    """A call before drafts are added: its variant, its rows, sequences and logits in use, and how many sequences decode."""

    variant: Variant
    num_rows: int
    num_sequences: int
    num_logits: int
    num_decoding: int

    @property
    def is_pure(self) -> bool:
        """Whether each row decodes a sequence of its own."""
        return self.num_decoding == self.num_rows


@dataclass(frozen=True)
class DraftPlan:
    """The drafts of a call, one per answer that drafts and empty where none pays, and the ``variant`` that holds them all.

    ``model_seconds`` is the expected time of the draft model's steps, and ``spent_seconds`` the time that it took. ``answers``:
    the sequences that draft.
    """

    call: PlainCall
    variant: Variant
    drafts: tuple[Draft, ...] = ()
    model_seconds: float = 0.0
    spent_seconds: float = 0.0
    answers: Sequence[AnswerDrafts] = ()


@dataclass(frozen=True)
class _Chance:
    """A drafted token: the probability of its acceptance, its place in its draft, and the index of its sequence."""

    probability: float
    place: int
    index: int


@dataclass(frozen=True)
class _Extension:
    """A variant that holds the call with up to ``most`` more rows."""

    variant: Variant
    most: int


class CallOverheads:
    """Moving averages of what calls take beyond their costs, in seconds: the host's work, and changes between sizes."""

    def __init__(self) -> None:
        self.plain: float | None = None
        self.drafted: float | None = None

    @property
    def of_drafts(self) -> float:
        """How much more a call with drafts takes beyond its cost than one without."""
        return 0.0 if self.plain is None or self.drafted is None else self.drafted - self.plain

    def count_plain(self, seconds: float) -> None:
        """Count a call without drafts."""
        self.plain = _averaged(self.plain, seconds)

    def count_drafted(self, seconds: float) -> None:
        """Count a call with drafts."""
        self.drafted = _averaged(self.plain if self.drafted is None else self.drafted, seconds)

    def count_change(self, seconds: float) -> None:
        """Count the first call after a draft: what it takes longer, the device needs to change back from the draft's size."""
        plain = seconds if self.plain is None else self.plain
        before = plain if self.drafted is None else self.drafted
        self.drafted = before + _averaged(plain, seconds) - plain


def _averaged(known: float | None, seconds: float) -> float:
    is_slower = known is not None and seconds >= known
    return averaged(known, seconds, SLOWER_WEIGHT if is_slower else OVERHEAD_WEIGHT)


class DraftCredit:
    """The decode steps that drafts may lose, and the steps since the last draft.

    Drafts add the tokens that they gain and pay the time that they take, and each decode step adds ``ALLOWANCE``: a text whose
    drafts are never accepted is slower by that share, and not by more.

    Attributes:
        steps: The credit, in decode steps; negative for a debt.
        num_plain: The decode steps since the last draft.
    """

    def __init__(self) -> None:
        self.steps = FIRST_CREDIT
        self.num_plain = PROBE_AFTER
        self._num_due = FIRST_PLAIN  # steps without drafts that must come first
        self._num_drafted = 0  # steps with drafts since the last one without

    @property
    def must_rest(self) -> bool:
        """Whether the next step has no draft, to keep the cost of a plain step known."""
        return self._num_due > 0

    @property
    def least_gain(self) -> float:
        """The least expected speed of a draft that is checked now."""
        if self.num_plain >= PROBE_RARELY_AFTER:
            return 0.0
        return min(PROBE_GAIN if self.num_plain >= PROBE_AFTER else MIN_GAIN, MIN_GAIN)

    def skip(self) -> None:
        """Count a decode step in which no answer was due for a draft."""
        self.num_plain += 1
        self._num_drafted = 0
        self._add(ALLOWANCE)

    def count(self, has_drafts: bool, was_tried: bool, gained: float) -> None:
        """Count a decode step with or without drafts, which has ``gained`` decode steps; ``was_tried``: the draft model ran."""
        if not has_drafts:
            self._num_due = max(0, self._num_due - 1)
            self._num_drafted = 0
        self.num_plain += 1
        if has_drafts or was_tried:
            self._num_drafted += 1
            self._num_due = int(self._num_drafted >= REFRESH_AFTER)
            self.num_plain = 0
        self._add(ALLOWANCE + gained)

    def _add(self, steps: float) -> None:
        self.steps = max(-MAX_DEBT, min(self.steps + steps, MAX_CREDIT))


class DraftPlanner:
    """Adds drafts to the decode steps of requests that draft. Runs on the engine's thread.

    A call with drafts takes longer, and gives more tokens if some are accepted. Drafts are added if the tokens per second that
    they promise are more than without: costs come from the cost model, and the probability of acceptance from the drafts of the
    same kind that were checked lately. The promise may be wrong: the credit must cover what a draft costs, times the probability
    that no token is accepted. Where drafts have gained much, some of it may be lost again in the same answer.

    Attributes:
        model: The draft model; None without one.
        is_possible: Whether rejected tokens can be cut off; a recurrent state cannot be.
        credit: What drafts may cost.
        overheads: What calls take beyond their costs.
    """

    def __init__(self, runner: ModelRunner, max_seq_len: int, model: DraftModel | None = None) -> None:
        self.runner = runner
        self._max_seq_len = max_seq_len
        self.model = model
        self.is_possible = not runner.cache.states
        self._index: VariantIndex = runner.index
        self._options: dict[tuple[int, int, int, int], tuple[_Extension, ...]] = {}
        self.rates = AcceptanceRates(kept=0.98)
        self.credit = DraftCredit()
        self.overheads = CallOverheads()

    def plan(self, answers: Sequence[AnswerState], call: PlainCall) -> DraftPlan:
        """Return the drafts for those decoding answers of a call that draft. No slot is freed for a draft."""
        if self.credit.must_rest:
            return DraftPlan(call, call.variant)
        room = self.runner.cache.slots.num_free - call.num_rows
        asked = [answer.drafts for answer in answers if answer.drafts is not None]
        proposed = [self._proposal(*pair, call, room) for pair in zip(answers, asked, strict=True)]
        chances = self._chances(asked, proposed)[: max(room, 0)]
        option = self._best(call, chances, proposed, self.credit.steps + _surplus(asked)) if chances else None
        lengths = [0] * len(answers)
        for chance in chances[: option.most] if option is not None else ():
            lengths[chance.index] += 1
        longest = 1.0 / (OVERHEAD * self._step_seconds(call))
        for each, draft, length in zip(asked, proposed, lengths, strict=True):
            spent = 0.0 if length else DRAFT_SECONDS if draft.tokens else NO_DRAFT_SECONDS
            each.pause(int(spent * longest))
        if option is None:
            return DraftPlan(call, call.variant, answers=asked)
        drafts = [replace(draft, tokens=draft.tokens[:n]) for draft, n in zip(proposed, lengths, strict=True)]
        modelled = [i for i, draft in enumerate(drafts) if draft.kind == KIND and draft.tokens]
        if self.model is None or not modelled:
            return DraftPlan(call, option.variant, tuple(drafts), answers=asked)
        model = self.model
        before = self.model.seconds
        expected = max(lengths[i] for i in modelled) * model.step_seconds(len(modelled))
        for i, draft in zip(modelled, model.propose([(answers[i], lengths[i]) for i in modelled]), strict=True):
            drafts[i] = draft
        for i in modelled:
            answers[i].add_draft_seconds(model.seconds - before)
        variant = self._variant_for(call, sum(len(draft.tokens) for draft in drafts))
        return DraftPlan(call, variant, tuple(drafts), expected, model.seconds - before, asked)

    def skip(self) -> None:
        """Count a decode step in which no request was due for a draft."""
        self.credit.skip()

    def observe(self, plan: DraftPlan, num_accepted: int, seconds: float) -> None:
        """Learn that ``num_accepted`` drafted tokens of a call were accepted.

        It took ``seconds`` with the host's work around it, and without that of the draft model.
        """
        call = plan.call
        has_drafts = any(draft.tokens for draft in plan.drafts)
        was_tried = plan.model_seconds > 0
        is_after = not self.credit.num_plain  # the device changes back from the size of a draft
        lost = self._steps_lost(plan, seconds) if has_drafts or was_tried or is_after else 0.0
        if call.is_pure:
            self._count_overhead(plan, has_drafts, is_after, seconds)
        gained = _beyond_surplus(plan.answers, num_accepted / call.num_decoding - lost)
        self.credit.count(has_drafts, was_tried, gained)

    def _steps_lost(self, plan: DraftPlan, seconds: float) -> float:
        """Return how many decode steps longer a call took, with its draft model, than without drafts."""
        runner = self.runner
        step = self._step_seconds(plan.call)
        expected = runner.costs(plan.call.variant) + (self.overheads.plain or 0.0)
        most = MAX_DEBT if runner.costs.is_stable(plan.variant) else MOST_LOST
        return max(0.0, min((seconds + plan.spent_seconds - expected) / step, most))

    def use_model(self, model: DraftModel) -> None:
        """Let a model draft the tokens of requests that ask for it, from the next step on."""
        self.model = model

    def close(self) -> None:
        """Drop the programs of the draft model, if there is one."""
        if self.model is not None:
            self.model.close()

    def forget(self, answer: int) -> None:
        """Free what the draft model holds of an answer that has ended."""
        if self.model is not None:
            self.model.forget(answer)

    def _count_overhead(self, plan: DraftPlan, has_drafts: bool, is_after: bool, seconds: float) -> None:
        """Count what a call took beyond its cost. ``is_after``: it is the first one after a draft.

        The first calls of a variant do not count: they prepare it, and drafts that seem to take so long would never be checked.
        """
        if has_drafts and not self.runner.costs.is_stable(plan.variant):
            return
        base = self.runner.costs(plan.call.variant)
        overhead = max(-base, min(seconds - self.runner.costs(plan.variant), MOST_OVERHEAD * base))
        if has_drafts:
            self.overheads.count_drafted(overhead)
        elif is_after:
            self.overheads.count_change(overhead)
        else:
            self.overheads.count_plain(overhead)

    def _proposal(self, state: AnswerState, drafts: AnswerDrafts, call: PlainCall, room: int) -> Draft:
        """Return the draft of a decoding answer, with tokens of the vocabulary only, and one token less than may follow.

        A draft of the draft model has zeros for tokens that are not known yet.
        """
        num_tokens = len(state.tokens)
        # a token after which other RoPE factors hold needs all keys anew
        longest = min(self._max_seq_len - num_tokens, self.runner.cache.left_of_factors(num_tokens))
        limit = min(drafts.limit, room, longest, state.num_left - 1)
        if limit <= 0:
            return NO_DRAFT
        draft = drafts.propose(state.tokens, limit)
        if drafts.params.uses_model and self.model is not None:
            rates = drafts.rates_among(self.rates)
            modelled = Draft((0,) * min(limit, self.model.room(state)), KIND)
            foreseen = min(state.num_left, FORESEEN_TOKENS) * self._step_seconds(call)
            is_better = not draft.tokens or rates.rate(draft) < rates.rate(modelled)
            if is_better and self.model.catch_up_seconds(state) <= CATCH_UP_SHARE * foreseen:
                return modelled
        unknown = (i for i, token in enumerate(draft.tokens) if not 0 <= token < state.vocab_size)
        end = min(next(unknown, limit), limit)
        return draft if end >= len(draft.tokens) else replace(draft, tokens=draft.tokens[:end])

    def _chances(self, asked: Sequence[AnswerDrafts], proposed: Sequence[Draft]) -> list[_Chance]:
        """Return all tokens of the drafts that may be accepted, the likely ones first.

        The tokens of one draft keep their order, because a token is accepted only after those before it.
        """
        chances = list[_Chance]()
        for index, (each, draft) in enumerate(zip(asked, proposed, strict=True)):
            if draft.tokens:
                rate = each.rates_among(self.rates).rate(draft)
                chances += [_Chance(rate ** (place + 1), place, index) for place in range(len(draft.tokens))]
        likely = [chance for chance in chances if chance.probability >= LEAST_CHANCE]
        if not likely and self.credit.num_plain >= PROBE_RARELY_AFTER:
            likely = [chance for chance in chances if not chance.place]
        return sorted(likely, key=lambda chance: (-chance.probability, chance.place, chance.index))

    def _best(
        self, call: PlainCall, chances: Sequence[_Chance], proposed: Sequence[Draft], credit: float
    ) -> _Extension | None:
        """Return the variant that gives the most tokens per second, and how many drafted tokens it checks; None without drafts.

        If none pays, there is one all the same when the time has come to probe.
        """
        gains = [0.0, *accumulate(chance.probability for chance in chances)]
        sure = sum(chance.probability == 1.0 for chance in chances)
        model_seconds = self._model_seconds(chances, proposed)
        base = self._step_seconds(call)
        count = call.num_decoding
        best = None
        most = 0.0
        for option in self._options_for(call):
            held = min(option.most, len(chances))
            more = (self._more_seconds(call, option.variant) + model_seconds[held]) / base
            risk = more - min(sure, held) / count
            if not held or min(risk, MOST_LOST) * (1.0 - chances[0].probability) > credit:
                continue
            is_known = self.runner.costs.is_stable(option.variant)
            hoped = more if is_known else min(more, held * HOPED_ROW_COST + model_seconds[held] / base)
            speed = (1.0 + gains[held] / count) / max(1.0 + hoped, 0.1)
            if speed > most:
                best = _Extension(option.variant, held)
                most = speed
        return best if most > self.credit.least_gain else None

    def _model_seconds(self, chances: Sequence[_Chance], proposed: Sequence[Draft]) -> list[float]:
        """Return how long the draft model takes for the first n of ``chances``, for each n from 0 on."""
        num_modelled = sum(draft.kind == KIND for draft in proposed)
        if self.model is None or not num_modelled:
            return [0.0] * (len(chances) + 1)
        lengths = (chance.place + 1 if proposed[chance.index].kind == KIND else 0 for chance in chances)
        step = self.model.step_seconds(num_modelled)
        return [length * step for length in accumulate(lengths, max, initial=0)]

    def _options_for(self, call: PlainCall) -> tuple[_Extension, ...]:
        """Return the variants that hold the call with more rows, each with more than the one before."""
        index = self.runner.index
        past = self.runner.cache.num_past
        if index is not self._index or len(self._options) > MAX_KEPT:
            self._index = index
            self._options.clear()
        key = call.num_rows, call.num_sequences, call.num_logits, index.reach_of(past)
        if key not in self._options:
            self._options[key] = tuple(_options(index, call, past))
        return self._options[key]

    def _variant_for(self, call: PlainCall, num_more: int) -> Variant:
        """Return the smallest variant that holds the call with ``num_more`` more rows."""
        options = (option.variant for option in self._options_for(call) if option.most >= num_more)
        return next(options) if num_more else call.variant

    def _step_seconds(self, call: PlainCall) -> float:
        """Return the seconds of a plain decode step of the call's decoding requests, with what is around it."""
        count = call.num_decoding
        past = self.runner.cache.num_past
        variant = call.variant if call.is_pure else self.runner.index.smallest(count, count, past) or call.variant
        cost = self.runner.costs(variant)
        return max(cost + (self.overheads.plain or 0.0), 0.5 * cost)

    def _more_seconds(self, call: PlainCall, variant: Variant) -> float:
        """Return by how many seconds the call takes longer with drafts in ``variant``."""
        costs = self.runner.costs
        return costs(variant) - costs(call.variant) + self.overheads.of_drafts


def _surplus(answers: Sequence[AnswerDrafts]) -> float:
    return sum(answer.surplus for answer in answers) / max(len(answers), 1)


def _beyond_surplus(answers: Sequence[AnswerDrafts], gained: float) -> float:
    """Add what a call has gained to the surplus of its answers, or take a loss from it. Return what the credit has to bear."""
    change = max(gained, -_surplus(answers))
    for answer in answers:
        answer.surplus = max(0.0, min(answer.surplus + change, MAX_SURPLUS))
    return gained if gained > 0 else gained - change


def _options(index: VariantIndex, call: PlainCall, past: int) -> list[_Extension]:
    options = list[_Extension]()
    while True:
        num_more = options[-1].most + 1 if options else 1
        variant = index.with_logits(call.num_rows + num_more, call.num_sequences, call.num_logits + num_more, past)
        if variant is None:
            return options
        most = min(variant.rows - call.num_rows, variant.num_logits - call.num_logits)
        options.append(_Extension(variant, most))
