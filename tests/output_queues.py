"""What an engine has put into a request's output queue."""


def outputs_of(request):
    """All tokens so far, and the end if it has come."""
    return list(iter(lambda: request.queue.get(0), None))


def reason_of(request):
    """Why a request ended, all tokens taken out before."""
    return outputs_of(request)[-1].reason
