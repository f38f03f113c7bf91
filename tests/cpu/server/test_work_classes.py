"""Tests the doors of the two classes of work: which requests are proactive, and what clients are told, over HTTP."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace

import httpx
import pytest
from support.server.served import serving

from staticllm.errors import ConfigError
from staticllm.server.config_file import read_config_file
from staticllm.server.models.model_options import by_model
from staticllm.server.models.served import demo_spec
from staticllm.server.settings import ApiClient, ServerSettings

pytestmark = pytest.mark.usefixtures("shared_programs")

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
CLIENTS = (ApiClient("desk", "desk-key"), ApiClient("agent", "agent-key", "proactive", 0.5))


@contextlib.contextmanager
def priorities_of(served):
    """Collect the priorities with which requests enter the engine."""
    found = []
    engine = served.state.hub.models["demo"].chat.engine
    submit = engine.submit

    def watched(request, *args, **options):
        found.append(request.priority)
        return submit(request, *args, **options)

    engine.submit = watched
    try:
        yield found
    finally:
        engine.submit = submit


@pytest.mark.parametrize(
    ("tier", "header", "key", "priority", "expected"),
    [
        (None, None, "desk-key", 0, 0),
        (None, None, "desk-key", 5, 0),
        (None, None, "desk-key", -3, -3),
        (None, None, "agent-key", 0, -1),
        (None, "reactive", "agent-key", 0, 0),
        (None, "Proactive", "desk-key", 0, -1),
        ("auto", None, "desk-key", 0, 0),
        ("auto", None, "agent-key", -2, -2),
        ("default", "proactive", "agent-key", -4, 0),
        ("flex", "reactive", "desk-key", 0, -1),
        ("flex", None, "desk-key", 7, -1),
    ],
)
def test_the_first_that_says_the_class_decides(desk, tier, header, key, priority, expected):
    headers = {"Authorization": f"Bearer {key}", **({} if header is None else {"X-Staticllm-Class": header})}
    body = {**CHAT, "priority": priority, **({} if tier is None else {"service_tier": tier})}
    with priorities_of(desk) as found:
        answer = httpx.post(f"{desk.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert found == [expected]
    shown = None if tier is None else "flex" if expected < 0 else "default"
    assert answer.json().get("service_tier") == shown


@pytest.fixture(scope="module")
def desk():
    with serving(clients=CLIENTS) as served:
        yield served


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
def test_other_endpoints_tell_the_tier_too(desk, path):
    text = {"prompt": "Hello"} if path == "/v1/completions" else {"input": "Hello"}
    headers = {"Authorization": "Bearer desk-key"}
    with priorities_of(desk) as found:
        answer = httpx.post(
            desk.url + path, json={"model": "demo", **text, "service_tier": "flex"}, headers=headers, timeout=60
        )
    assert answer.json()["service_tier"] == "flex"
    assert found == [-1]


def test_openais_client_sends_and_reads_the_tier(desk):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{desk.url}/v1", api_key="desk-key") as client:
        messages = [{"role": "user", "content": "Hello"}]
        chunks = list(
            client.chat.completions.create(
                model="demo", messages=messages, max_tokens=4, service_tier="flex", stream=True
            )
        )
        assert {chunk.service_tier for chunk in chunks} == {"flex"}
        whole = client.chat.completions.create(model="demo", messages=messages, max_tokens=4, service_tier="default")
        assert whole.service_tier == "default"
        with pytest.raises(openai.BadRequestError, match="service_tier"):
            client.chat.completions.create(model="demo", messages=messages, service_tier="urgent")


def numbers_of(served):
    """Return the device seconds by class and by client, from the metrics and from the feed."""
    headers = {"Authorization": "Bearer desk-key"}
    lines = httpx.get(f"{served.url}/metrics", headers=headers).text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    found = {name: float(number) for name, _, number in pairs}
    feed = httpx.get(f"{served.url}/api/scheduler", headers=headers).json()
    return found, feed


def test_both_classes_and_the_clients_are_in_the_numbers(desk):
    before, _ = numbers_of(desk)
    headers = {"Authorization": "Bearer agent-key"}
    httpx.post(f"{desk.url}/v1/chat/completions", json={**CHAT, "max_tokens": 20}, headers=headers, timeout=60)
    after, feed = numbers_of(desk)
    proactive = 'staticllm_class_seconds_total{class="proactive",model="demo"}'
    reactive = 'staticllm_class_seconds_total{class="reactive",model="demo"}'
    client = 'staticllm_client_seconds_total{client="client agent"}'
    spent = after[proactive] - before[proactive]
    assert spent > 0
    assert after[reactive] == before[reactive]
    assert after[client] - before[client] == pytest.approx(spent, rel=0.01), "the client pays for its calls"
    assert feed["totals"]["proactive_seconds"] == pytest.approx(after[proactive], abs=1e-5)
    assert {each["name"]: each["share"] for each in feed["clients"]} == {
        "client desk": 1.0,
        "client agent": 0.5,
        "others": 1.0,
    }


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"service_tier": "urgent"}, {}, "Invalid service_tier: Input should be 'auto', 'default' or 'flex'"),
        ({"service_tier": 3}, {}, "Invalid service_tier: Input should be 'auto', 'default' or 'flex'"),
        ({}, {"X-Staticllm-Class": "x" * 999}, "the header X-Staticllm-Class is 'xxx"),
    ],
)
def test_an_unknown_class_is_refused_in_one_line(desk, body, headers, expected):
    answer = httpx.post(
        f"{desk.url}/v1/chat/completions",
        json={**CHAT, **body},
        headers={"Authorization": "Bearer desk-key", **headers},
    )
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert message.startswith(expected)
    assert "\n" not in message
    assert len(message) < 400


def test_proactive_answers_take_no_places_of_reactive_ones():
    """Many long proactive answers run and wait; a reactive one enters at once, and is answered."""
    with serving(properties={"MAX_NUM_SEQS": 2}) as served:
        url = f"{served.url}/v1/chat/completions"
        model = served.state.hub.models["demo"]
        stop = threading.Event()
        body = {**CHAT, "max_tokens": 60, "service_tier": "flex", "ignore_eos": True}

        def flood():
            while not stop.is_set():
                httpx.post(url, json=body, timeout=120)

        threads = [threading.Thread(target=flood) for _ in range(6)]
        for thread in threads:
            thread.start()
        try:
            answer = httpx.post(url, json={**CHAT, "max_tokens": 20, "ignore_eos": True}, timeout=120)
            assert answer.json()["usage"]["completion_tokens"] == 20
            assert model.admission_of(True).num_waiting > 0
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert (model.admission_of(True).num_running, model.admission.num_running) == (0, 0)


def test_a_model_has_a_class_of_its_own():
    specs, common = by_model([demo_spec()], ["demo"], {"demo:WORK_CLASS": "proactive", "TPOT_MS": 50})
    assert (specs[0].work_class, specs[0].properties, common) == ("proactive", {}, {"TPOT_MS": 50})
    specs, common = by_model(
        [replace(demo_spec(), properties={"WORK_CLASS": "reactive"})], ["demo"], {"WORK_CLASS": "proactive"}
    )
    assert (specs[0].work_class, common) == ("reactive", {})
    with pytest.raises(ConfigError, match=r"^WORK_CLASS='fast': must be reactive or proactive$"):
        by_model([demo_spec()], ["demo"], {"WORK_CLASS": "fast"})
    with serving([replace(demo_spec(), work_class="proactive")]) as served, priorities_of(served) as found:
        httpx.post(f"{served.url}/v1/chat/completions", json=CHAT, timeout=60)
        httpx.post(f"{served.url}/v1/chat/completions", json={**CHAT, "service_tier": "default"}, timeout=60)
        httpx.post(
            f"{served.url}/api/chat", json={"model": "demo", "messages": CHAT["messages"], "stream": False}, timeout=60
        )
    assert found == [-1, 0, -1]


def test_clients_are_read_from_the_config_file(tmp_path):
    file = tmp_path / "desk.toml"
    file.write_text(
        '[[clients]]\nname = "agent"\nkey = "secret"\nwork_class = "proactive"\nshare = 0.5\n'
        '[[clients]]\nname = "desk"\nkey = "other"\n'
    )
    found = tuple(entry.client() for entry in read_config_file(str(file)).clients)
    assert found == (ApiClient("agent", "secret", "proactive", 0.5), ApiClient("desk", "other"))
    settings = ServerSettings(api_keys=("first",), clients=found)
    assert settings.keys == ("first", "secret", "other")
    assert settings.client_of("client desk") == found[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[clients]]\nname = "a"\nkey = "k"\nshares = 2\n',
            "unknown key clients\\[0\\].'shares': did you mean 'share'",
        ),
        ('[[clients]]\nname = "a"\nkey = "k"\nshare = 0\n', "share"),
        ('[[clients]]\nname = "a"\nkey = "k"\nshare = inf\n', "share"),
        ('[[clients]]\nname = "a"\nkey = "k"\nwork_class = "fast"\n', "work_class"),
        ('[[clients]]\nname = "a"\n', "key"),
    ],
)
def test_a_bad_client_is_refused(tmp_path, text, message):
    file = tmp_path / "desk.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config_file(str(file))
    assert "\n" not in str(caught.value)


def test_two_clients_may_not_share_a_name_or_a_key():
    for clients in ((ApiClient("a", "x"), ApiClient("a", "y")), (ApiClient("a", "x"), ApiClient("b", "x"))):
        with pytest.raises(ConfigError, match=r"two clients have the same (name|key)"):
            ServerSettings(clients=clients).check()
    with pytest.raises(ConfigError, match="the same key"):
        ServerSettings(api_keys=("x",), clients=(ApiClient("a", "x"),)).check()


def test_two_headers_must_agree(desk):
    for values, expected in ((("proactive", "Proactive"), 200), (("proactive", "reactive"), 400)):
        headers = [("Authorization", "Bearer desk-key"), *(("X-Staticllm-Class", value) for value in values)]
        answer = httpx.post(f"{desk.url}/v1/chat/completions", json=CHAT, headers=headers, timeout=60)
        assert answer.status_code == expected, answer.text
    assert "is 'proactive, reactive': must be reactive or proactive" in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", [" ", "a\nb", "\x00", "a\u202eb"])
def test_a_clients_name_can_be_shown(name):
    with pytest.raises(ConfigError, match="blank or has control characters"):
        ServerSettings(clients=(ApiClient(name, "key"),)).check()
