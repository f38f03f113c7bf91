"""Tests clients that lie about windows: each lie is one line, and the text of an honest client stays the same."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from support.models.speech_model import BANDS, COLUMNS
from support.models.whisper_directory import sound, write_whisper

import staticllm
from staticllm import StaticWhisperPipeline
from staticllm.pipelines.daemon_client.remote_launch import plain_config
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
    wait_for(lambda: bank.num_free == bank.num_cross_windows)


def model_of(daemon):
    """Return the model that the honest program shares with most of the liars."""
    return daemon.models.served()[0][1]


class Liar(RawClient):
    """A client with the speech model in its hand."""

    def __init__(self, directory, heads=((0, 0), (1, 1)), **hello):
        super().__init__(**hello)
        (candidate,) = resolve_candidates("CPU", None, F32)
        plain = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
        speech = {"num_windows": 4, "heads": [list(each) for each in heads]}
        answer = self.ask(Kind.MODEL, directory=str(directory), candidates=[plain], speech=speech)
        assert answer.kind is Kind.OK, answer.body
        self.handle = answer.body["model"]

    def encode(self, features=FEATURES, window=1, first=0, **more):
        """Send a window, and return the answer."""
        body = {"window": window, "first": first, "tensors": tensors.describe([features], [0]), **more}
        self.channel.send(Message(Kind.ENCODE, self.handle, 9, body=body, payload=features.tobytes()))
        return self.channel.receive()

    def submit(self, window, number=7, **changes):
        """Submit a request, and return the answer."""
        request = EngineRequest((2000,), max_new_tokens=2, **changes).to_dict()
        self.channel.send(Message(Kind.SUBMIT, self.handle, number, body={"request": request, "window": window}))
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
        assert "features" in refusal(liar.encode(np.ascontiguousarray(wrong)))
    assert liar.encode().kind is Kind.OK


def test_bands_must_come_in_their_order(liar):
    assert liar.encode(FEATURES[:1]).kind is Kind.OK
    assert "already" in refusal(liar.encode(FEATURES[:1]), "BusyError")
    assert "in their order" in refusal(liar.encode(FEATURES[2:], first=2))
    assert "no window" in refusal(liar.encode(FEATURES[1:], first=1))
    assert liar.encode(FEATURES[:3]).kind is Kind.OK
    assert liar.encode(FEATURES[3:], first=3).kind is Kind.OK
    assert "in their order" in refusal(liar.encode(FEATURES[3:], first=3))


@pytest.mark.parametrize(
    "body",
    [
        {"window": 0}, {"window": -1}, {"window": 1 << 63}, {"window": "1"}, {"first": -1}, {"first": 1 << 17}, {"first": None},
        {"priority": 1 << 40}, {"priority": 1.5}, {"released": [0]}, {"released": [1] * 65}, {"released": "x"}, {"tensors": []},
        {"tensors": [[0, "<f4", [4, 20], 0], [1, "<f4", [4, 20], 0]]}, {"tensors": [[0, "|O", [4, 20], 0]]}, {"shared": True},
        {"tensors": [[0, "<f4", [4, 1 << 30], 0]]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_message_ends_the_connection_with_one_line(directory, honest, body):
    with Liar(directory) as client:
        answer = client.encode(**body)
        assert answer.kind is Kind.REFUSED
        assert "ENCODE" in answer.body["reason"]
        assert "\n" not in answer.body["reason"]
        with pytest.raises((EOFError, OSError)):
            client.channel.receive()


def test_a_window_belongs_to_its_client_and_its_model(liar, directory, daemon):
    assert liar.encode(window=5).kind is Kind.OK
    with Liar(directory) as other, RawClient(liar.session) as second:
        second.handle = liar.handle
        for client in (other, second):
            assert "no window" in refusal(Liar.submit(client, 5))
            align = {"window": 5, "tokens": [1]}
            assert "no window" in refusal(client.ask(Kind.ALIGN, client.handle, **align))
            assert client.ask(Kind.RELEASE_WINDOW, window=5).kind is Kind.OK
        engines_number = next(iter(model_of(daemon).engine.runner.cache.cross._places))
        assert "no window" in refusal(other.submit(engines_number))
        assert "no window" in refusal(liar.submit(0))
        assert "no window" in refusal(liar.submit(6))
    assert liar.submit(5).kind is Kind.OK
    outputs = [liar.channel.receive() for _ in range(1)]
    assert outputs[0].kind is Kind.OUTPUT


def test_a_language_model_encodes_nothing_and_sees_no_window(liar):
    (candidate,) = resolve_candidates("CPU", None, {**EXACT, "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"})
    plain = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
    answer = liar.ask(Kind.MODEL, directory=str(staticllm.demo_model_path()), candidates=[plain])
    assert liar.encode(window=5).kind is Kind.OK
    own, liar.handle = liar.handle, answer.body["model"]
    assert "is not a speech model" in refusal(liar.encode(window=6), "ConfigError")
    assert "no speech model" in refusal(liar.submit(5))
    assert "is not a speech model" in refusal(liar.ask(Kind.ALIGN, liar.handle, window=5, tokens=[1]), "ConfigError")
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
    assert liar.encode().kind is Kind.OK
    assert "ids" in refusal(liar.ask(Kind.ALIGN, liar.handle, window=1, tokens=tokens))


def test_a_text_about_a_window_is_aligned_only_with_heads_and_after_it_was_encoded(liar, directory):
    assert liar.encode(FEATURES[:1]).kind is Kind.OK
    assert "was not encoded yet" in refusal(liar.ask(Kind.ALIGN, liar.handle, window=1, tokens=[1]))
    assert "was not encoded yet" in refusal(liar.submit(1))
    assert liar.encode(FEATURES[1:], first=1).kind is Kind.OK
    answer = liar.ask(Kind.ALIGN, liar.handle, window=1, tokens=[1, 2, 3])
    assert answer.kind is Kind.DONE
    ((_, weights),) = liar.channel.tensors_of(answer)
    assert weights.shape[:2] == (2, 3)
    with Liar(directory, heads=()) as other:
        assert other.encode().kind is Kind.OK
        assert "without alignment heads" in refusal(
            other.ask(Kind.ALIGN, other.handle, window=1, tokens=[1]), "ConfigError"
        )


@pytest.mark.parametrize("heads", [[(9, 0)], [(0, 9)], [(1 << 16, 0)], [(0, 0)] * 1024], ids=lambda each: str(each[:1]))
def test_heads_that_the_model_does_not_have_are_one_line(directory, honest, heads):
    with RawClient() as client:
        (candidate,) = resolve_candidates("CPU", None, F32)
        plain = {"device": "CPU", "config": plain_config(candidate.config), "explicit": sorted(candidate.explicit)}
        speech = {"num_windows": 4, "heads": heads}
        answer = client.ask(Kind.MODEL, directory=str(directory), candidates=[plain], speech=speech)
        if answer.kind is not Kind.OK:
            assert "\n" not in answer.body["text"]


def test_a_client_that_keeps_its_windows_leaves_a_place(liar, honest, expected):
    for window in (1, 2, 3):
        assert liar.encode(window=window).kind is Kind.OK
    assert "the limit is 3" in refusal(liar.encode(window=4), "BusyError")
    with RawClient(liar.session) as second:
        second.handle = liar.handle
        assert "the limit is 3" in refusal(Liar.encode(second, window=1), "BusyError")
    assert str(honest.generate(sound(0.8), word_timestamps=False)) == expected
    assert liar.encode(window=4, released=[1]).kind is Kind.OK


def test_a_window_that_is_released_ends_its_requests(liar):
    assert liar.encode().kind is Kind.OK
    assert liar.submit(1, number=7).kind is Kind.OK
    liar.channel.send(Message(Kind.SUBMIT, liar.handle, 8, body={
        "request": EngineRequest((2000,), max_new_tokens=60, rules=SpeechRules(allowed_tokens=(5, 6))).to_dict(), "window": 1,
    }))  # fmt: skip
    liar.channel.send(Message(Kind.RELEASE_WINDOW, body={"window": 1}, number=99))
    ended, answers = set(), []
    while len(ended) < 2 or len(answers) < 2:
        message = liar.channel.receive()
        if message.kind is not Kind.OUTPUT:
            answers.append(message.kind)
        elif message.flags & 1:
            ended.add(message.number)
    assert answers == [Kind.OK, Kind.OK]
    assert "no window" in refusal(liar.submit(1, number=10))


def test_windows_that_are_released_while_they_are_encoded_are_answered(liar, daemon):
    runner, goes_on = model_of(daemon).windows.runner, threading.Event()
    encode = runner.run_blocks
    runner.run_blocks = lambda *rest: (goes_on.wait(SECONDS), encode(*rest))[1]
    try:
        for window in (1, 2):
            body = {"window": window, "first": 0, "tensors": tensors.describe([FEATURES], [0])}
            liar.channel.send(Message(Kind.ENCODE, liar.handle, 10 + window, body=body, payload=FEATURES.tobytes()))
        liar.channel.send(Message(Kind.RELEASE_WINDOW, number=20, body={"window": 2}))
        found = {}
        while 12 not in found or 20 not in found:
            message = liar.channel.receive()
            found[message.number] = message
        assert "released" in refusal(found[12], "ClosedError")
        assert 11 not in found
    finally:
        goes_on.set()
    assert liar.channel.receive().number == 11
    runner.run_blocks = encode


def test_rules_that_allow_no_token_end_only_their_request(liar):
    assert liar.encode().kind is Kind.OK
    assert liar.submit(1, rules=SpeechRules(allowed_tokens=(1 << 30,))).kind is Kind.OK
    message = liar.channel.receive()
    (output,) = message.body["outputs"]
    assert output["error"]["type"] == "GenerationConfigError"
