"""The endpoints of OpenAI's API, and those beside it that have the same form."""
