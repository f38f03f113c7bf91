"""Checks a draft: the request's own sampler chooses each token, as long as the draft has guessed it."""

from __future__ import annotations

from itertools import zip_longest

from ...generation.drafts import Draft
from ...generation.filters import Logits
from ...generation.sampler import SampledToken
from ..state import AnswerState


class DraftCheck:
    """The check of one draft in one call, and its result.

    ``choices`` are the tokens that were chosen: the ``num_accepted`` first ones of the draft, and one more. The last one is
    missing if the answer ends with an accepted token, or if choosing it raised ``error``. Without a result, as after a call that
    failed, there are no choices.
    """

    def __init__(self, state: AnswerState, draft: Draft) -> None:
        self.state = state
        self.draft = draft
        self.choices: list[SampledToken] = []
        self.num_accepted = 0
        self.error: Exception | None = None

    def accept(self, logits: Logits) -> int:
        """Choose tokens from ``logits [1 + len(draft.tokens), vocab]``, in order, until one is not that of the draft.

        Each row's logits follow from the tokens before it, which are the chosen ones. So these are the tokens that the sampler
        chooses one call at a time, with the same random numbers. Return their number: the tokens of the call that are kept.
        """
        for line, guess in zip_longest(logits, self.draft.tokens):
            try:
                choice = self.state.sample(line)
            except Exception as error:  # of this request alone; the tokens before are its answer
                self.error = error
                break
            self.choices.append(choice)
            self.num_accepted += choice.token == guess
            if choice.token != guess or self.state.reason_to_end(choice.token, len(self.choices)) is not None:
                break
        return len(self.choices)
