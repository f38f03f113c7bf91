"""Tests texts that run in chunks, and beginnings that are kept, in the runner and in the queue, against the stateful original."""

import time

import numpy as np
import pytest
from support.encoders.long_texts import CHUNKS, SMALL, Original, embedder, runner_of, tokens

from staticllm.core import EncoderVariant
from staticllm.errors import ClosedError, StaticLLMError
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.chunks import MOST_KEPT, MOST_TOKENS
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.instances import embed_texts
from staticllm.pipelines.embedding.queue.drivers import JobDriver

pytestmark = pytest.mark.usefixtures("shared_lowering")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def original(folder):
    return Original(folder / "openvino_model.xml")


@pytest.mark.parametrize("is_shared", [False, True])
def test_chunks_give_the_vector_of_the_original(folder, original, is_shared):
    chunks = CHUNKS if is_shared else (EncoderVariant(1, 16, 1, 48),)
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *chunks), is_shared)
    runner.warm_up(1)
    lengths = (17, 5, 64, 33, 16, 50)
    texts = [TokenizedText(tokens(length, length)) for length in lengths]
    for _ in range(2):  # the second time in memory that was used before
        found = embed_texts(runner, texts)
        for text, vector in zip(texts, found, strict=True):
            assert np.abs(vector - original(text.ids)).max() <= 1e-6


def test_whatever_comes_between_two_chunks_changes_nothing(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True)
    one, other = (runner.continued(TokenizedText(tokens(length, length))) for length in (40, 61))
    short = TokenizedText(tokens(7))
    found = {}
    while len(found) < 2:
        for text in (one, other):
            if text in found:
                continue
            vector = runner.run_chunk(text, runner.next_chunk(text))
            if vector is not None:
                found[text] = vector
            assert np.abs(runner.run(SMALL[0], [[short]])[0] - original(short.ids)).max() <= 1e-6
    for text, vector in found.items():
        assert np.abs(vector - original(text.text.ids)).max() <= 1e-6


STEM = tokens(12, 77)
WHOLE = EncoderVariant(1, 32, 2)
RESTS = tuple(EncoderVariant(1, rows, 1, 16) for rows in (4, 8, 24))


def begun(count, seed, stem=STEM):
    return TokenizedText(np.concatenate((stem, tokens(count, seed))))


def calls_of(runner):
    """Return the list of the variants that the runner runs from now on."""
    found, old = [], runner.measure
    runner.measure = lambda variant, seconds: (found.append(variant), old(variant, seconds))
    return found


def set_costs(runner):
    """Give costs that a few calls hardly change: which variant runs does not depend on this machine."""
    for variant in (*runner.variants, *runner.continuing):
        runner.costs.set(variant, 1e-3 * variant.rows)


