"""LangChain's `OpenAIEmbeddings` against a model that pools."""

from __future__ import annotations

from harness import KEY, MODEL, OPENAI_URL, case, equal, main
from langchain_openai import OpenAIEmbeddings


@case
def embed_texts() -> None:
    model = OpenAIEmbeddings(model=MODEL, base_url=OPENAI_URL, api_key=KEY, check_embedding_ctx_length=False)
    equal([len(vector) for vector in model.embed_documents(["one", "two"])], [256, 256])
    equal(len(model.embed_query("one")), 256)


if __name__ == "__main__":
    main()
