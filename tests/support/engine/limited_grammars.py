"""Makes grammars too complex for the library after some calls, as long answers make some of them."""

import itertools

from staticllm.pipelines.generation.grammar_mask import GrammarLimitError
from staticllm.pipelines.grammars.matcher import Matcher


def limit_grammars(monkeypatch, num_calls=12):
    """Let every mask after the first ``num_calls`` fail as at a limit of the library; return the counter of masks."""
    calls = itertools.count()
    own = Matcher.allowed

    def allowed(matcher):
        if next(calls) >= num_calls:
            raise GrammarLimitError("the grammar cannot go on: too many expressions")
        return own(matcher)

    monkeypatch.setattr(Matcher, "allowed", allowed)
    return calls
