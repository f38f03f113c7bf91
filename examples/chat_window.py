"""Chat in a window: python chat_window.py [MODEL_DIR]. Enter sends, Escape stops the answer.

The widgets live in the main thread, the model in a worker thread; two queues carry text between them.
"""

from __future__ import annotations

import queue
import sys
import threading
import tkinter as tk
from tkinter import font, ttk
from tkinter.scrolledtext import ScrolledText

import staticllm

POLL_MS = 30
COLOURS = {"user": "#1d4ed8", "assistant": "#1f2937", "error": "#b91c1c"}


class ChatWindow:
    def __init__(self, root: tk.Tk, model_dir: str | None = None) -> None:
        self.root, self.model_dir = root, model_dir
        self.prompts: queue.Queue[str | None] = queue.Queue()  # to the worker; None ends it
        self.events: queue.Queue[tuple[str, str]] = queue.Queue()  # from the worker: kind and text
        self.stopping = threading.Event()
        self._build()
        self.worker = threading.Thread(target=self._work, name="chat-worker")
        self.worker.start()
        self._poll()

    def _build(self) -> None:
        self.root.title("staticllm chat")
        self.root.geometry("760x560")
        if self.root.tk.call("tk", "windowingsystem") == "x11":
            ttk.Style().theme_use("clam")  # the default there is from the 1990s
        for name in ("TkDefaultFont", "TkTextFont"):
            font.nametofont(name).configure(size=12)
        frame = ttk.Frame(self.root, padding=12)
        frame.pack(fill="both", expand=True)
        self.status = ttk.Label(frame, text="Loading the model …", foreground="#4b5563")
        self.status.pack(side="bottom", anchor="w")
        bar = ttk.Frame(frame)
        bar.pack(side="bottom", fill="x", pady=10)
        self.entry = ttk.Entry(bar, font="TkTextFont")
        self.entry.pack(side="left", fill="both", expand=True)
        self.entry.focus()
        self.send_button = ttk.Button(bar, text="Send", command=self.send, state="disabled")
        self.stop_button = ttk.Button(bar, text="Stop", command=self.stopping.set, state="disabled")
        for key, button in ("<Return>", self.send_button), ("<Escape>", self.stop_button):
            button.pack(side="left", padx=(8, 0))
            self.root.bind(key, lambda event, button=button: button.invoke())  # nothing happens while it is disabled
        self.history = ScrolledText(frame, font="TkTextFont", wrap="word", padx=16, pady=12, spacing2=4, height=1)
        self.history.configure(state="disabled", background="white", relief="flat")
        self.history.pack(fill="both", expand=True)
        for tag, colour in COLOURS.items():
            self.history.tag_configure(tag, foreground=colour)
        self.history.tag_configure("name", font=(font.nametofont("TkTextFont").actual("family"), 12, "bold"))

    def send(self) -> None:
        if prompt := self.entry.get().strip():
            self.entry.delete(0, "end")
            self.show("You\n", "user", "name")
            self.show(f"{prompt}\n\n", "user")
            self.show("Assistant\n", "assistant", "name")
            self.history.see("end")
            self._set_answering(True)
            self.stopping.clear()
            self.prompts.put(prompt)

    def show(self, text: str, *tags: str) -> None:
        is_at_end = self.history.dlineinfo("end-1c") is not None  # else the user has scrolled up to read
        self.history.configure(state="normal")
        self.history.insert("end", text, tags)
        self.history.configure(state="disabled")
        if is_at_end:
            self.history.see("end")

    def _set_answering(self, is_answering: bool) -> None:
        self.send_button.configure(state="disabled" if is_answering else "normal")
        self.stop_button.configure(state="normal" if is_answering else "disabled")

    def _poll(self) -> None:
        for _ in range(self.events.qsize()):
            kind, text = self.events.get()
            if kind == "status":
                self.status.configure(text=text)
            elif kind == "idle":
                self._set_answering(False)
            else:
                self.show(text, kind)
        self.root.after(POLL_MS, self._poll)

    def join(self) -> None:
        self.stopping.set()
        self.prompts.put(None)
        self.worker.join()

    def _work(self) -> None:  # from here on everything runs in the worker thread and touches no widget
        try:
            model_dir = self.model_dir or staticllm.demo_model_path()
            pipe = staticllm.StaticLLMPipeline(model_dir, on_progress=self._on_progress)
            pipe.start_chat()
            self._tell("status", "Ready")
            self._tell("idle")
            for prompt in iter(self.prompts.get, None):
                self._answer(pipe, prompt)
        except Exception as error:
            self._tell("status", "The model could not be loaded")
            self._tell("error", f"{error}\n")

    def _answer(self, pipe: staticllm.StaticLLMPipeline, prompt: str) -> None:
        try:
            answer = pipe.generate(prompt, streamer=self._on_text)
            self._tell("assistant", "\n\n")
            tokens = answer.perf_metrics.get_num_generated_tokens()
            self._tell("status", f"{tokens} tokens, ended by: {answer.finish_reasons[0]}")
        except Exception as error:
            ...
