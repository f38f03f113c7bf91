"""Tests the commands that ask a server: run --server, list, ps, stop, top."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from urllib.parse import parse_qs, urlsplit

import pytest

for package in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "httpx", "httpx_sse"):
    pytest.importorskip(package)

from click.testing import CliRunner  # noqa: E402
from support.attach.daemons import wait_for  # noqa: E402
from support.server.served import serving  # noqa: E402

from staticllm.cli import cli  # noqa: E402
from staticllm.cli.servers import FIELDS, MAX_PAGES  # noqa: E402
from staticllm.cli.terminal import printable  # noqa: E402
from staticllm.server.feed import MAX_ENTRIES  # noqa: E402

PROMPT = "What is an NPU?"
KEY = "only-this-one"


@pytest.fixture(scope="module")
def served():
    with serving(api_keys=(KEY,), properties={"PROGRAMS": "shared"}) as served:
        yield served


def call(*arguments, key=KEY, server=None, **more):
    environment = {"STATICLLM_API_KEY": key, "STATICLLM_SERVER": server}
    return CliRunner().invoke(cli, [str(each) for each in arguments], env=environment, **more)


def ok(*arguments, **more):
    result = call(*arguments, **more)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments, code=1, **more):
    result = call(*arguments, **more)
    assert result.exit_code == code, result.output
    assert not result.stdout, result.output
    assert "Traceback" not in result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("Error: "), result.stderr
    assert code == 2 or result.stderr.count("\n") == 1, result.stderr
    return line


def test_run_asks_the_server(served):
    text = ok("run", PROMPT, "--server", served.url, "-n", 12)
    found = json.loads(ok("run", PROMPT, "--server", served.url, "-n", 12, "--json"))
    assert found["text"] + "\n" == text
    assert found["model"] == "demo"
    assert found["generated_tokens"] == 12
    assert found["finish_reason"] == "length"
    assert found["ttft_ms"] > 0
    assert (
        json.loads(ok("run", PROMPT, "--server", served.url, "-n", 12, "--json", "-m", "demo"))["text"] == found["text"]
    )
    # with a key of the command line, a URL with /v1 and without http://, piped text, and the figures
    result = call(
        "run",
        "--server",
        served.url.removeprefix("http://") + "/v1/",
        "--api-key",
        KEY,
        "-n",
        12,
        "--stats",
        key="",
        input=PROMPT,
    )
    assert result.stdout == text
    assert "12 generated (length)" in result.stderr


def test_run_sends_its_options(served):
    from staticllm import StaticLLMPipeline, demo_model_path

    with StaticLLMPipeline(demo_model_path(), "CPU", PROGRAMS="shared") as pipe:
        raw = pipe.generate(PROMPT, max_new_tokens=8, apply_chat_template=False)
        drawn = pipe.generate(
            PROMPT, max_new_tokens=8, do_sample=True, temperature=1.5, top_k=20, top_p=0.9, rng_seed=4
        )
    assert ok("run", PROMPT, "--server", served.url, "-n", 8, "--raw") == raw + "\n"
    options = ("--temperature", 1.5, "--top-k", 20, "--top-p", 0.9, "--seed", 4)
    assert ok("run", PROMPT, "--server", served.url, "-n", 8, *options) == drawn + "\n"


@pytest.fixture
def chat(served, monkeypatch):
    """Return a function that types lines into a chat with the server, and returns the contents of every request."""
    from staticllm.cli import server_client

    stream, bodies = server_client.ServerClient.stream, []

    def noting(self, path, body):
        bodies.append([each["content"] for each in body["messages"]])
        return stream(self, path, body)

    def type_in(*lines):
        typed = iter([*lines, "/exit"])
        monkeypatch.setattr("staticllm.cli.run._prompt", lambda argument: None)
        monkeypatch.setattr("staticllm.cli.chat.line_reader", lambda words: lambda: next(typed))
        monkeypatch.setattr(server_client.ServerClient, "stream", noting)
        return call("run", "--server", served.url, "-n", 8, "--system", "Be short."), bodies

    return type_in


def test_a_chat_with_the_server_remembers_and_forgets(chat):
    result, bodies = chat("My name is Ada.", "What is my name?", "/clear", "", "What is my name?")
    assert result.exit_code == 0, result.output
    assert [len(each) for each in bodies] == [2, 4, 2]
    assert all(each[0] == "Be short." for each in bodies)
    assert bodies[1][1] == "My name is Ada."
    assert bodies[2][1] == "What is my name?"


def test_a_chat_with_the_server_has_the_commands_of_a_local_one(chat, tmp_path):
    path = tmp_path / "chat.json"
    result, bodies = chat(
        "/regenerate", "hello", "/regenerate", "/stats", f"/save {path}", "/system Rhyme.", "hi", f"/load {path}", "so"
    )
    assert result.exit_code == 0, result.output
    assert "there is no answer yet" in result.stderr
    assert "8 generated (length) | TTFT" in result.stderr
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["system"] == "Be short."
    assert [each["role"] for each in saved["messages"]] == ["user", "assistant"]
    answer = saved["messages"][1]["content"]
    assert bodies == [
        ["Be short.", "hello"],
        ["Be short.", "hello"],
        ["Rhyme.", "hi"],
        ["Be short.", "hello", answer, "so"],
    ]


def test_list_ps_and_stop(served):
    ok("run", PROMPT, "--server", served.url, "-n", 1)
    (model,) = json.loads(ok("list", "--json", "--server", served.url))
    assert (model["id"], model["type"], model["status"]) == ("demo", "chat", "loaded")
    head, row = ok("list", server=served.url).splitlines()
    assert head.split() == ["name", "kind", "status", "tokens"]
    assert row.split() == ["demo", "chat", "loaded", str(model["max_model_len"])]
    (loaded,) = json.loads(ok("ps", "--json", server=served.url))
    assert loaded["size"] > 0
    assert ok("ps", server=served.url).splitlines()[1].split()[0] == "demo"
    assert json.loads(ok("stop", "demo", "--json", server=served.url)) == {"model": "demo", "status": "unloaded"}
    assert served.pipeline() is None
    assert json.loads(ok("ps", "--json", server=served.url)) == []
    assert ok("list", server=served.url).splitlines()[1].split() == ["demo", "chat", "unloaded"]
    assert ok("ps", server=served.url).splitlines() == ["name  size  tokens  until"]
    ok("run", PROMPT, "--server", served.url, "-n", 1)
    assert "demo is unloaded" in ok("stop", "demo", server=served.url)


def test_a_model_in_use_is_unloaded_afterwards(served, monkeypatch):
    monkeypatch.setattr("staticllm.cli.servers.WAIT_SECONDS", 0.3)
    pieces, thread = [], None
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 600, "ignore_eos": True}

    def ask():
        import httpx

        headers = {"Authorization": f"Bearer {KEY}"}
        pieces.append(httpx.post(served.url + "/v1/chat/completions", json=body, headers=headers, timeout=120))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: served.pipeline() is not None and served.state.hub.models["demo"].num_users, 60)
    assert "is in use" in ok("stop", "demo", server=served.url)
    thread.join()
    assert pieces[0].status_code == 200
    wait_for(lambda: served.pipeline() is None, 30)


def test_top_shows_the_scheduler(served):
    ok("run", PROMPT, "--server", served.url, "-n", 4)
    looks = [
        json.loads(line)
        for line in ok("top", "--json", "--count", 2, "--interval", 0.1, server=served.url).splitlines()
    ]
    assert len(looks) == 2
    assert looks[1]["totals"]["requests"] >= 1
    assert looks[1]["now"] > looks[0]["now"]
    text = ok("top", "demo", "--count", 2, "--interval", 0.1, server=served.url)
    assert text.count("demo at http://") == 2
    assert "tokens/s" in text
    assert "TTFT" in text
    assert "KV slots" in text


@contextlib.contextmanager
def feeding(num_entries, is_stuck=False):
    """Serve the feed of a scheduler with so many entries in pages, and yield its URL and the list of the cursors asked for."""
    asked = []

    class Feed(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            after = int(parse_qs(urlsplit(self.path).query)["after"][0])
            asked.append(after)
            first = 0 if is_stuck else after
            numbers = range(first + 1, min(first + MAX_ENTRIES, num_entries) + 1)
            feed = dict.fromkeys(FIELDS) | {
                "model": "demo", "models": [], "now": float(len(asked)), "cursor": first + len(numbers),
                "calls": [{"number": each} for each in numbers if each % 2],
                "ended": [{"number": each} for each in numbers if not each % 2],
                "dropped": 0 if after else 3,
            }  # fmt: skip
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(feed).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Feed) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


def test_top_reads_on_at_once_while_a_page_of_the_feed_is_full():
    count = 2 * MAX_ENTRIES + 7
    with feeding(count) as (url, asked):
        looks = [
            json.loads(line) for line in ok("top", "--json", "--count", 2, "--interval", 0.1, server=url).splitlines()
        ]
        assert asked == [0, MAX_ENTRIES, 2 * MAX_ENTRIES, count]
    assert [call["number"] for call in looks[0]["calls"]] == list(range(1, count + 1, 2))
    assert [answer["number"] for answer in looks[0]["ended"]] == list(range(2, count + 1, 2))
    assert looks[0]["dropped"] == 3
    assert looks[0]["cursor"] == count
    assert looks[0]["now"] == 3.0, "the rest is of the last page"
    assert looks[1]["calls"] == []


def test_top_does_not_read_for_ever():
    with feeding(MAX_ENTRIES, is_stuck=True) as (url, asked):
        assert "nothing is loaded" in ok("top", "--count", 1, server=url)
        assert len(asked) == MAX_PAGES


def test_top_lists_requests_and_lost_models():
    from staticllm.cli.servers import lines_of

    totals = dict.fromkeys(
        ("requests", "calls", "preemptions", "output_tokens", "prompt_tokens", "cached_tokens", "prefill_seconds"), 0
    ) | {
        "decode_seconds": 0.0,
        "slots_in_use": 50,
        "ttft_ms": 5.0,
        "ttft_p95_ms": 9.0,
        "tpot_ms": 2.0,
        "longest_gap_ms": 3.0,
    }
    request = {
        "id": 7, "status": "running", "prompt_tokens": 9, "cached_tokens": 0, "computed_tokens": 12, "output_tokens": 3,
        "ttft_ms": None,
    }  # fmt: skip
    found = {
        "model": "demo", "models": [{"name": "demo", "status": "loaded"}], "now": 10.0, "totals": totals,
        "limits": {"num_seqs": 4, "max_waiting": 64, "kv_slots": 100}, "requests": [request] * 25, "waiting_ms": [1.0, 2.0],
    }  # fmt: skip
    later = {**found, "now": 12.0, "totals": {**totals, "output_tokens": 30, "decode_seconds": 1.0, "calls": 5}}
    text = "\n".join(lines_of("http://x", later, found))
    assert "15.0 generated" in text
    assert "50% decode" in text
    assert "50 of 100" in text
    assert "25 running (at most 4 at once); 2 of at most 64 wait" in text and "and 5 more" in text
    assert "is being started" in "\n".join(lines_of("http://x", {**found, "totals": None}, None))


COMMANDS = (
    ["run", PROMPT, "--server"],
    ["list", "--server"],
    ["ps", "--server"],
    ["stop", "demo", "--server"],
    ["top", "--server"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_bad_servers_and_keys_get_one_line(served, command):
    assert "there is no server at http://127.0.0.1:9:" in refused(*command, "127.0.0.1:9")
    assert "refuses the key" in refused(*command, served.url, key="another")
    assert "refuses the key" in refused(*command, served.url, key="")
    assert "is no URL" in refused(*command, "ftp://x")
    assert "outside ASCII" in refused(*command, served.url, key="schlüssel")


@contextlib.contextmanager
def answering(body, kind="application/json", pause=0.0):
    """Serve one answer for every request, and yield the address. With a ``pause`` it has no end."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)
            with contextlib.suppress(OSError):
                while pause:
                    self.wfile.write(b" ")
                    time.sleep(pause)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        other.daemon_threads = True
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{other.server_port}"
        finally:
            other.shutdown()
            thread.join()


