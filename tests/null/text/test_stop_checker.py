"""Tests the stop checker with several answers, and when it closes with a backlog."""

import threading
import time

import pytest

from staticllm.core import FinishReason
from staticllm.errors import ClosedError
from staticllm.pipelines.engine.request import EngineRequest, Finished, OutputQueue, TokenOutput
from staticllm.pipelines.text.detokenizer import IncrementalDetokenizer
from staticllm.pipelines.text.stop_checker import StopChecker


class Client:
    def __init__(self):
        self.cancelled = []

    def cancel(self, *arguments):
        self.cancelled.append(arguments)


def request(number):
    return EngineRequest((1,), num_sequences=2, id=number)


def decode(tokens):
    return "".join(map(chr, tokens))


def token(text, index):
    return TokenOutput(ord(text), 0.0, 0.0, 0.0, index)


def test_an_early_end_of_one_answer_does_not_stop_the_check_of_others():
    client, outputs = Client(), OutputQueue()
    checker = StopChecker(client)
    checker.watch(request(1), outputs, lambda: IncrementalDetokenizer(decode, {"b"}))
    for output in (token("a", 0), Finished(FinishReason.STOP, index=0), token("a", 1), token("b", 1)):
        outputs.put(output)  # as in an engine, answer 0 ends before the first token of answer 1
    until = time.monotonic() + 5
    while not client.cancelled and time.monotonic() < until:
        time.sleep(0.001)
    checker.close()
    assert client.cancelled == [(1, 1, FinishReason.STOP)]


def test_close_does_not_decode_the_backlog():
    def slow(tokens):
        time.sleep(0.02)
        return decode(tokens)

    client, outputs = Client(), OutputQueue()
    checker = StopChecker(client)
    checker.watch(request(1), outputs, lambda: IncrementalDetokenizer(slow, {"b"}))
    for _ in range(100):
        outputs.put(token("a", 0))
    start = time.monotonic()
    checker.close()
    assert time.monotonic() - start < 1


def test_a_request_added_during_close_does_not_delay_close():
    is_decoding, may_go_on = threading.Event(), threading.Event()

    def blocked(tokens):
        is_decoding.set()
        may_go_on.wait(10)
        return decode(tokens)

    outputs = OutputQueue()
    checker = StopChecker(Client())
    checker.watch(request(1), outputs, lambda: IncrementalDetokenizer(blocked, {"b"}))
    outputs.put(token("a", 0))
    assert is_decoding.wait(10)
    closing = threading.Thread(target=checker.close, daemon=True)
    closing.start()
    while not checker._is_closed:
        time.sleep(0.001)
    with pytest.raises(ClosedError):
        checker.watch(request(2), OutputQueue(), lambda: IncrementalDetokenizer(decode, {"b"}))
    time.sleep(0.2)
    may_go_on.set()
    closing.join(5)
    assert not closing.is_alive(), "close waits forever"
