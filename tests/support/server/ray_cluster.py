"""Runs a cluster of several nodes of Ray on this machine, with the application on it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import httpx

import staticllm

NAME = "staticllm"
STORE = 80 << 20
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
"""Other settings round differently in other calls, so that another machine may give another answer."""


class RayCluster:
    """A head node with the proxy and the ingress, and nodes for one replica each."""

    def __init__(self, num_nodes, port):
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        self.url = f"http://127.0.0.1:{port}"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE})
        self.nodes = [self.add_node() for _ in range(num_nodes)]
        paths = {"PYTHONPATH": str(Path(staticllm.__file__).parent.parent)}
        ray.init(address=self._cluster.address, log_to_driver=False, runtime_env={"env_vars": paths})
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def add_node(self):
        return self._cluster.add_node(num_cpus=1, object_store_memory=STORE)

    def kill(self, node):
        """Kill all processes of a node at once."""
        self._cluster.remove_node(node, allow_graceful=False)

    def run(self, **settings):
        from ray import serve

        from staticllm.server.ray_app import ClusterSettings, app

        settings.setdefault("properties", EXACT)
        serve.run(app(ClusterSettings(**settings)), name=NAME)

    def status(self, group="chat"):
        """Return what Ray Serve tells of a deployment."""
        from ray import serve

        return serve.status().applications[NAME].deployments[group]

    def num_replicas(self, group="chat"):
        return self.status(group).replica_states.get("RUNNING", 0)

    def wait_for(self, num_replicas, group="chat", seconds=90):
        import ray

        until = time.monotonic() + seconds
        while self.num_replicas(group) != num_replicas:
            assert time.monotonic() < until, (self.status(group), ray.available_resources(), ray.nodes())
            time.sleep(0.2)

    def close(self):
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def chat(self, text, max_tokens=24, **fields):
        """Return the answer to a message, without a stream, as the API has it."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, **fields}
        answer = httpx.post(self.url + "/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, text, max_tokens=24, on_chunk=lambda: None, **fields):
        """Return the chunks of a streamed answer."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "stream": True, **fields}
        chunks = []
        with httpx.stream("POST", self.url + "/v1/chat/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return chunks
                if line.startswith("data: "):
                    chunks.append(json.loads(line[6:]))
                    on_chunk()
        raise AssertionError(f"the stream ended without its mark: {chunks[-1:]}")


def text_of(chunks):
    """Return the text of a streamed answer, which must have ended well."""
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 1
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
