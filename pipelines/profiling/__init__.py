"""Records device calls and requests, and makes statistics, traces and pictures of them."""
