"""Which dependencies have upper bounds: those of users only with a reason in pyproject.toml."""

from __future__ import annotations

import re
import tomllib

WITH_A_REASON = {"openvino", "openvino-genai", "openvino-tokenizers", "uvicorn", "httpx"}
OF_AN_ENVIRONMENT_OF_THEIR_OWN = {"export", "train"}
OF_DEVELOPERS = {
    "clients",
    "newer-clients",
    "test",
    "check",
    "docs",
    "release",
    "browser",
    "plot",
    "embed-test",
    "speech-test",
    "frozen",
}


def project(root):
    return tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]


def test_an_upper_bound_of_what_users_install_has_a_reason(root):
    extras = project(root)["optional-dependencies"]
    of_users = extras.keys() - OF_DEVELOPERS - OF_AN_ENVIRONMENT_OF_THEIR_OWN
    found = [*project(root)["dependencies"], *(entry for extra in sorted(of_users) for entry in extras[extra])]
    bounded = {re.match(r"[\w-]+", entry)[0] for entry in found if re.search(r"<|==|~=", entry.partition(";")[0])}
    assert bounded == WITH_A_REASON


def test_every_dependency_has_a_lower_bound(root):
    extras = project(root)["optional-dependencies"]
    for entry in [*project(root)["dependencies"], *(entry for extra in extras.values() for entry in extra)]:
        assert ">=" in entry or entry.startswith("staticllm["), entry


def test_the_tests_run_with_the_bounds_of_the_server(root):
    """Bounds that are written twice would differ one day."""
    extras = project(root)["optional-dependencies"]
    written = {re.match(r"[\w-]+", entry)[0] for entry in extras["test"]}
    assert "staticllm[server,hub]" in extras["test"]
    assert not written & {re.match(r"[\w-]+", entry)[0] for name in ("server", "hub") for entry in extras[name]}
