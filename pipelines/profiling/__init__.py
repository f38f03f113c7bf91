"""Records device calls and requests, and makes statistics and traces of them."""
