"""Tests what `staticllm doctor` looks at."""

from __future__ import annotations

import re
from importlib.metadata import requires

from staticllm.pipelines.diagnostics.doctor import PACKAGES


def test_every_package_that_must_be_there_is_examined():
    needed = [each for each in requires("staticllm") if "extra ==" not in each]
    assert {re.match(r"[\w-]+", each)[0] for each in needed} == set(PACKAGES)
