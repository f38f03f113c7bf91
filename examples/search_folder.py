"""Chat with a folder of documents while its index still grows: python search_folder.py FOLDER [QUESTION].

It needs staticllm[examples] and a server: staticllm serve CHAT_MODEL ENCODER [RERANKER]. LanceDB keeps the vectors: it runs in
this process, has few dependencies, shows readers whole files while others are written, and executes nothing that it stores.
"""

import argparse
import hashlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import lancedb
import openai
import pyarrow as pa
import pypdf
from langchain_text_splitters import MarkdownHeaderTextSplitter, RecursiveCharacterTextSplitter

MAX_BYTES, BATCH = 8 << 20, 128  # bytes of a file, pieces in a request
PIECES, RERANKED, SOURCES, CONTEXT = 200, 30, 5, 2000  # pieces, pieces, files, characters
KINDS = ("chat", "embedding", "rerank")
RULES = "Answer briefly from these passages alone, and name their numbers, like [1]. If they do not say it, say so."
BY_HEADINGS = MarkdownHeaderTextSplitter([("#" * level, str(level)) for level in range(1, 7)])
BY_LENGTH = RecursiveCharacterTextSplitter(chunk_size=600, chunk_overlap=200)  # characters


def say(*parts: object) -> None:
    print(" ".join(" ".join(map(str, parts)).split())[:400], file=sys.stderr, flush=True)


def pieces_of(path: Path) -> list[tuple[str, str]]:
    """Return the text of a document in pieces, each with the headings above it; none if it cannot be read."""
    try:
        pages = pypdf.PdfReader(path).pages if path.suffix.lower() == ".pdf" else []
        text = "\n".join(f"# page {number}\n{page.extract_text()}" for number, page in enumerate(pages, 1))
        text = text or path.read_text(encoding="utf-8")
        parts = BY_LENGTH.split_documents(BY_HEADINGS.split_text(text.encode(errors="replace").decode()))
        return [(" > ".join(part.metadata.values()) or path.name, part.page_content) for part in parts]
    except Exception as error:  # a damaged PDF raises anything
        say("left out:", path, "is no text or PDF that can be read:", error)
        return []


class FolderIndex:
    """The pieces of a folder's files and their vectors, kept from run to run. It can be searched while it grows."""

    def __init__(self, client: openai.OpenAI, model: str, folder: Path, store: Path) -> None:
        self.client, self.model, self.folder = client, model, folder
        width = len(self.embed(["How many numbers?"], "query")[0])
        texts = [(name, pa.string()) for name in ("file", "stamp", "title", "text")]
        self.schema = pa.schema([*texts, ("number", pa.int32()), ("vector", pa.list_(pa.float32(), width))])
        self.table: Any = lancedb.connect(store).create_table(f"pieces_{width}", schema=self.schema, exist_ok=True)

    def embed(self, texts: list[str], kind: str) -> list[list[float]]:
        more = {"input_type": kind} | ({"service_tier": "flex"} if kind == "document" else {})  # nobody waits for these
        parts = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        create = self.client.embeddings.create
        return [each.embedding for part in parts for each in create(model=self.model, input=part, extra_body=more).data]

    def update(self) -> str:
        """Embed each file that is new or changed, forget those that are gone, and return what was done."""
        present: dict[str, str] = {}
        for path in sorted(self.folder.rglob("[!.]*")):
            name, status = path.relative_to(self.folder).as_posix(), path.lstat()
            if "/." in f"/{name}" or (path.is_dir() and not path.is_symlink() and os.access(path, os.R_OK)):
                continue
            if path.is_file() and not path.is_symlink() and status.st_size <= MAX_BYTES and name.isprintable():
                present[name] = f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_size}"
            else:
                say("left out:", ascii(name), f"is no plain file with a printable name and at most {MAX_BYTES} bytes")
        known = {row["file"]: row["stamp"] for row in self.table.search().where("number = 0").to_list()}
        changed = sorted(name for name in {**known, **present} if known.get(name) != present.get(name))
        for name in changed:
            pieces = pieces_of(self.folder / name) if name in present else []
            vectors = self.embed([f"{title}\n{text}" for title, text in pieces], "document")
            rows = [(name, present[name], *pieces[i], i, vector) for i, vector in enumerate(vectors)]
            columns = [list(column) for column in zip(*rows, strict=True)] or [[]] * len(self.schema)
            merge = self.table.merge_insert(["file", "number"]).when_matched_update_all().when_not_matched_insert_all()
            of_file = "file = '" + name.replace("'", "''") + "'"  # all its old pieces go as the new ones come
            merge.when_not_matched_by_source_delete(of_file).execute(pa.table(columns, schema=self.schema))
        return f"{len(present)} files, {len(changed)} new, changed, gone or left out"

    def search(self, question: str, reranker: str | None) -> list[dict[str, Any]]:
        """Return the best piece of each of the best files, the best first."""
        found = self.table.search(self.embed([question], "query")[0]).distance_type("cosine").limit(PIECES).to_list()
        if reranker and found:
            body = {"model": reranker, "query": question, "documents": [each["text"] for each in found[:RERANKED]]}
            answer: Any = self.client.post("/rerank", body=body, cast_to=object)
            found[:RERANKED] = [found[each["index"]] for each in answer["results"]]
        best = {piece["file"]: piece for piece in reversed(found)}
        return [piece for piece in found if best[piece["file"]] is piece][:SOURCES]


