"""Tests completions, embeddings, reranking, token ids and metrics against the pipelines themselves."""

from __future__ import annotations

import base64
import re

import httpx
import numpy as np
import pytest
from support.encoders.encoder_directories import TEXTS, a_directory, a_scorer
from support.server.served import serving

from staticllm.pipelines.encoder_pipeline import QUERY_PRIORITY
from staticllm.server.models.served import demo_spec, model_spec
from tests.support.inside import driver_of

openai = pytest.importorskip("openai")

PROMPT = "The fox went to the river and"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "embedder").mkdir()
    specs = [
        demo_spec(),
        model_spec(f"tiny={a_directory(folder / 'embedder')}"),
        model_spec(str(a_scorer(folder / "scorer"))),
    ]
    assert [(spec.name, spec.kind) for spec in specs] == [("demo", "chat"), ("tiny", "embedding"), ("scorer", "rerank")]
    with serving(specs) as served:
        yield served


def test_a_text_is_continued(served, client):
    direct = served.pipeline().generate(PROMPT, max_new_tokens=20, apply_chat_template=False)
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=20)
    assert found.choices[0].text == str(direct)
    assert found.usage.completion_tokens == len(direct.tokens[0])
    ids = httpx.post(served.url + "/tokenize", json={"prompt": PROMPT}, timeout=60).json()["tokens"]
    assert client.completions.create(model="demo", prompt=ids, max_tokens=20).choices[0].text == str(direct)
    stream = client.completions.create(model="demo", prompt=ids, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == str(direct)


def test_several_prompts_have_several_answers_each(served, client):
    prompts = [PROMPT, "Once upon a time"]
    options = {"model": "demo", "prompt": prompts, "max_tokens": 12, "n": 2, "temperature": 1.2, "seed": 4}
    found = client.completions.create(**options)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    for place, prompt in enumerate(prompts):
        for index in range(2):
            direct = served.pipeline().generate(
                prompt,
                max_new_tokens=12,
                apply_chat_template=False,
                do_sample=True,
                temperature=1.2,
                rng_seed=4 + index,
            )
            assert found.choices[2 * place + index].text == str(direct)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in found.choices]


def test_a_priority_goes_before_no_other_client(served, monkeypatch):
    """In the engine are all clients: a request may only go behind them."""
    pipeline, priorities = served.pipeline(), []
    submit = pipeline.submit

    def noting(*given, **options):
        priorities.append(options["priority"])
        return submit(*given, **options)

    monkeypatch.setattr(pipeline, "submit", noting)
    for priority in (1000, 0, -3):
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 1, "priority": priority}
        assert httpx.post(served.url + "/v1/completions", json=body, timeout=60).status_code == 200
    assert priorities == [0, 0, -3]


def test_a_prompt_is_echoed(client):
    plain = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8).choices[0].text
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, echo=True).choices[0].text
    assert found.endswith(PROMPT + plain)
    stream = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == found
    alone = client.completions.create(model="demo", prompt=PROMPT, max_tokens=0, echo=True).choices[0]
    assert alone.text + plain == found
    assert alone.finish_reason == "length"


def test_logprobs_of_completions(client):
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, logprobs=0, temperature=0).choices[0]
    assert len(found.logprobs.tokens) == len(found.logprobs.token_logprobs) == 8
    assert all(value <= 0 for value in found.logprobs.token_logprobs)
    several = client.completions.create(model="demo", prompt=PROMPT, max_tokens=8, logprobs=2, temperature=0).choices[0]
    assert [len(top) for top in several.logprobs.top_logprobs] == [2] * 8


@pytest.mark.parametrize("change", [{"best_of": 3}, {"echo": True, "logprobs": 0}, {"max_tokens": 0}])
def test_completions_refuse_what_is_not_there(client, change):
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="demo", prompt=PROMPT, **change)
    assert error.value.param in change


