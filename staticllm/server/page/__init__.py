"""The web page of the server, and the feed of the scheduler that it and others read."""
