"""BERT written as GGUF files, as llama.cpp's converters write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from transformers import BertModel

from tests.fakes.gguf import BOOL, INT32, STRING, TYPE_NUMBERS, GGUFWriter, StoredTensor, Typed, quantize, typed

TOP = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
}
LAYER = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
MATRICES = ("token_embd", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
CONTROL, NORMAL = 3, 1


def write_encoder(model: BertModel, pooling: int | None, types: Mapping[str, str] | None = None) -> GGUFWriter:
    """pooling: the file's number of a method (1: mean, 2: first token, 3: last token). types: of matrices, by their
    short name; F32 where absent."""
    config = model.config
    keys: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.layer_norm_epsilon": float(config.layer_norm_eps),
    }
    if pooling is not None:
        keys["pooling_type"] = pooling
    writer = GGUFWriter({"general.architecture": typed("bert")})
    writer.metadata |= {f"bert.{key}": typed(value) for key, value in keys.items()}
    writer.metadata["bert.attention.causal"] = Typed(BOOL, False)
    writer.metadata["tokenizer.ggml.token_type_count"] = typed(config.type_vocab_size)
    for name, weight in model.state_dict().items():
        if name.startswith("pooler."):
            continue
        short = short_name(name)
        kind = (types or {}).get(short.split(".")[-2], "F32") if weight.dim() == 2 else "F32"
        data = quantize(kind, weight.float().contiguous())
        writer.tensors[short] = StoredTensor(TYPE_NUMBERS[kind], tuple(weight.shape), data)
    return writer


def short_name(name: str) -> str:
    module, suffix = name.rsplit(".", 1)
    if module in TOP:
        return f"{TOP[module]}.{suffix}"
    index, rest = module.removeprefix("encoder.layer.").split(".", 1)
    return f"blk.{index}.{LAYER[rest]}.{suffix}"


def add_words(writer: GGUFWriter, words: Sequence[str], special: Sequence[str]) -> None:
    """A vocabulary of BERT. special: those of `words` that are control tokens."""
    marked = [word if word in special else word[2:] if word.startswith("##") else f"\u2581{word}" for word in words]
    writer.metadata |= {
        "tokenizer.ggml.model": typed("bert"),
        "tokenizer.ggml.pre": typed("jina-v2-en"),
        "tokenizer.ggml.tokens": Typed(STRING, marked),
        "tokenizer.ggml.token_type": Typed(INT32, [CONTROL if word in special else NORMAL for word in words]),
        "tokenizer.ggml.unknown_token_id": typed(words.index("[UNK]")),
        "tokenizer.ggml.seperator_token_id": typed(words.index("[SEP]")),
        "tokenizer.ggml.padding_token_id": typed(words.index("[PAD]")),
        "tokenizer.ggml.cls_token_id": typed(words.index("[CLS]")),
    }
