"""Chat in a window: python chat_window.py [MODEL_DIR]. The model runs in a worker thread, the widgets in the main one."""

import queue
import sys
import threading
import tkinter as tk
from itertools import groupby
from tkinter import ttk
from tkinter.scrolledtext import ScrolledText

import staticllm

FONT = ("Helvetica", 12)  # Tk takes the nearest font that the system has
COLOURS = {"user": "#1d4ed8", "assistant": "#1f2937", "error": "#b91c1c", "hint": "#6b7280"}
HINT = "Type a message below and press Enter. Escape, or Stop, ends an answer.\n"


class ChatWindow:
    def __init__(self, root: tk.Tk, model_dir: str | None = None) -> None:
        self.root = root
        self.prompts: queue.Queue[str | None] = queue.Queue()  # to the worker; None ends it
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()  # from the worker: kind and text
        self.stopping = threading.Event()
        self.is_loading = True
        self._build()
        self.worker = threading.Thread(target=self._work, args=(model_dir,), name="chat-worker")
        self.worker.start()
        self._poll()

    def _build(self) -> None:
        if self.root.tk.call("tk", "windowingsystem") == "x11":
            ttk.Style().theme_use("clam")  # the default theme looks like the 1990s
        self.root.configure(padx=12, pady=12, background=ttk.Style().lookup("TFrame", "background"))
        self.status = ttk.Label(self.root, text="Loading the model …", foreground="#4b5563")
        self.status.pack(side="bottom", anchor="w")
        bar = ttk.Frame(self.root)
        bar.pack(side="bottom", fill="x", pady=10)
        self.entry = ttk.Entry(bar, font=FONT)
        self.entry.pack(side="left", fill="both", expand=True)
        self.entry.focus()
        self.send_button = ttk.Button(bar, text="Send", command=self.send, state="disabled")
        self.send_button.pack(side="left", padx=8)
        self.stop_button = ttk.Button(bar, text="Stop", command=self.stopping.set, state="disabled")
        self.stop_button.pack(side="left")
        self.root.bind("<Return>", lambda event: self.send_button.invoke())  # a disabled button ignores this
        self.root.bind("<Escape>", lambda event: self.stop_button.invoke())
        self.history = ScrolledText(self.root, font=FONT, wrap="word", padx=16, pady=8, bg="white", state="disabled")
        self.history.pack(fill="both", expand=True)
        for tag, colour in COLOURS.items():
            self.history.tag_configure(tag, foreground=colour)
        self.history.tag_configure("user", font=(*FONT, "bold"), spacing1=12, spacing3=6)

    def run(self) -> None:
        try:
            self.root.mainloop()  # until the window is closed
        finally:
            self.stopping.set()
            self.prompts.put(None)
            self.worker.join()

    def send(self) -> None:
        if prompt := self.entry.get().strip():
            self.entry.delete(0, "end")
            self.show(f"\n{prompt}\n", "user")
            self.send_button.configure(state="disabled")
            self.stop_button.configure(state="normal")
            self.status.configure(text="Answering …")
            self.stopping.clear()
            self.prompts.put(prompt)

    def show(self, text: str, tag: str) -> None:
        self.history.configure(state="normal")
        self.history.insert("end", text, tag)
        self.history.configure(state="disabled")
        self.history.see("end")

    def _poll(self) -> None:
        news = [self.events.get() for _ in range(self.events.qsize())]
        for kind, events in groupby(news, key=lambda event: event[0]):
            texts = [text for _, text in events]
            if kind in COLOURS:
                self.show("".join(texts), kind)  # one call per token would be slow, because each lays out the text
            else:
                self.status.configure(text=texts[-1])
            if kind == "ready":
                self.send_button.configure(state="normal")
                self.stop_button.configure(state="disabled")
        self.root.after(30, self._poll)

    def _work(self, model_dir: str | None) -> None:  # this method and those below run in the worker and touch no widget
        try:
            pipe = staticllm.StaticLLMPipeline(model_dir or staticllm.demo_model_path(), on_progress=self._on_progress)
        except Exception as error:
            self.events.put(("error", f"\n{error}"))
            self.events.put(("status", "The model could not be loaded"))
            return
        pipe.start_chat()
        self.events.put(("hint", HINT))
        self.is_loading = False
        self.events.put(("ready", "Ready"))
        for prompt in iter(self.prompts.get, None):
            try:
                pipe.generate(prompt, streamer=self._on_text)
                if self.stopping.is_set():
                    self.events.put(("hint", " [stopped]"))
            except Exception as error:
                self.events.put(("error", f"\n{error}\nThe conversation starts over."))
                pipe.start_chat()
            self.events.put(("ready", "Ready"))

    def _on_text(self, text: str) -> bool:
        self.events.put(("assistant", text))
        return self.stopping.is_set()  # True stops the answer

    def _on_progress(self, event: staticllm.ProgressEvent) -> None:
        if self.is_loading:  # later events are of programs that are compiled while the model serves
            self.events.put(("status", f"Loading the model: {event.stage} {event.index} of {event.total}"))
        if self.stopping.is_set():  # the window was closed
            raise SystemExit


def main() -> None:
    ChatWindow(tk.Tk(className="Chat"), *sys.argv[1:2]).run()


if __name__ == "__main__":
    main()
