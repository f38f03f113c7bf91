"""What all APIs share: the fields of requests, what they ask of a model, the answers, and their streams."""
