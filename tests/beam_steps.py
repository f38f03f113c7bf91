"""A step of a beam search whose logits are all there."""


def advanced(search, logits, masks=()):
    """Give a search the logits after each beam in progress, with what forbids tokens there, and return the next beams."""
    for index, line in enumerate(logits):
        search.take(index, line, masks[index] if masks else None)
    return search.advance()
