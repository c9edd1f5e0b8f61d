"""LlamaIndex's `OpenAILikeEmbedding` against a model that pools."""

from __future__ import annotations

from harness import KEY, MODEL, OPENAI_URL, case, equal, main
from llama_index.embeddings.openai_like import OpenAILikeEmbedding


@case
def embed_texts() -> None:
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=OPENAI_URL, api_key=KEY, embed_batch_size=2)
    equal([len(vector) for vector in model.get_text_embedding_batch(["one", "two", "three"])], [256] * 3)
    equal(len(model.get_query_embedding("one")), 256)


if __name__ == "__main__":
    main()
