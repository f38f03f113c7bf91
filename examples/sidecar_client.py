"""Ask a model of a server that this program starts and ends: python sidecar_client.py [PROMPT]. Needs no package itself."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from urllib.request import HTTPError, Request, urlopen

COMMAND = [sys.executable, "-m", "staticllm"]  # an application that ships the server names its executable here


class Sidecar:
    """A server of this program's own, which ends with it, also if it is killed."""

    def __init__(self, *arguments: str) -> None:
        self.folder = tempfile.TemporaryDirectory()
        ready = Path(self.folder.name) / "ready.json"
        own = ["serve", "--port", "0", "--random-key", "--ready-file", str(ready), "--parent-pid", str(os.getpid())]
        self.log = (Path(self.folder.name) / "log").open("wb")
        self.process = subprocess.Popen([*COMMAND, *own, *arguments], stdout=self.log, stderr=self.log)
        while not ready.exists():
            if self.process.poll() is not None:
                *_, last = ["it does not start", *Path(self.log.name).read_text("utf-8", "replace").splitlines()]
                self.close()
                raise RuntimeError(last)
            time.sleep(0.05)
        self.ready = json.loads(ready.read_text(encoding="utf-8"))

    def chat(self, messages: list[dict[str, str]], **options: object) -> Generator[str, None, None]:
        """Yield the pieces of an answer; closing the iterator stops it."""
        body = json.dumps({"messages": messages, "stream": True, **options}).encode()
        headers = {"Authorization": f"Bearer {self.ready['key']}", "Content-Type": "application/json"}
        try:
            with urlopen(Request(self.ready["url"] + "/chat/completions", body, headers)) as response:
                for line in filter(lambda line: line.startswith(b"data: {"), response):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"]["message"])
                    yield from (choice["delta"].get("content") or "" for choice in event["choices"])
        except HTTPError as error:
            raise RuntimeError(json.load(error)["error"]["message"]) from None

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()
        self.folder.cleanup()


if __name__ == "__main__":
    with contextlib.closing(Sidecar()) as sidecar:
        content = " ".join(sys.argv[1:]) or "What is an NPU?"
        for piece in sidecar.chat([{"role": "user", "content": content}], max_tokens=64):
            print(piece, end="", flush=True)
    print()