FOREIGN = (
    b"<html>hello</html>", b"[1]", b"null", b"5", b"[" * 100_000,
    b'{"data": [null], "models": [5]}', b'{"data": {}, "models": {}, "type": 5, "status": []}',
)  # fmt: skip


@pytest.mark.parametrize("body", FOREIGN, ids=lambda body: body[:9].decode())
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_what_is_no_server_of_ours_gets_one_line(command, body):
    with answering(body) as address:
        line = refused(*command, address)
    assert "no server of 'staticllm serve'" in line or "cannot be read" in line


EVENTS = (
    "[1]", "5", '{"choices": 5}', '{"choices": [5]}', '{"choices": [{"delta": 5}]}',
    '{"choices": [{"delta": {"content": []}}]}', '{"choices": [], "usage": 5}', "[" * 100_000,
)  # fmt: skip


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event[:20])
def test_a_stream_of_something_else_gets_one_line(event):
    with answering(f"data: {event}\n\n".encode(), "text/event-stream") as address:
        line = refused("run", PROMPT, "--server", address)
    assert "no server of 'staticllm serve'" in line or "cannot be read" in line


def test_a_list_of_ollama_is_shown_as_far_as_it_goes():
    models = [
        {"id": "a", "object": "model", "name": "a:latest", "size": None, "expires_at": "soon"},
        {"name": "\x1b[2Jb"},
    ]
    with answering(json.dumps({"data": models, "models": models}).encode()) as address:
        assert ok("list", server=address).splitlines()[1].split() == ["a", "-", "-"]
        listed = ok("ps", server=address)
    assert listed.splitlines()[1].split() == ["a", "-", "-", "-"]
    assert "\x1b" not in listed
    assert "[2Jb" in listed


