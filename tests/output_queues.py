"""What an engine has put into a request's output queue."""


def outputs_of(request):
    """All tokens so far, and the end if it has come."""
    return list(iter(lambda: request.queue.get(0), None))