def test_embeddings_are_those_of_the_pipeline(served, client):
    found = client.embeddings.create(model="tiny", input=TEXTS)
    direct = served.pipeline("tiny").encode(TEXTS)
    assert np.allclose([entry.embedding for entry in found.data], direct, atol=1e-5)  # the client asks for base64
    plain = httpx.post(served.url + "/v1/embeddings", json={"model": "tiny", "input": TEXTS}, timeout=60).json()
    assert np.allclose([entry["embedding"] for entry in plain["data"]], direct, atol=1e-5)
    assert plain["usage"]["prompt_tokens"] == found.usage.prompt_tokens > len(TEXTS)
    coded = httpx.post(served.url + "/embeddings", json={"input": "a", "encoding_format": "base64"}, timeout=60).json()[
        "data"
    ][0]
    assert np.allclose(np.frombuffer(base64.b64decode(coded["embedding"]), "<f4"), direct[0], atol=1e-5)


def test_queries_go_before_documents(served, monkeypatch):
    httpx.post(
        served.url + "/v1/embeddings", json={"model": "tiny", "input": "a"}, timeout=60
    )  # the model is loaded now
    queue, priorities = driver_of(served.pipeline("tiny")), []
    submit = queue.submit
    monkeypatch.setattr(queue, "submit", lambda request: (priorities.append(request.priority), submit(request))[1])
    for kind in ("query", "document", None):
        body = {"model": "tiny", "input": ["a fox"], "input_type": kind}
        assert httpx.post(served.url + "/v1/embeddings", json=body, timeout=60).status_code == 200
    assert priorities == [QUERY_PRIORITY, 0, 0]


def test_embeddings_are_cut(served, client):
    found = client.embeddings.create(model="tiny", input="What is an NPU?", dimensions=8, encoding_format="float")
    direct = served.pipeline("tiny").encode(["What is an NPU?"], dimensions=8)
    assert np.allclose(found.data[0].embedding, direct[0], atol=1e-5)
    assert len(found.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(model="tiny", input="a", dimensions=100_000)
    with pytest.raises(openai.BadRequestError, match="token ids"):
        client.embeddings.create(model="tiny", input=[1, 2, 3])


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ranked(served, path):
    body = {
        "model": "scorer",
        "query": "fox",
        "documents": [*TEXTS[:3], {"text": TEXTS[3]}],
        "top_n": 3,
        "return_documents": True,
    }
    found = httpx.post(served.url + path, json=body, timeout=60).json()
    scores = served.pipeline("scorer").scores("fox", TEXTS[:4])
    order = np.argsort(-scores, kind="stable")[:3]
    assert [entry["index"] for entry in found["results"]] == order.tolist()
    assert np.allclose([entry["relevance_score"] for entry in found["results"]], scores[order], atol=1e-5)
    assert [entry["document"]["text"] for entry in found["results"]] == [TEXTS[index] for index in order]
    metrics = httpx.get(served.url + "/metrics", timeout=60).text
    assert value_of(metrics, f'staticllm_http_requests_total{{path="{path}",status="200"}}') >= 1


def value_of(text, name):
    found = re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[0]) if found else 0.0


def test_metrics_count_what_was_served(served, client):
    def read():
        response = httpx.get(served.url + "/metrics", timeout=60)
        assert response.headers["content-type"].startswith("text/plain")
        return response.text

    before = read()
    found = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Tell me about rain."}], max_tokens=9
    )
    httpx.post(served.url + "/v1/chat/completions", json={"model": "demo", "messages": [], "nothing": 1}, timeout=60)
    after = read()

    def change(name):
        return value_of(after, name) - value_of(before, name)

    assert change('staticllm_prompt_tokens_total{model="demo"}') == found.usage.prompt_tokens
    assert change('staticllm_output_tokens_total{model="demo"}') == 9
    assert change('staticllm_time_to_first_token_seconds_count{model="demo"}') == 1
    assert change('staticllm_inter_token_seconds_count{model="demo"}') == 8
    assert change('staticllm_http_requests_total{path="/v1/chat/completions",status="200"}') == 1
    assert change('staticllm_rejected_requests_total{knob="",reason="invalid_value"}') == 1
    assert change('staticllm_device_seconds_total{model="demo",phase="decode"}') > 0
    assert value_of(after, 'staticllm_running_requests{model="demo"}') == 0
    assert value_of(after, 'staticllm_kv_slots_in_use{model="demo"}') > 0
