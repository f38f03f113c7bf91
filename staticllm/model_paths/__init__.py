"""What a path holds that is given as a model, and whether an argument of the command line is such a path."""
