"""Incremental parsers of what models write: reasoning, tool calls and content, as the text comes."""
