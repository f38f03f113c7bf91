"""LlamaIndex's ``BaseEmbedding`` over a ``StaticEmbeddingPipeline`` (``pip install ".[adapters]"``)."""

import asyncio

from llama_index.core import VectorStoreIndex
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.schema import TextNode

from staticllm import StaticEmbeddingPipeline


class StaticEmbedding(BaseEmbedding):
    _pipe: StaticEmbeddingPipeline = PrivateAttr()

    def __init__(self, pipe, **options):
        super().__init__(embed_batch_size=2048, **options)
        self._pipe = pipe

    def _get_text_embedding(self, text):
        return self._pipe.embed_documents([text])[0]

    def _get_text_embeddings(self, texts):
        return self._pipe.embed_documents(texts)

    def _get_query_embedding(self, query):
        return self._pipe.embed_query(query)

    async def _aget_query_embedding(self, query):
        return await asyncio.to_thread(self._pipe.embed_query, query)


with StaticEmbeddingPipeline("my_encoder", "CPU") as pipe:
    texts = ["An NPU is a neural processing unit.", "Rain is water that falls from clouds."]
    index = VectorStoreIndex([TextNode(text=text) for text in texts], embed_model=StaticEmbedding(pipe))
    found = index.as_retriever(similarity_top_k=1).retrieve("Rain is water that falls from clouds.")
    print(found[0].node.get_content())
