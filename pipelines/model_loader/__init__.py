"""From a model directory to a pipeline that can serve."""
