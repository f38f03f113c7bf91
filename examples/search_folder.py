"""Answer a query from a folder of text files: python search_folder.py MODEL_DIR FOLDER QUERY. Needs staticllm[examples].

FAISS is the vector store, because it is one library in the process and needs only NumPy.
"""

import sys
from pathlib import Path

import faiss
import numpy as np

from staticllm import StaticEmbeddingPipeline, StaticLLMError

MAX_RESULTS = 3


def paragraphs(folder: Path) -> list[tuple[str, str]]:
    """Return the paragraphs of all .txt and .md files below the folder, each with its place."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.suffix in (".txt", ".md")):
        blocks = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        name = path.relative_to(folder).as_posix()
        found += [(f"{name}, paragraph {i}", block.strip()) for i, block in enumerate(blocks, 1) if block.strip()]
    return found


def index_of(vectors: np.ndarray) -> faiss.IndexFlatIP:
    """Return an index by inner product, which is the cosine, because the vectors have length 1."""
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    model, folder, query = sys.argv[1:]
    known = paragraphs(Path(folder))
    if not known:
        sys.exit(f"{folder} has no paragraph in a .txt or .md file")
    try:
        with StaticEmbeddingPipeline(model) as pipe:
            index = index_of(pipe.embed_documents([text for _, text in known], as_array=True))
            wanted = np.array([pipe.embed_query(query)], np.float32)
    except StaticLLMError as error:
        sys.exit(f"The folder could not be searched: {error}")
    scores, places = index.search(wanted, min(MAX_RESULTS, len(known)))
    for score, place in zip(scores[0], places[0], strict=True):
        where, text = known[place]
        print(f"{score:.3f}  {where}\n       {' '.join(text.split())[:150]}")


if __name__ == "__main__":
    main()