def test_the_beginning_of_queries_runs_once(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    set_costs(runner)
    calls = calls_of(runner)
    for number, count in enumerate((6, 9, 3, 8, 4)):
        text = begun(count, number)
        assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert calls == [WHOLE, RESTS[2], RESTS[0], RESTS[1], RESTS[0]]
    other = TokenizedText(tokens(10, 5))  # begins otherwise, and does not push out what is kept
    assert np.abs(embed_texts(runner, [other])[0] - original(other.ids)).max() <= 1e-6
    text = begun(2, 40)
    assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert calls[-1] == RESTS[0]
    short = TokenizedText(STEM[:9])  # a part of what is kept, of which the last token runs
    assert np.abs(embed_texts(runner, [short])[0] - original(short.ids)).max() <= 1e-6
    assert calls[-1] == RESTS[0]


def test_few_beginnings_are_kept_and_each_is_right(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    set_costs(runner)
    rng = np.random.default_rng(2)
    stems = [tokens(10, 100 + number) for number in range(6)]
    for number in range(40):
        text = begun(int(rng.integers(1, 9)), number, stems[number // 2 % 6 if number < 24 else int(rng.integers(6))])
        assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert 20 <= runner.chunks.num_kept_tokens <= MOST_KEPT * MOST_TOKENS


def test_vectors_that_are_not_finite_keep_nothing(folder):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    set_costs(runner)
    embed_texts(runner, [begun(3, 1)])
    chunk = runner.resumed(begun(3, 2))
    program = runner.program_of(runner.next_chunk(chunk))
    old = program.run
    program.run = lambda meanwhile=None: (old(meanwhile), program.buffers.output.fill(np.nan))[0]
    assert not np.isfinite(runner.run_chunk(chunk, runner.next_chunk(chunk))).all()
    assert not runner.chunks.num_kept_tokens


def test_a_limit_of_time_makes_chunks_shorter(folder):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True)
    costs = {**dict.fromkeys(SMALL, 0.1), **{chunk: 0.01 * chunk.rows for chunk in CHUNKS}}
    runner.cost = costs.__getitem__
    text = runner.continued(TokenizedText(tokens(40)))
    assert runner.next_chunk(text) == EncoderVariant(1, 16, 1, 16)
    assert runner.next_chunk(text, 0.05) == EncoderVariant(1, 4, 1, 16)
    assert runner.next_chunk(text, 0.001) == EncoderVariant(1, 4, 1, 16)


def queue_of(folder):
    return JobDriver(runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True), 100)


def a_request(*lengths, **options):
    return EmbeddingRequest([TokenizedText(tokens(length, length)) for length in lengths], 64, **options)


def test_a_query_runs_between_the_chunks_of_a_long_text(folder, original):
    queue = queue_of(folder)
    width = queue.runner.shape.width
    long = EmbeddingRequest([TokenizedText(tokens(60, 60))], width)
    queue.submit(long)
    assert queue.run_next()
    assert not long.future.done()
    query = EmbeddingRequest([TokenizedText(tokens(6, 6))], width, priority=1)
    queue.submit(query)
    assert queue.run_next()
    assert query.future.done()
    assert not long.future.done()
    while queue.run_next():
        pass
    assert queue.num_waiting == 0
    assert np.abs(long.future.result()[0] - original(tokens(60, 60))).max() <= 1e-6


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_a_long_text_ends_between_its_chunks(folder, end):
    queue = queue_of(folder)
    deadline = time.perf_counter() + 0.3 if end == "deadline" else None
    long = EmbeddingRequest([TokenizedText(tokens(60))], queue.runner.shape.width, deadline=deadline)
    queue.submit(long)
    assert queue.run_next()
    assert queue.num_waiting == 1
    if end == "cancel":
        assert long.future.cancel()
    elif end == "close":
        queue.close()
    else:
        time.sleep(0.35)
    calls = []
    queue.runner.run_chunk = lambda *arguments: calls.append(1)
    assert not queue.run_next()
    assert (queue.num_waiting, calls, queue.next_job()) == (0, [], None)
    if end != "cancel":
        error = ClosedError if end == "close" else StaticLLMError
        with pytest.raises(error):
            long.future.result(0)


def test_a_longer_common_beginning_replaces_a_shorter_one(folder, original):
    more = EncoderVariant(1, 4, 1, 32), EncoderVariant(1, 24, 1, 32)
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, *more, WHOLE), True)
    set_costs(runner)
    calls = calls_of(runner)
    for stem in (tokens(11, 3), tokens(11, 4)):
        for number in range(2):
            text = begun(2, number, np.concatenate((STEM[:9], stem)))
            assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    text = begun(3, 7, np.concatenate((STEM[:9], tokens(11, 4))))
    assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert calls[-1].rows == 4, "only what follows the 20 common tokens runs"


def test_a_slow_first_run_does_not_rule_a_size_out(folder):
    """A shared program prepares each size in its first run."""
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    runner.costs = CostModel({variant: 1e-3 * variant.rows for variant in runner.variants})
    expected = runner.cost(RESTS[1])
    runner.measure(RESTS[1], 10.0)
    assert runner.cost(RESTS[1]) == expected
    for _ in range(40):
        runner.measure(RESTS[1], 10.0)
    assert runner.cost(RESTS[1]) > 1, "what is slow again and again is"
    before = runner.cost(RESTS[0])
    runner.measure(RESTS[0], 1e-9)
    assert runner.cost(RESTS[0]) < 0.6 * before
