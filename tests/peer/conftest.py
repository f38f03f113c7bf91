"""What several tests of real models need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def minilm():
    """The folder of all-MiniLM-L6-v2 as it was published."""
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
    from real_models import MODELS, folder

    path = folder() / MODELS["minilm"].file
    if not path.is_dir():
        pytest.skip(f"no {path}: python scripts/real_models.py minilm")
    return path


@pytest.fixture(scope="session")
def exported_minilm(minilm, tmp_path_factory):
    """Its model directory in f32, made once by the environment that STATICLLM_EXPORT_PYTHON names."""
    from staticllm.export.exporter import ExportRequest, export

    target = tmp_path_factory.mktemp("exported") / "minilm"
    export(ExportRequest(str(minilm), target, weights="f32"), Path(os.environ["STATICLLM_EXPORT_PYTHON"]))
    return target
