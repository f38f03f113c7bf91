"""Tests that a new kind of model is served by what its registration names: its endpoint, its options, its row in lists."""

from dataclasses import dataclass, replace

import httpx
import numpy as np
import pytest
from pydantic import BaseModel
from support.models.sound_kind import BANDS, WEIGHTS, SoundKind, written
from support.server.served import serving

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError
from staticllm.kinds import KINDS, KnownKind, register
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.loading.load import load_job
from staticllm.server.http.errors import json_response
from staticllm.server.models.kinds import ServedKind
from staticllm.server.models.model_options import check_options
from staticllm.server.models.served import model_spec
from staticllm.server.openai.encoders import on_model
from staticllm.server.settings import ServerSettings


class SoundBody(BaseModel):
    model: str
    frames: list[list[float]]


async def sounds(call, body):
    model = call.state.hub.find(body.model, "sound")

    async def run():
        features = model.pipeline.runner.run(np.array(body.frames, np.float32))
        return json_response({"features": features.tolist()})

    return await on_model(call, model, run)


@dataclass
class SoundPipeline:
    runner: object
    is_closed: bool = False

    def close(self):
        self.is_closed = True


class SoundServed(ServedKind):
    needs_tokenizer = False

    def fits(self, model, directory):
        return SoundKind.fits(model, directory)

    def load(self, wanted):
        job = LoadJob(SoundKind(), wanted.path, "CPU", StaticLLMConfig(), wanted.on_progress)
        return SoundPipeline(load_job(job).runner)

    def option_names(self, device):
        return frozenset(["INFERENCE_PRECISION_HINT"])

    def check_options(self, device, properties):
        for name in properties.keys() - self.option_names(device):
            raise ConfigError(f"unknown option {name!r}: leave it out")

    def posts(self):
        return (("/v1/sounds", SoundBody, sounds),)

    def described(self, pipeline):
        return {"bands": BANDS}


@pytest.fixture
def folder(tmp_path):
    register(
        KnownKind(
            SoundKind.name,
            "SoundPipeline",
            SoundKind,
            served=(SoundServed("sound", "a model of sounds", capability="hearing"),),
        )
    )
    yield written(tmp_path / "model", "openvino_model.xml")
    del KINDS[SoundKind.name]


def test_a_third_kind_is_served(folder):
    frames = np.random.default_rng(3).standard_normal((BANDS, 10), np.float32)
    spec = model_spec(f"ear={folder}")
    assert spec.kind == "sound"
    with serving([spec], memory_limit=1 << 30) as served:
        asked = {"model": "ear", "frames": frames.tolist()}
        answer = httpx.post(f"{served.url}/v1/sounds", json=asked).json()
        np.testing.assert_allclose(answer["features"], np.tanh(WEIGHTS @ frames).sum(axis=1), atol=1e-4)
        assert httpx.post(f"{served.url}/v1/sounds", json={"model": "ear"}).status_code == 400
        (listed,) = httpx.get(f"{served.url}/v1/models").json()["data"]
        assert (listed["type"], listed["status"], listed["bands"]) == ("sound", "loaded", BANDS)
        shown = httpx.post(f"{served.url}/api/show", json={"model": "ear"}).json()
        assert shown["capabilities"] == ["hearing"]
        assert httpx.get(f"{served.url}/api/v0/models").json()["data"] == []
        wrong = httpx.post(f"{served.url}/v1/embeddings", json={"model": "ear", "input": "a"}).json()["error"]
        assert wrong["message"] == "The model 'ear' is a model of sounds, this endpoint needs an embedding model"
        assert "/v1/sounds" in httpx.get(f"{served.url}/openapi.json").json()["paths"]


def test_options_of_a_third_kind_are_its_own(folder):
    spec = model_spec(f"ear={folder}")
    check_options([replace(spec, properties={"INFERENCE_PRECISION_HINT": "f32"})], ServerSettings())
    with pytest.raises(ConfigError, match="the model 'ear': unknown option 'MAX_SEQS'"):
        check_options([replace(spec, properties={"MAX_SEQS": 1})], ServerSettings())
