"""The chat of ``staticllm run``, with slash commands and Ctrl-C, whatever answers it."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import click

from staticllm.cli.backends import Answer, Backend, Message
from staticllm.cli.options import as_text
from staticllm.cli.progress import progress
from staticllm.cli.terminal import line_reader, print_error, show
from staticllm.errors import ConfigError, PromptTooLongError, StaticLLMError, quoted

HELP = {
    "/help": "list the commands",
    "/exit": "leave the chat, like Ctrl-D",
    "/clear": "begin a new conversation",
    "/regenerate": "answer the last message again (with the same text, unless it is sampled)",
    "/system TEXT": "begin a new conversation with this system message; without TEXT, show it",
    "/save FILE": "write the conversation to a JSON file",
    "/load FILE": "continue a saved conversation",
    "/stats": "print tokens and timings of the last answer",
}


class Chat:
    """An interactive chat. The first Ctrl-C stops the answer, or shows a hint at the prompt; the next one ends the chat."""

    def __init__(self, backend: Backend, system_message: str, with_stats: bool) -> None:
        self._backend = backend
        self._with_stats = with_stats
        self._interrupts = 0
        self._is_answering = False
        self._system_message = system_message
        self._messages: list[Message] = []  # without the system message
        self._last_answer: Answer | None = None
        self._read_line = line_reader([name.partition(" ")[0] for name in HELP])

    def run(self) -> None:
        """Read and answer messages until Ctrl-D, /exit, or two Ctrl-C."""
        click.echo("Ctrl-C stops an answer; Ctrl-D, or Ctrl-C twice, leaves. /help lists the commands.", err=True)
        before = signal.signal(signal.SIGINT, self._on_interrupt)
        try:
            while (text := self._ask()) is not None and self._take(text):
                pass
        except KeyboardInterrupt:
            click.echo()
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_interrupt(self, signum: int, frame: object) -> None:
        """Count the first Ctrl-C during an answer, which the streamer then stops. Raise at the prompt or at the second one."""
        if not self._is_answering:
            raise KeyboardInterrupt
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt

    def _ask(self) -> str | None:
        was_interrupted = False
        while True:
            try:
                return self._read_line()
            except EOFError:
                click.echo()
                return None
            except KeyboardInterrupt:
                if was_interrupted:
                    raise
                was_interrupted = True
                click.echo("\n(Ctrl-C again to leave)", err=True)

    def _take(self, line: str) -> bool:
        """Run a command, or answer a message; an error is printed as one line. Return False to leave the chat."""
        try:
            text = as_text(line, "the message")
            if text.startswith("/"):
                return self._obey(*text.strip().partition(" ")[::2])
            if text.strip():
                self._answer([*self._messages, {"role": "user", "content": text}])
        except (StaticLLMError, click.UsageError) as error:
            print_error(error)
        except OSError as error:
            if error.filename is None:  # standard output failed: the chat cannot continue
                raise
            click.echo(f"Error: {error.strerror}: {error.filename}", err=True)
        return True

    def _obey(self, name: str, argument: str) -> bool:
        """Run one command. Return False to leave the chat."""
        commands: dict[str, Callable[[str], None]] = {
            "/help": self._help, "/clear": self._clear, "/regenerate": self._regenerate, "/system": self._system,
            "/save": self._save, "/load": self._load, "/stats": self._stats,
        }  # fmt: skip
        if name in ("/exit", "/quit", "/bye"):
            return False
        if name not in commands:
            raise click.UsageError(f"no command {name!r}: /help lists them; a message may begin with a blank")
        commands[name](argument.strip())
        return True

    def _help(self, argument: str) -> None:
        width = max(map(len, HELP))
        click.echo("\n".join(f"{name:<{width}}  {text}" for name, text in HELP.items()), err=True)

    def _clear(self, argument: str) -> None:
        self._messages = []
        self._last_answer = None
        click.echo("A new conversation begins.", err=True)

    def _regenerate(self, argument: str) -> None:
        if not self._messages:
            raise click.UsageError("there is no answer yet: ask something first")
        self._answer(self._messages[:-1])

    def _system(self, argument: str) -> None:
        if not argument:
            click.echo(self._system_message or "(no system message)", err=True)
            return
        self._system_message = argument
        self._clear("")

    def _save(self, argument: str) -> None:
        path = _path("/save", argument)
        document = {"system": self._system_message, "messages": self._messages}
        path.write_text(json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        click.echo(f"{len(self._messages)} messages in {path}", err=True)

    def _load(self, argument: str) -> None:
        path = _path("/load", argument)
        self._system_message, self._messages = read_conversation(path)
        click.echo(f"{len(self._messages)} messages of {path}", err=True)

    def _stats(self, argument: str) -> None:
        if self._last_answer is None:
            raise click.UsageError("there is no answer yet: ask something first")
        click.echo(self._last_answer.stats(), err=True)

    def _answer(self, messages: list[Message]) -> None:
        """Answer the last message, which is the user's. The conversation becomes these messages and the answer."""
        system = [{"role": "system", "content": self._system_message}] if self._system_message else []
        self._is_answering = True
        self._interrupts = 0
        try:
            with progress("running the prompt") as waiting:

                def write(piece: str) -> bool:
                    waiting.close()
                    show(piece)
                    return self._interrupts > 0

                answer = self._backend.chat([*system, *messages], write)
        except PromptTooLongError as error:
            click.echo(
                f"The conversation is full ({error.num_tokens} tokens, {error.limit} fit): a new one begins.", err=True
            )
            self._messages = []
            return
        finally:
            self._is_answering = False
        click.echo(" [stopped]" if self._interrupts else "")
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        self._last_answer = answer
        if self._with_stats:
            click.echo(answer.stats(), err=True)


def read_conversation(path: Path) -> tuple[str, list[Message]]:
    """Return the system message and the messages of a file that ``/save`` wrote.

    Raises:
        ConfigError: the file does not contain a conversation.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in document["messages"]]
        roles = [message["role"] for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ValueError("messages of user and assistant must alternate")
        return str(document["system"]), messages
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{quoted(path)} holds no conversation ({error}): /save writes one") from None


def _path(command: str, argument: str) -> Path:
    if not argument:
        raise click.UsageError(f"{command} needs a file: {command} chat.json")
    return Path(argument).expanduser()
