"""Leaves the server's tests out where a package of its extra is missing."""

from __future__ import annotations

from importlib.util import find_spec

PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client", "httpx")
collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]
