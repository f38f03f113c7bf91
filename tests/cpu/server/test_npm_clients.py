"""Tests the clients of npm, ``openai`` and ``ollama``, unchanged, with the node of this machine.

They are searched for in the folder that ``STATICLLM_NODE_MODULES`` names (``npm install openai ollama`` there), or in
``node_modules`` of this checkout; without node or without a package the tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.encoders.encoder_directories import a_directory
from support.models.echo_model import CALL, asking, load_echo
from support.server.served import serving

from staticllm.server.models.served import demo_spec, model_spec

NODE = shutil.which("node")
QUESTION = "What is an NPU?"
SECONDS = 120


@pytest.fixture(scope="module")
def modules(root):
    if NODE is None:
        pytest.skip("node is not installed")
    return Path(os.environ.get("STATICLLM_NODE_MODULES", root / "node_modules"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    specs = [demo_spec(), model_spec(f"tiny={a_directory(tmp_path_factory.mktemp('embedder'))}")]
    with serving(specs) as served:
        yield served


@pytest.fixture(scope="module")
def echo():
    with serving(pipelines={"demo": load_echo}) as served:
        yield served


@pytest.fixture(scope="module")
def answer(served):
    return served.pipeline().generate([{"role": "user", "content": QUESTION}], max_new_tokens=60).texts[0]


@pytest.fixture
def run(modules, tmp_path):
    """Return a function that runs a script of node with a client, and returns the JSON that it prints."""

    def run(package, url, script):
        if not (modules / package).is_dir():
            pytest.skip(f"the npm package {package} is not in {modules.name}: npm install {package}")
        link = tmp_path / "node_modules"
        if not link.exists():
            link.symlink_to(modules, target_is_directory=True)
        (tmp_path / "run.mjs").write_text(script, encoding="utf-8")
        found = subprocess.run(
            [NODE, "run.mjs", url], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert found.returncode == 0, found.stderr
        return json.loads(found.stdout)

    return run


OPENAI = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const messages = [{ role: "user", content: "What is an NPU?" }];
const whole = await client.chat.completions.create({ model: "demo", messages, max_tokens: 60 });
let streamed = "", usage = null;
const stream = await client.chat.completions.create(
  { model: "demo", messages, max_tokens: 60, stream: true, stream_options: { include_usage: true } });
for await (const chunk of stream) { streamed += chunk.choices[0]?.delta?.content ?? ""; usage = chunk.usage ?? usage; }
const response = await client.responses.create({ model: "demo", input: "What is an NPU?", max_output_tokens: 60 });
const again = await client.responses.create(
  { model: "demo", input: "And then?", previous_response_id: response.id, max_output_tokens: 5 });
let events = [], text = "";
for await (const event of await client.responses.create(
  { model: "demo", input: "What is an NPU?", max_output_tokens: 60, stream: true })) {
  events.push(event.type);
  if (event.type === "response.output_text.delta") text += event.delta;
}
const vectors = await client.embeddings.create({ model: "tiny", input: ["one", "two"] });
const models = [];
for await (const model of client.models.list()) models.push(model.id);
let error = null;
try { await client.chat.completions.create({ model: "nobody", messages }); }
catch (e) { error = { status: e.status, code: e.code }; }
console.log(JSON.stringify({ whole: whole.choices[0].message.content, streamed, usage, response: response.output_text,
  cached: again.usage.input_tokens_details.cached_tokens, events, text, models, error,
  width: vectors.data[1].embedding.length }));
"""


def test_openais_client_chats_streams_and_embeds(run, served, answer):
    found = run("openai", served.url, OPENAI)
    assert found["whole"] == found["streamed"] == found["response"] == found["text"] == answer
    assert found["usage"]["completion_tokens"] > 10
    assert found["cached"] > 8
    assert (found["events"][0], found["events"][-1]) == ("response.created", "response.completed")
    assert found["models"] == ["demo", "tiny"]
    assert found["width"] > 4
    assert found["error"] == {"status": 404, "code": "model_not_found"}


ABORT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "any", maxRetries: 0 });
const stream = await client.completions.create(
  { model: "demo", prompt: "The fox", max_tokens: 1000, stream: true, ignore_eos: true });
for await (const chunk of stream) break;
console.log("true");
"""


def test_openais_client_cancels_by_leaving(run, served):
    assert run("openai", served.url, ABORT) is True
    served.wait_until_idle()


OLLAMA = """
import { Ollama } from "ollama";
const client = new Ollama({ host: process.argv[2] });
const messages = [{ role: "user", content: "What is an NPU?" }], options = { num_predict: 60 };
const whole = await client.chat({ model: "demo", messages, options });
let streamed = "", last = null;
for await (const part of await client.chat({ model: "demo", messages, options, stream: true })) {
  streamed += part.message.content; last = part;
}
const generated = await client.generate({ model: "demo", prompt: "What is an NPU?", options });
const embedded = await client.embed({ model: "tiny", input: ["one", "two"] });
const { models } = await client.list();
const shown = await client.show({ model: "demo" });
const running = await client.ps();
let error = null;
try { await client.pull({ model: "llama3" }); } catch (e) { error = e.message; }
console.log(JSON.stringify({ whole: whole.message.content, streamed, reason: last.done_reason,
  generated: generated.response, width: embedded.embeddings[1].length, models: models.map((m) => m.name),
  capabilities: shown.capabilities, running: running.models.map((m) => m.name), error }));
"""


def test_ollamas_client_chats_streams_and_embeds(run, served, answer):
    found = run("ollama", served.url, OLLAMA)
    assert found["whole"] == found["streamed"] == found["generated"] == answer
    assert found["reason"] == "stop"
    assert found["width"] > 4
    assert found["models"] == ["demo:latest", "tiny:latest"]
    assert "demo:latest" in found["running"]
    assert found["capabilities"] == ["completion"]
    assert "not supported" in found["error"]


TOOLS = """
import { Ollama } from "ollama";
const client = new Ollama({ host: process.argv[2] });
const tools = [{ type: "function", function: { name: "weather", description: "",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const found = await client.chat({ model: "demo", messages: MESSAGES, tools, think: false });
console.log(JSON.stringify(found.message.tool_calls[0].function));
"""


def test_ollamas_client_calls_functions(run, echo):
    found = run("ollama", echo.url, TOOLS.replace("MESSAGES", json.dumps(asking(CALL))))
    assert found["name"] == "weather"
    assert found["arguments"] == {"city": "Rome", "days": 2}
