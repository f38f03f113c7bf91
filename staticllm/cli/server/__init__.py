"""The commands about the HTTP server."""
