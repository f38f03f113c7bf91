"""During a run: from requests to device calls to tokens and text."""
