"""Request and response bodies as msgspec structs: OpenAI's fields, then vLLM's extensions."""
