"""Drafters for tests of the engine: right ones, wrong ones, and any mixture; none may change an answer."""

from __future__ import annotations

from unittest.mock import patch

from staticllm.pipelines.engine.speculation import draft_planner
from staticllm.pipelines.generation.drafts import Draft, DraftParams
from staticllm.testing import fake_answer, fake_request

ALWAYS = {
    "MAX_CREDIT": 1e9, "ALLOWANCE": 1e9, "MIN_GAIN": 0.0, "LEAST_CHANCE": 0.0, "CATCH_UP_SHARE": 1e9, "OVERHEAD": 1e9
}  # fmt: skip
"""Constants with which an engine looks for every draft, and checks at least one token of it, whether it pays here or not."""
KINDS = ("none", "lookup", "right", "wrong", "mixed", "outside")


def always_drafting():
    """Return a context in which engines of this process draft at every step, so that no test depends on what a call costs."""
    return patch.multiple(draft_planner, **ALWAYS)


class Guesser:
    """Proposes what the fake model will answer, with mistakes where ``is_right`` says no.

    ``is_certain`` makes the engine check every draft, also if none was ever accepted.
    """

    can_pause = False

    def __init__(self, answer, is_right, is_certain=True):
        self.answer, self.is_right, self.is_certain = answer, is_right, is_certain
        self.observed = []
        self.num_tokens = 0

    def propose(self, tokens, limit):
        assert limit >= 1
        self.num_tokens = len(tokens)
        guesses = self.answer(list(tokens), limit)
        right = [guess if self.is_right(len(tokens) + i) else (guess + 1) % 997 for i, guess in enumerate(guesses)]
        return Draft(tuple(right), "guess", self.is_certain)

    def observe(self, num_proposed, num_accepted):
        assert 0 <= num_accepted <= num_proposed
        self.observed.append((num_proposed, num_accepted))

    def forget(self):
        self.num_tokens = 0


class Outside:
    """Proposes tokens that are not in the vocabulary after one that is."""

    can_pause = False

    def propose(self, tokens, limit):
        return Draft((3, 1 << 40, -1)[:limit], "outside", is_certain=True)

    def observe(self, num_proposed, num_accepted):
        assert num_proposed == 1

    def forget(self):
        pass


def drafting_request(prompt, num_new, kind, masks=None, **options):
    """Return a request for ``num_new`` tokens whose drafts are of one of ``KINDS``."""
    if kind == "none":
        return fake_request(prompt, num_new, **options)
    params = DraftParams(max_ngram_size=3 if kind == "lookup" else 0, uses_model=kind == "model")
    request = fake_request(prompt, num_new, drafts=params, **options)

    def answer(tokens, limit):
        used = options.get("adapters", ())
        return fake_answer(tokens, limit, *([masks] if masks else []), adapters=used)[len(tokens) :]

    rights = {"right": lambda place: True, "wrong": lambda place: False, "mixed": lambda place: place % 3}
    if kind in rights:
        request.state.drafts.drafters.append(Guesser(answer, rights[kind]))
    elif kind == "outside":
        request.state.drafts.drafters.append(Outside())
    return request
