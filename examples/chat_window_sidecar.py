"""Chat in a window whose model runs in another process: python chat_window_sidecar.py [MODEL_DIR].

The window of chat_window.py with a server in place of the pipeline: a crash of the device layer leaves the window alive.
"""

import sys
import tkinter as tk

from chat_window import HINT, ChatWindow
from sidecar_client import Sidecar


class SidecarWindow(ChatWindow):
    def _work(self, model_dir: str | None) -> None:  # runs in the worker thread and touches no widget
        try:
            sidecar = Sidecar("--supervise", *([model_dir] if model_dir else []))
        except Exception as error:
            self.events.put(("error", f"\n{error}"))
            self.events.put(("status", "The server could not be started"))
            return
        try:
            self.events.put(("hint", HINT))
            self.events.put(("ready", "Ready"))
            messages: list[dict[str, str]] = []
            for prompt in iter(self.prompts.get, None):
                messages = self._answer(sidecar, [*messages, {"role": "user", "content": prompt}])
                self.events.put(("ready", "Ready"))
        finally:
            sidecar.close()

    def _answer(self, sidecar: Sidecar, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        pieces: list[str] = []
        answer = sidecar.chat(messages)
        try:
            for piece in answer:
                pieces.append(piece)
                self.events.put(("assistant", piece))
                if self.stopping.is_set():
                    self.events.put(("hint", " [stopped]"))
                    break
        except Exception as error:
            self.events.put(("error", f"\n{error}"))
            return messages[:-1]  # the question can be asked again
        finally:
            answer.close()
        return [*messages, {"role": "assistant", "content": "".join(pieces)}]


def main() -> None:
    SidecarWindow(tk.Tk(className="Chat"), *sys.argv[1:2]).run()


if __name__ == "__main__":
    main()
