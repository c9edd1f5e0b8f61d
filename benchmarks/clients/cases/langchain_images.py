"""LangChain: pictures by `langchain-openai` and `langchain-anthropic`, as OpenAI's parts and as LangChain's own."""

from __future__ import annotations

import warnings
from typing import Any

from harness import KEY, MODEL, OPENAI_URL, RED_SQUARE, URL, WHAT, case, equal, main
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

warnings.filterwarnings("ignore")
PART: Any = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED_SQUARE}"}}
BLOCK: Any = {"type": "image", "base64": RED_SQUARE, "mime_type": "image/png"}


def ask(model: Any, image: Any) -> None:
    equal(model.invoke([HumanMessage([image, {"type": "text", "text": WHAT}])]).text, "A red square.")


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL, base_url=OPENAI_URL, api_key=KEY, max_retries=0, temperature=0, max_tokens=20, **fields
    )


@case
def openai_picture() -> None:
    ask(chat(), PART)
    ask(chat(), BLOCK)


@case
def openai_responses_picture() -> None:
    ask(chat(use_responses_api=True), BLOCK)


@case
def anthropic_picture() -> None:
    ask(ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, temperature=0, max_tokens=20), BLOCK)


if __name__ == "__main__":
    main()
