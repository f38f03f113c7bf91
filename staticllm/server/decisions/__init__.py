"""The two APIs for decisions: OpenAI's ``/v1/decisions`` and TypeSafe's ``/v1/systemone``."""
