"""What a pipeline is made of, for tests that look at its engine, its programs or its queue of texts."""


def engine_of(pipe):
    """Return the engine that a pipeline of text asks: its own, or the client of the daemon's."""
    return pipe._engine


def launched_of(pipe):
    """Return what was loaded for a pipeline of text, here or by the daemon."""
    return pipe._launched


def inputs_of(pipe):
    """Return what makes requests of the calls of a pipeline of text."""
    return pipe._input_processor


def speech_of(pipe):
    """Return the model of a pipeline for speech: windows, engine and programs, here or in the daemon."""
    return pipe._model


def driver_of(pipe):
    """Return the queue of a pipeline for embeddings or ranks, whatever serves it."""
    return pipe._driver


def reader_of(handle):
    """Return what a handle reads its outputs with."""
    return handle._reader
