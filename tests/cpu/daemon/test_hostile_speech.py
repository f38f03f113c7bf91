"""Tests clients that lie about windows: each lie is one line, and the text of an honest client stays the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.models.speech_model import BANDS, COLUMNS
from support.models.whisper_directory import sound, write_whisper

import staticllm
from staticllm import StaticWhisperPipeline
from staticllm.pipelines.daemon_client.remote_launch import _plain
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.speech_rules import SpeechRules
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.wire import tensors
from staticllm.wire.messages import Kind, Message
from tests.support.attach.daemons import RawClient, daemon_thread, wait_for
from tests.support.helpers import EXACT

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
FEATURES = np.zeros((BANDS, COLUMNS), np.float32)
SECONDS = 60


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def expected(directory):
    with StaticWhisperPipeline(directory, **F32) as pipe:
        return str(pipe.generate(sound(0.8)))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        daemon_thread(patch, tmp_path_factory.mktemp("run") / "run") as daemon,
    ):
        yield daemon


@pytest.fixture(scope="module")
def pipe(daemon, directory):
    """A program whose text must stay the same, with the model of the liars."""
    with StaticWhisperPipeline(directory, daemon=True, word_timestamps=True, **F32) as pipe:
        yield pipe


@pytest.fixture(autouse=True)
def honest(daemon, pipe, expected):
    yield pipe
    assert str(pipe.generate(sound(0.8), word_timestamps=False)) == expected
    bank = model_of(daemon).engine.runner.cache.cross
    wait_for(lambda: bank.num_free == bank.num_sources)


def model_of(daemon):
    """Return the model that the honest program shares with most of the liars."""
    return daemon.models.served()[0][1]


class Liar(RawClient):
    """A client with the speech model in its hand."""

    def __init__(self, directory, heads=((0, 0), (1, 1)), **hello):
        super().__init__(**hello)
        (candidate,) = resolve_candidates("CPU", None, F32)
        plain = {"device": "CPU", "config": _plain(candidate.config), "explicit": sorted(candidate.explicit)}
        speech = {"num_windows": 4, "heads": [list(each) for each in heads]}
        answer = self.ask(Kind.MODEL, directory=str(directory), candidates=[plain], speech=speech)
        assert answer.kind is Kind.OK, answer.body
        self.handle = answer.body["model"]

    def hear(self, features=FEATURES, source=1, first=0, **more):
        """Send a window, and return the answer."""
        body = {"source": source, "first": first, "tensors": tensors.describe([features], [0]), **more}
        self.channel.send(Message(Kind.HEAR, self.handle, 9, body=body, payload=features.tobytes()))
        return self.channel.receive()

    def submit(self, source, number=7, **changes):
        """Submit a request, and return the answer."""
        request = EngineRequest((2000,), max_new_tokens=2, **changes).to_dict()
        self.channel.send(Message(Kind.SUBMIT, self.handle, number, body={"request": request, "source": source}))
        return self.channel.receive()


@pytest.fixture
def liar(honest, directory):
    with Liar(directory) as client:
        yield client


def refusal(answer, kind="PromptError"):
    """Return the line of an answer that refuses."""
    assert answer.kind in (Kind.FAILED, Kind.REFUSED), answer
    assert answer.body["type"] == kind, answer.body
    assert "\n" not in answer.body["text"]
    return answer.body["text"]


def nan_features(value):
    features = FEATURES.copy()
    features[2, 3] = value
    return features


@pytest.mark.parametrize(
    "wrong",
    [
        FEATURES.astype(np.float64), FEATURES.astype(np.float16), FEATURES.astype(np.int32), FEATURES[:, :-1], FEATURES[None],
        FEATURES[0], np.zeros((BANDS + 1, COLUMNS), np.float32), np.zeros((0, COLUMNS), np.float32),
        np.zeros((BANDS, 0), np.float32), np.zeros((), np.float32), nan_features(np.nan), nan_features(-np.inf),
    ],
    ids=lambda each: f"{each.dtype}{list(each.shape)}{each.sum()}",
)  # fmt: skip
def test_features_that_are_none_are_one_line_and_take_no_place(liar, wrong):
    for _ in range(5):
        assert "features" in refusal(liar.hear(np.ascontiguousarray(wrong)))
    assert liar.hear().kind is Kind.OK


def test_bands_must_come_in_their_order(liar):
    assert liar.hear(FEATURES[:1]).kind is Kind.OK
    assert "already" in refusal(liar.hear(FEATURES[:1]), "BusyError")
    assert "in their order" in refusal(liar.hear(FEATURES[2:], first=2))
    assert "no source" in refusal(liar.hear(FEATURES[1:], first=1))
    assert liar.hear(FEATURES[:3]).kind is Kind.OK
    assert liar.hear(FEATURES[3:], first=3).kind is Kind.OK
    assert "in their order" in refusal(liar.hear(FEATURES[3:], first=3))


@pytest.mark.parametrize(
    "body",
    [
        {"source": 0}, {"source": -1}, {"source": 1 << 63}, {"source": "1"}, {"first": -1}, {"first": 1 << 17}, {"first": None},
        {"priority": 1 << 40}, {"priority": 1.5}, {"forget": [0]}, {"forget": [1] * 65}, {"forget": "x"}, {"tensors": []},
        {"tensors": [[0, "<f4", [4, 20], 0], [1, "<f4", [4, 20], 0]]}, {"tensors": [[0, "|O", [4, 20], 0]]}, {"shared": True},
        {"tensors": [[0, "<f4", [4, 1 << 30], 0]]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_message_ends_the_connection_with_one_line(directory, honest, body):
    with Liar(directory) as client:
        answer = client.hear(**body)
        assert answer.kind is Kind.REFUSED
        assert "HEAR" in answer.body["reason"]
        assert "\n" not in answer.body["reason"]
        with pytest.raises((EOFError, OSError)):
            client.channel.receive()


def test_a_source_belongs_to_its_client_and_its_model(liar, directory, daemon):
    assert liar.hear(source=5).kind is Kind.OK
    with Liar(directory) as other, RawClient(liar.session) as second:
        second.handle = liar.handle
        for client in (other, second):
            assert "no source" in refusal(Liar.submit(client, 5))
            align = {"source": 5, "tokens": [1]}
            assert "no source" in refusal(client.ask(Kind.ALIGN, client.handle, **align))
            assert client.ask(Kind.FORGET, source=5).kind is Kind.OK
        engines_number = next(iter(model_of(daemon).engine.runner.cache.cross._places))
        assert "no source" in refusal(other.submit(engines_number))
        assert "no source" in refusal(liar.submit(0))
        assert "no source" in refusal(liar.submit(6))
    assert liar.submit(5).kind is Kind.OK
    outputs = [liar.channel.receive() for _ in range(1)]
    assert outputs[0].kind is Kind.OUTPUT


def test_a_language_model_hears_nothing_and_sees_no_source(liar):
    (candidate,) = resolve_candidates("CPU", None, {**EXACT, "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"})
    plain = {"device": "CPU", "config": _plain(candidate.config), "explicit": sorted(candidate.explicit)}
    answer = liar.ask(Kind.MODEL, directory=str(staticllm.demo_model_path()), candidates=[plain])
    assert liar.hear(source=5).kind is Kind.OK
    own, liar.handle = liar.handle, answer.body["model"]
    assert "is not a speech model" in refusal(liar.hear(source=6), "ConfigError")
    assert "no speech model" in refusal(liar.submit(5))
    assert "is not a speech model" in refusal(liar.ask(Kind.ALIGN, liar.handle, source=5, tokens=[1]), "ConfigError")
    assert liar.submit(0).kind is Kind.OK
    liar.handle = own
    for kind, body in ((Kind.SNAPSHOT, {"action": "load", "path": "/x", "key": "00", "identity": {}, "tokens": [1]}),
                       (Kind.CLAIM, {"session": "x", "tokens": [1], "adapters": []})):  # fmt: skip
        answer = liar.ask(kind, own, **body)
        while answer.kind is Kind.OUTPUT:
            answer = liar.channel.receive()
        assert "a speech model has no" in refusal(answer, "ConfigError")


@pytest.mark.parametrize("tokens", [[-1], [1 << 40], [10**6], list(range(1000))], ids=lambda each: str(each[:2]))
def test_texts_that_are_none_are_one_line(liar, tokens):
    assert liar.hear().kind is Kind.OK
    assert "ids" in refusal(liar.ask(Kind.ALIGN, liar.handle, source=1, tokens=tokens))


def test_a_text_about_a_window_is_aligned_only_with_heads_and_after_it_was_heard(liar, directory):
    assert liar.hear(FEATURES[:1]).kind is Kind.OK
    assert "was not heard yet" in refusal(liar.ask(Kind.ALIGN, liar.handle, source=1, tokens=[1]))
    assert "was not heard yet" in refusal(liar.submit(1))
    assert liar.hear(FEATURES[1:], first=1).kind is Kind.OK
    answer = liar.ask(Kind.ALIGN, liar.handle, source=1, tokens=[1, 2, 3])
    assert answer.kind is Kind.DONE
    ((_, weights),) = liar.channel.tensors_of(answer)
    assert weights.shape[:2] == (2, 3)
    with Liar(directory, heads=()) as other:
        assert other.hear().kind is Kind.OK
        assert "without alignment heads" in refusal(
            other.ask(Kind.ALIGN, other.handle, source=1, tokens=[1]), "ConfigError"
        )


@pytest.mark.parametrize("heads", [[(9, 0)], [(0, 9)], [(1 << 16, 0)], [(0, 0)] * 1024], ids=lambda each: str(each[:1]))
def test_heads_that_the_model_does_not_have_are_one_line(directory, honest, heads):
    with RawClient() as client:
        (candidate,) = resolve_candidates("CPU", None, F32)
        plain = {"device": "CPU", "config": _plain(candidate.config), "explicit": sorted(candidate.explicit)}
        speech = {"num_windows": 4, "heads": heads}
        answer = client.ask(Kind.MODEL, directory=str(directory), candidates=[plain], speech=speech)
        if answer.kind is not Kind.OK:
            assert "\n" not in answer.body["text"]


def test_a_client_that_keeps_its_windows_leaves_a_place(liar, honest, expected):
    for source in (1, 2, 3):
        assert liar.hear(source=source).kind is Kind.OK
    assert "the limit is 3" in refusal(liar.hear(source=4), "BusyError")
    with RawClient(liar.session) as second:
        second.handle = liar.handle
        assert "the limit is 3" in refusal(Liar.hear(second, source=1), "BusyError")
    assert str(honest.generate(sound(0.8), word_timestamps=False)) == expected
    assert liar.hear(source=4, forget=[1]).kind is Kind.OK


def test_a_window_that_is_forgotten_ends_its_requests(liar):
    assert liar.hear().kind is Kind.OK
    assert liar.submit(1, number=7).kind is Kind.OK
    liar.channel.send(Message(Kind.SUBMIT, liar.handle, 8, body={
        "request": EngineRequest((2000,), max_new_tokens=60, rules=SpeechRules(allowed_tokens=(5, 6))).to_dict(), "source": 1,
    }))  # fmt: skip
    liar.channel.send(Message(Kind.FORGET, body={"source": 1}, number=99))
    ended, answers = set(), []
    while len(ended) < 2 or len(answers) < 2:
        message = liar.channel.receive()
        if message.kind is not Kind.OUTPUT:
            answers.append(message.kind)
        elif message.flags & 1:
            ended.add(message.number)
    assert answers == [Kind.OK, Kind.OK]
    assert "no source" in refusal(liar.submit(1, number=10))


def test_windows_that_are_forgotten_while_they_are_heard_are_answered(liar, daemon):
    runner, goes_on = model_of(daemon)._sources._runner, threading.Event()
    hear = runner.run_blocks
    runner.run_blocks = lambda *rest: (goes_on.wait(SECONDS), hear(*rest))[1]
    try:
        for source in (1, 2):
            body = {"source": source, "first": 0, "tensors": tensors.describe([FEATURES], [0])}
            liar.channel.send(Message(Kind.HEAR, liar.handle, 10 + source, body=body, payload=FEATURES.tobytes()))
        liar.channel.send(Message(Kind.FORGET, number=20, body={"source": 2}))
        found = {}
        while 12 not in found or 20 not in found:
            message = liar.channel.receive()
            found[message.number] = message
        assert "forgotten" in refusal(found[12], "ClosedError")
        assert 11 not in found
    finally:
        goes_on.set()
    assert liar.channel.receive().number == 11
    runner.run_blocks = hear


def test_rules_that_allow_no_token_end_only_their_request(liar):
    assert liar.hear().kind is Kind.OK
    assert liar.submit(1, rules=SpeechRules(allowed_tokens=(1 << 30,))).kind is Kind.OK
    message = liar.channel.receive()
    (output,) = message.body["outputs"]
    assert output["error"]["type"] == "GenerationConfigError"
