"""Tests drafts: prompt lookup finds what a plain search finds, and acceptance rates follow what is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.pipelines.generation.drafts import (
    MAX_INDEXED,
    NO_DRAFT,
    AcceptanceRates,
    AnswerDrafts,
    Draft,
    DraftParams,
    PromptLookup,
)


def searched(tokens, max_size, limit):
    """Return what a search from the end finds: the text after the last n-gram's previous occurrence, which may repeat."""
    for size in range(min(max_size, MAX_INDEXED), 0, -1):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                text = list(tokens)
                for place in range(start + size, start + size + limit):
                    if place == len(text):
                        text.append(text[start + size + (place - start - size) % (len(tokens) - start - size)])
                return tuple(text[start + size : start + size + limit]), size
    return (), 0


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 10), st.integers(1, 9), st.data())
def test_the_index_finds_what_a_search_finds(tokens, max_size, limit, data):
    """Tokens are added in pieces of any size, as accepted drafts add them."""
    ends = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=5)) | {len(tokens)})
    lookup = PromptLookup(max_size, tokens[: ends[0]])
    for end in ends:
        draft = lookup.propose(tokens[:end], limit)
    expected, size = searched(tokens, max_size, limit)
    assert draft.tokens == expected
    assert draft.kind == (f"lookup {size}" if size else "")


def test_the_last_occurrence_of_the_longest_ngram_counts():
    lookup = PromptLookup(3)
    assert lookup.propose([1, 2, 3, 9, 1, 2, 3, 8, 5, 3, 7, 1, 2, 3], 3) == Draft((8, 5, 3), "lookup 3")
    assert PromptLookup(1).propose([1, 2, 3, 9, 3, 7, 2, 3], 1) == Draft((7,), "lookup 1")
    assert PromptLookup(3).propose([1, 2, 3], 4) == NO_DRAFT


def test_a_repetition_with_a_short_period_goes_on():
    assert PromptLookup(2).propose([5, 6, 7, 7, 7], 6).tokens == (7,) * 6
    assert PromptLookup(2).propose([0, 4, 5, 4, 5], 5).tokens == (4, 5, 4, 5, 4)


def test_a_shortened_conversation_is_indexed_anew():
    drafts = AnswerDrafts(DraftParams(max_ngram_size=2), [1, 2, 3, 1, 2])
    assert drafts.propose([1, 2, 3, 1, 2], 1).tokens == (3,)
    drafts.forget()
    assert drafts.propose([1, 2, 9, 8, 1, 2], 1).tokens == (9,)


class Fixed:
    can_pause = True

    def __init__(self, draft):
        self.draft, self.seen = draft, []

    def propose(self, tokens, limit):
        return self.draft

    def observe(self, num_proposed, num_accepted):
        self.seen.append((num_proposed, num_accepted))

    def forget(self):
        self.draft = NO_DRAFT


def test_the_first_drafter_with_a_proposal_wins_and_learns():
    silent, first, second = Fixed(NO_DRAFT), Fixed(Draft((1, 2), "a")), Fixed(Draft((3,), "b"))
    drafts = AnswerDrafts(DraftParams(), [])
    drafts.drafters += [silent, first, second]
    draft = drafts.propose([7], 5)
    drafts.observe(draft, 1)
    assert (draft.kind, first.seen, second.seen, silent.seen) == ("a", [(2, 1)], [], [])
    assert (drafts.num_proposed, drafts.num_accepted) == (2, 1)
    drafts.forget()
    assert drafts.propose([7], 5) == NO_DRAFT


@pytest.mark.parametrize(("share", "low", "high"), [(0, 0.0, 0.11), (4, 0.95, 1.0), (2, 0.5, 0.75)])
def test_rates_follow_what_is_accepted(share, low, high):
    """Two of four accepted: the third was checked and refused, so two of three."""
    rates, draft = AcceptanceRates(), Draft((1, 2, 3, 4), "x")
    assert rates.rate(draft) == AcceptanceRates.OPTIMISM
    for _ in range(60):
        rates.observe(draft, share)
    assert low <= rates.rate(draft) <= high
    assert rates.rate(Draft((1,), "y")) == AcceptanceRates.OPTIMISM, "kinds are apart"
    assert rates.rate(Draft((1,), "x", is_certain=True)) == 1.0


def test_a_new_request_begins_with_the_rates_of_others():
    shared, draft = AcceptanceRates(kept=0.98), Draft((1, 2, 3), "x")
    first = AcceptanceRates(shared)
    for _ in range(200):
        first.observe(draft, 0)
    assert AcceptanceRates(shared).rate(draft) < 0.05