def test_an_answer_without_an_end_is_given_up(monkeypatch):
    monkeypatch.setattr("staticllm.cli.server_client.GET_SECONDS", 0.5)
    with answering(b"[", pause=0.05) as address:
        assert "does not end" in refused("list", server=address)
    monkeypatch.setattr("staticllm.cli.server_client.MAX_ANSWER", 1000)
    with answering(b"[" + b"1," * 1000, pause=0.05) as address:
        assert "does not end" in refused("list", server=address)


def test_a_terminal_gets_no_escapes_of_an_answer():
    assert printable("a\x1b[2Jb\x07\n\té\x9b") == "a\ufffd[2Jb\ufffd\n\té\ufffd"


def test_wrong_models_and_options_get_one_line(served):
    for command in (
        ["run", PROMPT, "-m", "no-such", "--server"],
        ["stop", "no-such", "--server"],
        ["top", "no-such", "--server"],
    ):
        line = refused(*command, served.url)
        assert "'no-such' does not exist" in line
        assert "'demo'" in line
    assert "--max-prompt-len" in refused("run", PROMPT, "--server", served.url, "--max-prompt-len", 64, code=2)
    assert "--property" in refused("run", PROMPT, "--server", served.url, "-p", "KV_SLOTS=64", code=2)
    assert "goes with --server" in refused("run", PROMPT, "--api-key", "x", code=2)
    assert "tokens" in refused("run", "word " * 5000, "--server", served.url)
