"""What the cases of openai-python share: the clients, and the models that answers and arguments are parsed into."""

from __future__ import annotations

import openai
import pydantic
from harness import KEY, OPENAI_URL

client = openai.OpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0, timeout=60)


class City(pydantic.BaseModel):
    city: str
    people: int


class GetWeather(pydantic.BaseModel):
    """The weather"""

    city: str


def asynchronous() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=OPENAI_URL, api_key=KEY, max_retries=0, timeout=60)
