"""`litellm` against a model that pools."""

from __future__ import annotations

import litellm
from harness import KEY, MODEL, OPENAI_URL, case, equal, main


@case
def embedding() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.embedding(
            model=f"{provider}/{MODEL}", api_base=OPENAI_URL, api_key=KEY, input=["one", "two"], encoding_format="float"
        )
        equal([len(entry["embedding"]) for entry in answer.data], [256, 256])


if __name__ == "__main__":
    main()
