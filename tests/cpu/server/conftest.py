"""Fixtures of the server's tests, each file of which is skipped where a package of its extra is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "httpx")
MISSING = [name for name in PACKAGES if find_spec(name) is None]


class SkippedFile(pytest.Module):
    """A file whose imports would fail."""

    def collect(self):
        pytest.skip(f"not installed: {', '.join(MISSING)}", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedFile.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="module")
def served():
    """A server of the embedded model."""
    from support.server.served import serving

    with serving() as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    """OpenAI's client of the server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright
    from support.server.browsers import launched

    with sync_playwright() as playwright:
        browser = launched(playwright)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, served, model):
    """A tab with the page of a server whose model is a ``ScriptedModel``."""
    from support.server.browsers import tab_of

    model.pause = 0.0
    model.prompts.clear()
    with tab_of(browser, served.url) as tab:
        yield tab.open()
    served.wait_until_idle()