def answer(index: FolderIndex, models: dict[str, str], question: str) -> None:
    sources = list(enumerate(index.search(question, models["rerank"]), 1))
    passages = "\n\n".join(f"[{i}] {each['title']}\n{each['text'][: CONTEXT // SOURCES]}" for i, each in sources)
    messages: Any = [{"role": "system", "content": RULES}, {"role": "user", "content": f"{passages}\n\n{question}"}]
    create = index.client.chat.completions.create
    for chunk in create(model=models["chat"], messages=messages, max_tokens=300, stream=True) if sources else ():
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    listed = [f"[{i}] {each['file']}: {each['title']}" for i, each in sources]
    print("", *(listed or ["Nothing is indexed: the folder has no text, or not yet."]), sep="\n", flush=True)


def chat(client: openai.OpenAI, options: argparse.Namespace) -> None:
    served = {getattr(each, "type", ""): each.id for each in reversed(client.models.list().data)}
    models = {kind: getattr(options, kind) or served.get(kind, "") for kind in KINDS}
    if missing := [kind for kind in KINDS[:2] if not models[kind]]:
        sys.exit(f"the server lists no {missing[0]} model: staticllm serve CHAT_MODEL ENCODER, or --{missing[0]} NAME")
    digest = hashlib.sha256(f"{options.folder.resolve()}\0{models['embedding']}".encode()).hexdigest()[:16]
    index = FolderIndex(client, models["embedding"], options.folder, options.store / digest)
    threading.excepthook = lambda failure: say("the index ends here:", failure.exc_value)
    growing = threading.Thread(target=lambda: say(index.update()), daemon=True)
    growing.start()
    growing.join(None if options.question else 0)  # a single question waits for the whole index
    for question in [options.question] if options.question else iter(lambda: input("\nYou: "), ""):
        try:
            answer(index, models, question)
        except openai.APIStatusError as error:
            if options.question:
                raise
            say(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--store", type=Path, default=Path.home() / ".cache" / "search_folder")
    for kind in KINDS:
        parser.add_argument(f"--{kind}", metavar="NAME", help="a model of the server; else its first one of this kind")
    options = parser.parse_args()
    if not options.folder.is_dir():
        sys.exit(f"{options.folder} is no folder")
    try:
        chat(openai.OpenAI(base_url=options.url, api_key=os.environ.get("OPENAI_API_KEY", "any")), options)
    except openai.APIConnectionError:
        sys.exit(f"no server answers at {options.url}: staticllm serve CHAT_MODEL ENCODER")
    except (openai.APIError, OSError, RuntimeError, ValueError) as error:
        sys.exit(" ".join(str(error).split())[:400])
    except (KeyboardInterrupt, EOFError):
        print()


if __name__ == "__main__":
    main()
