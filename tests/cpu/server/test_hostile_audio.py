"""Sends hostile recordings and forms to ``staticllm serve`` in a process of its own: it stays small, and serves what is good."""

from __future__ import annotations

import json
import random
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest
from support import command_line
from support.models.whisper_directory import sound, wav, write_whisper

for package in ("python_multipart", "soundfile", "soxr"):
    pytest.importorskip(package)
PATH = "/audio/transcriptions"
MORE_BYTES = 600 << 20
"""What the process may grow by: samples and features of the recordings that have their turn, and what allocators keep."""
REFUSALS = {400, 404, 408, 413, 429}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL and the process of a server of one speech model."""
    folder = tmp_path_factory.mktemp("hostile")
    ready = folder / "ready.json"
    command = [
        *command_line.STATICLLM, "serve", f"whisper={write_whisper(folder / 'whisper')}", "--port", "0", "--ready-file", ready,
        "--max-audio-minutes", "10", "--body-seconds", "5", "-p", "INFERENCE_PRECISION_HINT=f32",
    ]  # fmt: skip
    with subprocess.Popen(list(map(str, command)), env=command_line.ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        try:
            until = time.monotonic() + 60
            while not ready.exists():
                assert time.monotonic() < until
                assert process.poll() is None
                time.sleep(0.05)
            yield json.loads(ready.read_text())["url"], psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait(30)


def with_size(content, size):
    """Return a WAV whose headers say that its data have ``size`` bytes."""
    place = content.index(b"data") + 4
    return content[:4] + struct.pack("<I", size) + content[8:place] + struct.pack("<I", size) + content[place + 4 :]


def recordings(rng):
    """Yield the kinds of hostile files."""
    good = wav(sound(0.5, rng.randrange(100)))
    yield good[: rng.randrange(1, len(good))]
    yield with_size(good, rng.choice([0, 1, 2**31 - 1, 2**32 - 1]))
    channels, rate = rng.choice([(0, 16000), (65535, 16000), (1, 0), (1, 2**32 - 1), (2, 1)])
    yield good[:22] + struct.pack("<HI", channels, rate) + good[28:]
    damaged = bytearray(good)
    for _ in range(20):
        damaged[rng.randrange(60)] = rng.randrange(256)
    yield bytes(damaged)
    for kind in ("FLAC", "OGG", "MP3"):
        content = bytearray(wav(sound(0.5), kind=kind))
        for _ in range(rng.randrange(30)):
            content[rng.randrange(len(content))] = rng.randrange(256)
        yield bytes(content)
    yield rng.randbytes(rng.randrange(1, 100_000))
    yield b""
    yield b"text " * rng.randrange(1, 1000)
    yield b"#EXTM3U\n#EXT-X-VERSION:3\nfile:///etc/passwd\n"
    yield b"ffconcat version 1.0\nfile /etc/passwd\n"
    yield b"PK\3\4" + rng.randbytes(1000)
    yield wav(np.full(8000, rng.choice([np.nan, np.inf, 1e30]), np.float32), subtype="FLOAT")


def sent(url, content, rng):
    """Send one file in a form, and return the status."""
    data = {
        "model": rng.choice(["whisper", "whisper", "none"]),
        "response_format": rng.choice(["json", "srt", "nothing"]),
    }
    return httpx.post(url + PATH, files={"file": ("a.wav", content)}, data=data, timeout=60).status_code


def raw_answer(url, head, body):
    """Send bytes as they are, close the writing half, and return the status; None if the server closed the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
        try:
            connection.sendall(f"POST {parts.path}{PATH} HTTP/1.1\r\nHost: {parts.netloc}\r\n{head}\r\n\r\n".encode())
            connection.sendall(body)
            connection.shutdown(socket.SHUT_WR)
            line = connection.makefile("rb").readline()
        except OSError:  # the server has closed it before all was sent
            return None
    return int(line.split()[1]) if line else None


