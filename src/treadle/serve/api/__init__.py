"""The HTTP face of the engine: OpenAI's API, vLLM's small extras, health and metrics."""
