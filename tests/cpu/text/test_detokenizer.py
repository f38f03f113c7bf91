from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.core import FinishReason
from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.text.call import GenerateCall, PreparedRequest
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.output_processor import OutputProcessor, TextDelta, joined
from staticllm.pipelines.text.tokenizer_tools import JoinedDecoder


def decode(tokens):
    """Decode tokens that are bytes, so that one character may take up to four."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text, **options):
    pieces, reader = [], IncrementalDetokenizer(decode, **options)
    for token in text.encode():
        pieces.append(reader.push(token))
        if reader.is_stopped:
            break
    pieces.append(reader.finish())
    return reader, pieces


@given(st.text(max_size=200))
def test_deltas_add_up_to_the_text_and_split_no_character(text):
    reader, pieces = stream(text)
    assert "".join(pieces) == reader.text == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(
    st.text("ab.", max_size=60), st.sets(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=3), st.booleans()
)
def test_no_part_of_a_stop_string_is_ever_shown(text, stops, include):
    """The stop string that is complete first ends the text; of several complete at once, the alphabetically first."""
    reader, pieces = stream(text, stop_strings=stops, include_stop=include)
    ends = {end for stop in stops if (place := text.find(stop)) >= 0 for end in [place + len(stop)]}
    expected = text
    if ends:
        stop = min(stop for stop in stops if text.find(stop) >= 0 and text.find(stop) + len(stop) == min(ends))
        begin = text.find(stop)
        expected = text[: begin + (len(stop) if include else 0)]
    assert reader.is_stopped == bool(ends)
    assert reader.text == expected == "".join(pieces)


@given(
    st.text("ab<>", max_size=20), st.text("ab<>", max_size=20),
    st.sets(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.sampled_from(["<a>", "</a>b"]), max_size=2),
)  # fmt: skip
def test_stop_strings_count_only_after_the_lead(before, after, stops, lead):
    text, num_lead = before + "".join(lead) + after, 0
    for end in lead:
        num_lead = text.index(end, num_lead) + len(end)
    rest, _ = stream(text[num_lead:], stop_strings=stops)
    reader, pieces = stream(text, stop_strings=stops, lead=lead)
    assert (reader.text, reader.is_stopped) == (text[:num_lead] + rest.text, rest.is_stopped)
    assert "".join(pieces) == reader.text


@given(
    st.text("abc", min_size=1, max_size=20),
    st.sets(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.booleans(),
)
def test_of_stop_strings_in_one_token_the_first_in_alphabetical_order_cuts(text, stops, include):
    """As in GenAI, which looks for each of them in this order."""
    reader = IncrementalDetokenizer(lambda tokens: text if tokens else "", stops, include)
    reader.push(0)
    found = [stop for stop in sorted(stops) if stop in text]
    expected = text if not found else text[: text.index(found[0]) + (len(found[0]) if include else 0)]
    assert reader.text == expected
    assert reader.is_stopped == bool(found)


def test_a_possible_stop_string_is_held_back_and_released():
    reader = IncrementalDetokenizer(decode, ["STOP"])
    assert [reader.push(ord(c)) for c in "aSTx"] == ["a", "", "", "STx"]
    assert not reader.is_holding


def test_invalid_bytes_are_shown_and_not_held_back_for_ever():
    reader = IncrementalDetokenizer(decode)
    pieces = [reader.push(0xFF) for _ in range(100)]
    assert len("".join(pieces)) >= 97
    assert len(reader._window) < 50
    assert "".join(pieces) + reader.finish() == "\ufffd" * 100


@given(st.binary(max_size=120))
def test_deltas_of_arbitrary_bytes_add_up(data):
    reader = IncrementalDetokenizer(decode)
    pieces = [reader.push(byte) for byte in data]
    assert "".join(pieces) + reader.finish() == decode(list(data)) == reader.text


def test_long_texts_are_decoded_in_a_window():
    longest = 0

    def counting(tokens):
        nonlocal longest
        longest = max(longest, len(tokens))
        return decode(tokens)

    reader = IncrementalDetokenizer(counting)
    text = "".join(reader.push(token) for token in ("grüße " * 200).encode()) + reader.finish()
    assert text == "grüße " * 200
    assert longest < 50


def prepared(form="tokens", decode=decode, **changes):
    """Return a request for one answer with the options that an output processor reads."""
    defaults = {"stop_strings": frozenset(), "include_stop_str_in_output": False, "stop_token_ids": frozenset()}
    options = SimpleNamespace(**{"echo": False, "beams": None, **defaults, **changes})
    return PreparedRequest(
        EngineRequest((104, 105)), GenerateCall(form, options, "stop", 0, None, 0.0), 0.0, decode=decode
    )


def test_tokens_are_not_decoded_unless_text_is_read():
    def refuse(tokens):
        raise AssertionError("decoded although no text was read")

    silent = OutputProcessor(prepared(decode=refuse))
    assert [silent.push(TokenOutput(token, 0.0, 0.0, 0.0)).tokens for token in b"abc"] == [[97], [98], [99]]
    late = OutputProcessor(prepared())
    late.push(TokenOutput(97, 0.0, 0.0, 0.0))
    late.want_text()
    assert late.push(TokenOutput(98, 0.0, 0.0, 0.0)).text == "ab", "a reader that asks later misses nothing"


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_that_has_ended_is_a_value_with_everything_that_was_received(echo):
    processor = OutputProcessor(prepared("text", stop_strings={"c"}, echo=echo))
    for number, token in enumerate(b"abc"):
        processor.push(TokenOutput(token, -0.5, float(number), 0.25, device_seconds=2.0, num_cached=1))
    ending = processor.finish(FinishReason.STOP)
    output = ending.output
    assert (output.text, output.tokens, output.finish_reason) == ("ab", [97, 98], FinishReason.STOP)
    assert ending.delta is None, "all of it was shown before"
    assert output.echo == ([104, 105] if echo else [])
    assert output.num_cached == 1
    assert output.score == -1.5
    assert output.token_times == [0.0, 1.0, 2.0]
    assert output.device_seconds == [2.0] * 3
    assert output.detokenization_seconds > 0
    assert output.metrics.get_num_generated_tokens() == 2
    with pytest.raises(FrozenInstanceError):
        output.text = "another"


def test_increments_that_follow_each_other_are_joined():
    parts = [TextDelta([1], "a", logprobs=[-1.0]), TextDelta([], ""), TextDelta([2, 3], "bc", logprobs=[-0.5, 0.0])]
    assert joined(parts) == parts[0] + parts[1] + parts[2] == TextDelta([1, 2, 3], "abc", [], [-1.0, -0.5, 0.0])
    assert joined(parts[:1]) is parts[0]


class BytesTokenizer:
    """Joins the bytes of tokens, and counts its calls."""

    def __init__(self, vocabulary):
        self.vocabulary, self.num_calls = vocabulary, 0

    def text(self, tokens):
        return b"".join(self.vocabulary[token] for token in tokens).decode("utf-8", errors="replace")

    def decode(self, tokens):
        self.num_calls += 1
        return self.text(tokens)

    def decode_rows(self, rows):
        self.num_calls += 1
        return [self.text(row) for row in rows]


pieces = st.one_of(
    st.text(max_size=3).map(lambda text: text.encode()),
    st.binary(max_size=3),
    st.sampled_from([part for char in "é€😀\ufffd" for part in (char.encode(), char.encode()[:1], char.encode()[1:])]),
)
cases = st.lists(pieces, min_size=1, max_size=12).flatmap(
    lambda vocabulary: st.tuples(
        st.just(vocabulary),
        st.lists(st.lists(st.integers(0, len(vocabulary) - 1), max_size=12), min_size=1, max_size=4),
    )
)


@given(cases)
def test_joined_texts_are_those_of_the_tokenizer(case):
    vocabulary, rows = case
    tokenizer = BytesTokenizer(vocabulary)
    joined = JoinedDecoder(tokenizer.decode, tokenizer.decode_rows)
    for row in [*rows, *rows]:
        assert joined(row) == tokenizer.text(row)


def test_known_tokens_need_no_call():
    tokenizer = BytesTokenizer([b"The", b" fox", b" ran", b"\xf0\x9f", b"\x98\x80"])
    joined = JoinedDecoder(tokenizer.decode, tokenizer.decode_rows)
    assert joined([0, 1, 2, 1]) == "The fox ran fox"
    assert tokenizer.num_calls == 1, "unknown tokens are decoded in one call"
    assert joined([2, 1, 0]) == " ran foxThe"
    assert tokenizer.num_calls == 1
    assert joined([0, 3, 4]) == "The😀"
    assert tokenizer.num_calls == 3, "parts of a character are learned, and then decoded together"
    assert joined([0, 3, 4]) == "The😀"
    assert tokenizer.num_calls == 4


def test_a_long_answer_is_decoded_by_few_calls():
    tokenizer = BytesTokenizer([bytes([code]) for code in range(128)])
    reader = IncrementalDetokenizer(JoinedDecoder(tokenizer.decode, tokenizer.decode_rows))
    text = "The fox ran over the hill. " * 20
    assert "".join(reader.push(token) for token in text.encode()) + reader.finish() == text
    assert tokenizer.num_calls == len(set(text))
