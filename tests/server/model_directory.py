"""A model directory without weights: a byte-level tokenizer of 300 tokens, a chat template, a tiny configuration."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

END = "<|end|>"
START = "<|start|>"
VOCAB_SIZE = 300
MAX_MODEL_LEN = 256

CHAT_TEMPLATE = (
    "{% if shout %}SHOUT {% endif %}"
    "{% for message in messages %}<|start|>{{ message.role }}"
    "{% if message.name %} ({{ message.name }}){% endif %}: {{ message.content }}"
    "{% if not loop.last or message.role != 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def write_model(path: Path, chat_template: str = CHAT_TEMPLATE, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Write the directory. Ids 0..255 are bytes (in the order of the alphabet), then START, END and fillers."""
    path.mkdir(parents=True, exist_ok=True)
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([START, END])
    tokenizer.add_tokens([f"[{index}]" for index in range(258, VOCAB_SIZE)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{START} $A", special_tokens=[(START, 256)])
    tokenizer.save(str(path / "tokenizer.json"))
    tokenizer_config = {
        "bos_token": START,
        "eos_token": END,
        "chat_template": chat_template,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": max_model_len}))
    return path
