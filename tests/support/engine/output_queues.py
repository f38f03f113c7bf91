"""Reads what an engine has put into a request's output queue."""


def outputs_of(request):
    """Return all outputs so far, including the end if it has arrived."""
    return list(iter(lambda: request.queue.get(0), None))


def reason_of(request):
    """Take all outputs from the queue, and return why the request ended."""
    return outputs_of(request)[-1].reason
