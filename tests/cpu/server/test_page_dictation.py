"""Tests dictation on the page in a Chromium whose microphone plays a file: what the speech model hears stands in the field."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec

import httpx
import pytest
from support.models.whisper_directory import sound, wav, write_whisper
from support.server.browsers import tab_of
from support.server.served import serving

from staticllm.server.models import kinds
from staticllm.server.models.served import demo_spec, model_spec

pytest.importorskip("playwright")
for package in ("python_multipart", "soundfile"):
    pytest.importorskip(package)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    directory = write_whisper(tmp_path_factory.mktemp("whisper"))
    with serving([demo_spec(), model_spec(f"whisper={directory}")]) as served:
        yield served


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("microphone") / "speech.wav"
    file.write_bytes(wav(sound(20.0), subtype="PCM_16"))
    arguments = [
        "--no-sandbox", "--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={file}",
    ]  # fmt: skip
    with sync_playwright() as playwright:
        path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        try:
            browser = playwright.chromium.launch(executable_path=path, args=arguments)
        except Exception as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


def test_what_is_said_stands_in_the_field(served, browser):
    with tab_of(browser, served.url) as tab:
        tab.open()
        sent = []
        tab.page.on("request", lambda request: sent.append(request) if "audio" in request.url else None)
        tab.field.fill("I say:")
        tab.page.get_by_role("button", name="Dictate", exact=True).click()
        stop = tab.page.get_by_role("button", name="Stop dictating", exact=True)
        assert stop.get_attribute("aria-pressed") == "true"
        clock = tab.page.locator("#recording")
        assert re.fullmatch(r"Recording 0:0\d", clock.inner_text()), "not by colour alone"
        tab.page.wait_for_timeout(1500)
        with tab.page.expect_response("**/v1/audio/transcriptions") as answer:
            stop.click()
        text = answer.value.json()["text"]
        tab.page.wait_for_function("() => document.getElementById('message').value.length > 6")
        assert tab.field.input_value() == f"I say: {text}"
        assert not clock.is_visible()
        assert len(sent) == 1
    counted = httpx.get(served.url + "/metrics", timeout=60).text
    name = "staticllm_audio_seconds_total"
    seconds = next(float(line.split()[-1]) for line in counted.splitlines() if line.startswith(name))
    assert 1.0 < seconds < 5.0


def test_without_a_speech_model_there_is_no_button(browser):
    with serving() as served, tab_of(browser, served.url) as tab:
        tab.open()
        tab.page.wait_for_function("() => document.getElementById('model').options.length > 0")
        assert not tab.page.locator("#dictate").is_visible()


@pytest.mark.parametrize("package", ["python_multipart", "soxr"])
def test_without_the_packages_that_read_recordings_there_is_no_button(served, browser, monkeypatch, package):
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name == package else find_spec(name))
    kinds.can_read_files.cache_clear()
    try:
        listed = httpx.get(served.url + "/v1/models", timeout=60).json()["data"]
        assert [each["reads_files"] for each in listed if each["type"] == "speech"] == [False]
        with tab_of(browser, served.url) as tab:
            tab.open()
            tab.page.wait_for_function("() => document.getElementById('model').options.length > 0")
            assert not tab.page.locator("#dictate").is_visible()
    finally:
        kinds.can_read_files.cache_clear()
