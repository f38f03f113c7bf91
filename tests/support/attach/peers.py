"""A daemon that a test plays, over a pipe."""

from __future__ import annotations

from multiprocessing import Pipe

from staticllm.pipelines.engine.request import Finished, output_to_dict
from staticllm.wire.channel import Channel
from staticllm.wire.messages import LAST, Kind, Message

SECONDS = 20


class Peer:
    """A daemon that the test plays: ``channel`` is its side of the connection."""

    was_stopped = False

    def __init__(self):
        ours, theirs = Pipe()
        self.ours = Channel(ours)
        self.channel = Channel(theirs)
        self.is_closed = False

    @property
    def connection(self):
        return self.ours

    def check_silence(self):
        """The test answers in its own time."""

    def close(self):
        self.is_closed = True

    def receive(self):
        assert self.channel.poll(SECONDS), "no message came"
        return self.channel.receive()

    def answer(self, kind=Kind.OK, **body):
        """Receive a message and answer it; return it."""
        message = self.receive()
        self.channel.send(Message(kind, number=message.number, body=body))
        return message

    def send(self, number, *outputs):
        flags = LAST if isinstance(outputs[-1], Finished) else 0
        body = {"outputs": [output_to_dict(output) for output in outputs]}
        self.channel.send(Message(Kind.OUTPUT, number=number, flags=flags, body=body))

    def die(self):
        self.channel.close()
