"""Tests that joined texts of tokens are those that the tokenizer makes of all together, with a fake tokenizer of random bytes."""

from hypothesis import given
from hypothesis import strategies as st

from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.tokenizer_tools import JoinedDecoder


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
    assert joined([2, 1, 0]) == " ran foxThe" and tokenizer.num_calls == 1
    assert joined([0, 3, 4]) == "The😀"
    assert tokenizer.num_calls == 3, "parts of a character are learned, and then decoded together"
    assert joined([0, 3, 4]) == "The😀" and tokenizer.num_calls == 4


def test_a_long_answer_is_decoded_by_few_calls():
    tokenizer = BytesTokenizer([bytes([code]) for code in range(128)])
    reader = IncrementalDetokenizer(JoinedDecoder(tokenizer.decode, tokenizer.decode_rows))
    text = "The fox ran over the hill. " * 20
    assert "".join(reader.push(token) for token in text.encode()) + reader.finish() == text
    assert tokenizer.num_calls == len(set(text))
