"""HTTP: OpenAI and native routes."""
