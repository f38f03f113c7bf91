"""LangChain's ``Embeddings`` over a ``StaticEmbeddingPipeline`` (``pip install ".[adapters]"``)."""

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import InMemoryVectorStore

from staticllm import StaticEmbeddingPipeline


class StaticEmbeddings(Embeddings):
    def __init__(self, pipe):
        self.pipe = pipe

    def embed_documents(self, texts):
        return self.pipe.embed_documents(texts)

    def embed_query(self, text):
        return self.pipe.embed_query(text)


with StaticEmbeddingPipeline("my_encoder", "CPU") as pipe:
    store = InMemoryVectorStore(StaticEmbeddings(pipe))
    store.add_texts(["An NPU is a neural processing unit.", "Rain is water that falls from clouds."])
    print(store.similarity_search("Rain is water that falls from clouds.", k=1)[0].page_content)
