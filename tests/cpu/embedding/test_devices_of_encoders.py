"""Encoders take OpenVINO's names of devices and properties of one device, as their pipelines in GenAI do."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoders.encoder_directories import a_directory

from staticllm import StaticEmbeddingPipeline
from staticllm.errors import ConfigError, DeviceError

pytestmark = pytest.mark.usefixtures("shared_lowering")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return a_directory(tmp_path_factory.mktemp("encoder"))


def vector(directory, device="CPU", **properties):
    with StaticEmbeddingPipeline(directory, device, **properties) as pipe:
        return np.array(pipe.embed_query("a text"))


@pytest.mark.parametrize("device", ["HETERO:CPU", "AUTO", "auto:cpu", "BATCH:CPU(4)", "MULTI:CPU", "HETERO:GPU,CPU"])
def test_devices_that_stand_for_others(directory, device):
    assert np.allclose(vector(directory, device), vector(directory), atol=1e-5)


def test_properties_of_one_device(directory):
    exact = vector(directory, INFERENCE_PRECISION_HINT="f32")
    for given in ({"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}, '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'):
        assert np.allclose(vector(directory, DEVICE_PROPERTIES=given), exact, atol=1e-5)
    assert vector(directory, DEVICE_PROPERTIES={"GPU": {"NO_SUCH": 1}}).size
    for given, words in (
        ({"CPU": {"NO_SUCH": 1}}, "unknown property 'NO_SUCH'"),
        ({"CPU": 5}, "must be a dict of one dict"),
        ({"TPU": {}}, "there is no such device here"),
    ):
        with pytest.raises(ConfigError, match=words):
            vector(directory, DEVICE_PROPERTIES=given)
    with pytest.raises(DeviceError, match="name the devices"):
        vector(directory, "HETERO")
