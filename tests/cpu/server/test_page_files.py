"""Tests how the files of the page are served: their headers, with and without a key, and that no other file is."""

from __future__ import annotations

import html.parser
import re

import httpx
import pytest
from support.server.served import serving

from staticllm.server.models.served import demo_spec
from staticllm.server.page_files import ASSETS
from staticllm.testing import fake_pipeline

FORBIDDEN = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|url\(|@import")


def fake(device, properties, on_progress):
    return fake_pipeline("yes", MEASURE_COSTS=False)


@pytest.fixture(scope="module")
def client():
    with serving(pipelines={"demo": fake}) as served, httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


@pytest.mark.parametrize("path", ASSETS)
def test_every_file_has_the_headers_that_confine_it(client, path):
    answer = client.get(path)
    assert answer.status_code == 200
    assert len(answer.text) > 500
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["referrer-policy"] == "no-referrer"
    kind = {"html": "text/html", "css": "text/css", "js": "text/javascript"}[ASSETS[path].rpartition(".")[2]]
    assert answer.headers["content-type"] == f"{kind}; charset=utf-8"


def test_a_file_that_has_not_changed_is_not_sent_again(client):
    first = client.get("/page/page.js")
    again = client.get("/page/page.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.head("/").status_code == 200
    assert client.head("/").content == b""


def test_the_page_needs_nothing_from_elsewhere_and_has_no_inline_script_or_style(client):
    found = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag, attributes):
            found.append((tag, dict(attributes)))

    Reader().feed(client.get("/").text)
    links = [values[name] for _, values in found for name in ("src", "href") if name in values]
    assert all(link.startswith(("page/", "#", "data:image/svg+xml,")) for link in links), links
    assert all("src" in values for tag, values in found if tag == "script")
    assert not [
        tag for tag, values in found if tag == "style" or any(name == "style" or name[:2] == "on" for name in values)
    ]
    for path, name in ASSETS.items():
        if name.endswith((".js", ".css")):
            text = client.get(path).text
            assert not FORBIDDEN.search(text), path
            addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
            assert addresses <= {"http://www.w3.org/2000/svg"} or name == "markdown-it.js", path
            for module in re.findall(r"from \"\./([^\"]+)\"", text):
                assert f"/page/{module}" in ASSETS


@pytest.mark.parametrize(
    "path",
    [
        "/page/../settings.py", "/page/%2e%2e/settings.py", "/page/..%2fsettings.py", "/page/..%5csettings.py", "/page/", "/page",
        "/page/page.js/../assets.py", "/page/assets.py", "/page/__init__.py", "/page//etc/passwd", "/page/%00",
        "/..//..//etc/passwd", "/page/page.js%00.css", "/page/PAGE.JS", "/index.html", "/v1/page/page.js/x",
    ],
)  # fmt: skip
def test_paths_that_leave_the_folder_are_not_found(client, path):
    answer = client.send(httpx.Request("GET", httpx.URL(str(client.base_url), raw_path=path.encode())))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_with_a_key_the_page_is_open_and_its_data_is_not():
    with (
        serving(pipelines={"demo": fake}, api_keys=("sesame",)) as served,
        httpx.Client(base_url=served.url, timeout=60) as client,
    ):
        for path in ASSETS:
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/api/scheduler", "/metrics", "/page/x"):
            assert client.get(path).status_code == 401, path
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401, path
        assert client.get("/api/scheduler", headers={"Authorization": "Bearer sesame"}).status_code == 200


def test_pages_of_others_can_neither_read_the_page_nor_the_scheduler(client):
    for path in ("/", "/api/scheduler"):
        assert client.get(path, headers={"Origin": "https://example.org"}).status_code == 403
        assert client.get(path, headers={"Host": "example.org"}).status_code == 403


def test_the_page_is_there_while_nothing_is_loaded():
    with serving([demo_spec()], is_lazy=True) as served:
        assert httpx.get(served.url, timeout=60).status_code == 200
        assert httpx.get(served.url + "/api/scheduler", timeout=60).json()["models"][0]["status"] == "unloaded"
        assert served.pipeline() is None
