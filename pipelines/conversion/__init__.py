"""Makes a model directory of a file in another format, in a process of its own."""
