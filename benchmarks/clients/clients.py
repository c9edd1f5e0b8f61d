"""The clients: what is installed for each, and which files of `cases` it runs against which server."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.clients.environments import Environment, NodeEnvironment, PythonEnvironment, VllmEnvironment


@dataclass(frozen=True)
class Client:
    """scripts: file of `cases` -> the server that it is run against."""

    name: str
    environment: Environment
    scripts: dict[str, str]

    @property
    def version(self) -> str:
        return ", ".join(self.environment.packages)


def _python(name: str, *requirements: str, **scripts: str) -> Client:
    return Client(name, PythonEnvironment(*requirements), {f"{file}.py": server for file, server in scripts.items()})


def _node(name: str, *packages: str, **scripts: str) -> Client:
    return Client(name, NodeEnvironment(*packages), {f"{file}.mjs": server for file, server in scripts.items()})


CLIENTS = (
    _python(
        "openai-python",
        "openai==3.54.0",
        openai_chat="scripted",
        openai_python="scripted",
        openai_images="sights",
        openai_embeddings="pooling",
    ),
    _node("openai-node", "openai@6.49.0", "zod@4.6.7", openai_node="scripted"),
    _python("anthropic-python", "anthropic==2.12.0", anthropic_python="scripted", anthropic_images="sights"),
    _node("anthropic-node", "@anthropic-ai/sdk@1.12.0", anthropic_node="scripted"),
    _node(
        "ai-sdk",
        "ai@6.0.326",
        "@ai-sdk/openai@3.0.141",
        "@ai-sdk/openai-compatible@2.0.92",
        "@ai-sdk/anthropic@3.0.140",
        "zod@4.6.7",
        ai_sdk="scripted",
        ai_sdk_images="sights",
    ),
    _python(
        "langchain",
        "langchain==1.4.7",
        "langchain-openai==1.7.3",
        "langchain-anthropic==1.7.7",
        langchain_cases="scripted",
        langchain_images="sights",
        langchain_embeddings="pooling",
    ),
    _python(
        "llama-index",
        "llama-index-llms-openai-like==0.8.1",
        "llama-index-embeddings-openai-like==0.4.0",
        llama_index_cases="scripted",
        llama_index_embeddings="pooling",
    ),
    _python("litellm", "litellm==1.106.2", "mcp==2.3.0", litellm_cases="scripted", litellm_embeddings="pooling"),
    _python("instructor", "instructor[anthropic]==1.17.0", instructor_cases="scripted"),
    _python("pydantic-ai", "pydantic-ai-slim[anthropic,openai]==2.68.0", pydantic_ai_cases="scripted"),
    _python("ollama-python", "ollama==0.6.3", ollama_python="scripted", ollama_embeddings="pooling"),
    _python("open-webui", "aiohttp==3.14.5", open_webui="scripted"),
    _python("lm-eval", "lm-eval[api]==0.4.13", "transformers==5.23.0", lm_eval_cases="bundled"),
    _python("guidellm", "guidellm==0.8.1", guidellm_cases="bundled"),
    Client("vllm-bench", VllmEnvironment(), {"vllm_bench.py": "bundled"}),
    _python("aiperf", "aiperf==0.13.0", aiperf_cases="bundled"),
)
