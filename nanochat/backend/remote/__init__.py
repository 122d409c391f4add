"""A server that speaks OpenAI's API as a backend: chat completions, and its Prometheus page."""
