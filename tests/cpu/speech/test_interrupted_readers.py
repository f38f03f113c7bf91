"""Ctrl-C in a thread that waits for a recording: the thread that hears it must go on."""

import time

from staticllm.pipelines.daemon_client.remote_windows import RemoteWindows
from staticllm.pipelines.speech.transcription_handle import TranscriptionHandle
from staticllm.pipelines.speech.transcription_watch import Cancellation
from tests.support.interrupts import interrupt_in_enter

SECONDS = 20


def test_a_transcription_ends_whose_reader_was_interrupted(monkeypatch):
    found = object()
    handle = TranscriptionHandle(lambda: time.sleep(0.1) or found, Cancellation())
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        assert handle.result(SECONDS) is found


def test_a_window_that_the_daemon_hears_is_told_to_a_reader_that_was_interrupted(monkeypatch):
    heard = RemoteWindows._begun(lambda future: time.sleep(0.1) or future.set_result(3))
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        assert heard.result(SECONDS) == 3
