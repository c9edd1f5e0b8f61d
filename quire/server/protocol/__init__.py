"""The bodies of requests and responses, as msgspec structs: OpenAI's fields, then vLLM's extras."""