def forms(rng):
    """Yield the kinds of hostile requests: headers, and a body."""
    part = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + rng.randbytes(100) + b"\r\n"
    )
    kind = "Content-Type: multipart/form-data; boundary=x"
    yield f"{kind}\r\nContent-Length: {10 ** rng.randrange(3, 25)}", part
    yield f"{kind}\r\nContent-Length: -5", part
    yield f"{kind}\r\nContent-Length: {len(part)}", part
    yield (
        f"Content-Type: multipart/form-data; boundary={rng.choice(['y', '', chr(34), 'x' * 5000])}\r\nContent-Length: 99",
        part,
    )
    yield f"{kind}\r\nContent-Length: {len(part) + 5}\r\nTransfer-Encoding: chunked", part
    yield f"{kind}\r\nTransfer-Encoding: chunked", b"fffffff\r\n" + part
    yield f"Content-Type: multipart/form-data\r\nContent-Length: {len(part)}", part
    head = part[: rng.randrange(1, 60)]
    yield f"{kind}\r\nContent-Length: {len(head)}", head


def attack(url, seed):
    """Send all kinds once, and return the statuses of those that were answered."""
    rng = random.Random(seed)
    found = [sent(url, content, rng) for content in recordings(rng)]
    found += [raw_answer(url, head, body) for head, body in forms(rng)]
    return found


def good(url):
    answer = httpx.post(url + PATH, files={"file": ("a.wav", wav(sound(0.8), subtype="FLOAT"))}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["text"]


def hostile(server, num_rounds):
    """Attack with eight threads, and check that the server answers as before and has not grown."""
    url, process = server
    before = good(url)
    attack(url, 0)
    size = process.memory_info().rss
    peak = size
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(attack, url, seed) for seed in range(1, num_rounds)]
        for future in futures:
            for status in future.result():
                assert status is None or status == 200 or status in REFUSALS, status
            peak = max(peak, process.memory_info().rss)
    assert peak - size < MORE_BYTES
    assert good(url) == before
    assert sum(status in REFUSALS for future in futures for status in future.result()) > 10 * len(futures)
    return sum(len(future.result()) for future in futures), size >> 20, peak >> 20


def test_hostile_uploads(server):
    hostile(server, 4)


@pytest.mark.slow
def test_a_thousand_hostile_uploads(server):
    count, size, peak = hostile(server, 48)
    assert count > 1000
    print(f"{count} uploads, {size} MiB before, {peak} MiB at most")


def test_small_files_of_long_silence_take_little(server):
    """Ten hours of silence in a few hundred kilobytes, eight times at once: reading ends at the limit."""
    url, process = server
    content = wav(np.zeros(10 * 3600 * 1000, np.float32), 1000, "FLAC")
    assert len(content) < 1 << 20
    size = process.memory_info().rss
    codes, peak = [], size

    def ask():
        codes.append(httpx.post(url + PATH, files={"file": ("a.flac", content)}, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.01)
    assert set(codes) <= {400, 429}
    assert 400 in codes
    assert peak - size < MORE_BYTES
    good(url)


def test_clients_that_go_in_the_middle(server):
    """Connections end while the body comes, while it waits, and while text is streamed."""
    url, process = server
    content = wav(np.tile(sound(30.0), 10))
    parts = urlsplit(url)
    request = httpx.Request("POST", url + PATH, files={"file": ("a.wav", content)}, data={"stream": "true"})
    body = request.read()
    head = "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
    size = process.memory_info().rss

    def go(length, seconds):
        with socket.create_connection((parts.hostname, parts.port), timeout=30) as connection:
            connection.sendall(f"POST {parts.path}{PATH} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body[:length])
            time.sleep(seconds)

    cuts = [(length, 0) for length in (0, 100, len(body) // 2, len(body) - 1)]
    cuts += [(len(body), seconds) for seconds in (0, 0.05, 0.3, 1.0)]
    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(go, *cut) for cut in cuts * 4]:
            future.result()
    begin = time.monotonic()
    good(url)
    assert time.monotonic() - begin < 20
    until = time.monotonic() + 30
    while process.num_threads() > 60 or process.memory_info().rss - size > MORE_BYTES:
        assert time.monotonic() < until, (process.num_threads(), process.memory_info().rss - size)
        time.sleep(0.1)
