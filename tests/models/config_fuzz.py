"""Random configurations of every decoder family, unusual and wrong ones among them.

What Quire computes from a directory is what Transformers computes from it, or Quire refuses it.

    python -m tests.models.config_fuzz --seed 0 --count 200 [--family gemma3_text]
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import shutil
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from quire.config.families import FAMILIES
from quire.config.families.family import Family
from quire.config.hf_config import load_model_config
from quire.config.rope import ROPE_TYPES
from quire.errors import UserError
from quire.models.claims import outline
from tests.models.families import make_choices_stable
from tests.models.harness import PagedRunner, chunked_logits, load, random_prompts, randomize

DECODERS = tuple(
    sorted(name for name, family in FAMILIES.items() if family.is_runnable and not family.is_bidirectional)
)
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
PROMPT = 40
"""Tokens of the text that both compute."""

_LLAMA = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_LATENT = {
    "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "moe_intermediate_size": 12, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 16,
}  # fmt: skip
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_head": 4},
    "opt": {"vocab_size": 61, "hidden_size": 32, "ffn_dim": 40, "num_attention_heads": 4},
    "mixtral": _LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "gpt_oss": _LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 8},
    "qwen2_moe": _LLAMA | _ROUTED | {"shared_expert_intermediate_size": 12, "num_key_value_heads": 2},
    "qwen3_moe": _LLAMA | _ROUTED | {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_vl_moe_text": _LLAMA | _ROUTED | {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3_next": _LLAMA | _ROUTED | _DELTA | {"shared_expert_intermediate_size": 12, "num_key_value_heads": 2},
    "qwen3_5_text": _LLAMA | _DELTA | {"num_key_value_heads": 2},
    "qwen3_5_moe_text": _LLAMA | _ROUTED | _DELTA | {"shared_expert_intermediate_size": 12, "num_key_value_heads": 2},
    "llama4_text": _LLAMA
    | {"num_local_experts": 3, "num_experts_per_tok": 1, "num_key_value_heads": 2, "head_dim": 8}
    | {"intermediate_size": 12, "intermediate_size_mlp": 40},
    "deepseek_v2": _LLAMA | _LATENT,
    "deepseek_v3": _LLAMA | _LATENT,
    "deepseek_v32": _LLAMA | _LATENT | {"index_topk": 9, "index_head_dim": 8, "index_n_heads": 2},
}
_ACTIVATIONS = (
    "silu", "swish", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu", "mish", "relu2",
)  # fmt: skip


def _values(draws: random.Random, num_layers: int) -> dict[str, Any]:
    """A value for each key that any family has, or that a writer may think it has."""
    pick = draws.choice
    return _layer_values(draws, num_layers) | {
        "attention_bias": pick([True, False]),
        "mlp_bias": pick([True, False]),
        "qkv_bias": pick([True, False]),
        "enable_bias": pick([True, False]),
        "head_dim": pick([8, 16, 10]),
        "num_key_value_heads": pick([1, 2, 4]),
        "hidden_act": pick(_ACTIVATIONS),
        "hidden_activation": pick(_ACTIVATIONS),
        "activation_function": pick(_ACTIVATIONS),
        "rms_norm_eps": pick([1e-5, 1e-2, 0.3]),
        "layer_norm_epsilon": pick([1e-5, 0.3]),
        "layer_norm_eps": 0.3,
        "tie_word_embeddings": pick([True, False]),
        "query_pre_attn_scalar": pick([4, 24, 24.0]),
        "attn_logit_softcapping": pick([2.0, 50, 1.5]),
        "final_logit_softcapping": pick([2.0, 30]),
        "attention_multiplier": pick([0.2, 1, 2]),
        "embedding_multiplier": pick([3.0, 2]),
        "residual_multiplier": pick([0.5, 2]),
        "logits_scaling": pick([0.5, 3]),
        "partial_rotary_factor": pick([0.5, 0.25, 1.0]),
        "original_max_position_embeddings": pick([16, 32]),
        "attention_chunk_size": pick([7, 16]),
        "attn_temperature_tuning": pick([True, False]),
        "floor_scale": pick([4, 10]),
        "attn_scale": pick([0.1, 0.5]),
        "use_qk_norm": pick([True, False]),
        "norm_topk_prob": pick([True, False]),
        "num_experts_per_tok": pick([1, 2]),
        "num_experts": pick([3, 4]),
        "num_local_experts": pick([3, 4]),
        "n_routed_experts": 4,
        "moe_intermediate_size": 12,
        "n_shared_experts": pick([1, 2]),
        "n_group": pick([1, 2]),
        "topk_group": 1,
        "topk_method": pick(["greedy", "group_limited_greedy", "noaux_tc"]),
        "scoring_func": pick(["softmax", "sigmoid"]),
        "routed_scaling_factor": pick([1.0, 1.7]),
        "rope_interleave": pick([True, False]),
        "q_lora_rank": None,
        "index_topk": pick([5, 64]),
        "swiglu_limit": pick([0.5, 7.0]),
        "swiglu_alpha": pick([1.702, 1.0]),
        "scale_attn_weights": pick([True, False]),
        "scale_attn_by_inverse_layer_idx": pick([True, False]),
        "reorder_and_upcast_attn": pick([True, False]),
        "n_inner": pick([24, 40]),
        "do_layer_norm_before": pick([True, False]),
        "_remove_final_layer_norm": pick([True, False]),
        "word_embed_proj_dim": pick([16, 32]),
        "layer_norm_elementwise_affine": pick([True, False]),
        "rope_local_base_freq": pick([50.0, 900]),
        "rope_theta": pick([100.0, 500, 7000.0]),
        "use_bidirectional_attention": pick([False, True]),
        "is_causal": pick([True, True, False]),
        "add_cross_attention": False,
        "pretraining_tp": 2,
        "attention_dropout": 0.3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cache": False,
        "output_router_logits": True,
        "router_jitter_noise": 0.4,
        "clip_qkv": 0.1,
        "use_qk_layernorm": True,
        "parallel_residual": True,
        "logit_scale": 0.3,
        "per_layer_config": pick([{}, {"0": {"num_key_value_heads": 4}}]),
    }


def _layer_values(draws: random.Random, num_layers: int) -> dict[str, Any]:
    """Likewise, of the keys that say what each layer is."""
    pick = draws.choice
    kinds = pick([(FULL, SLIDING), (FULL, CHUNKED), (FULL,), (FULL, "linear_attention"), (SLIDING,)])
    return {
        "num_hidden_layers": num_layers,
        "layer_types": [pick(kinds) for _ in range(pick([num_layers] * 5 + [num_layers + 1]))],
        "sliding_window": pick([5, 16, 0, 9]),
        "use_sliding_window": pick([True, True, False]),
        "max_window_layers": pick([0, 1, 2]),
        "sliding_window_pattern": pick([1, 2, 3]),
        "_sliding_window_pattern": pick([1, 2, 3]),
        "full_attention_interval": pick([1, 2, 3]),
        "no_rope_layers": [pick([0, 1]) for _ in range(num_layers)] if draws.random() < 0.9 else [],
        "no_rope_layer_interval": pick([1, 2, 3]),
        "moe_layers": draws.sample(range(num_layers), draws.randint(0, num_layers)),
        "interleave_moe_layer_step": pick([1, 2]),
        "mlp_layer_types": [pick(["dense", "sparse"]) for _ in range(num_layers)],
        "mlp_only_layers": draws.sample(range(num_layers), draws.randint(0, num_layers)),
        "decoder_sparse_step": pick([1, 2]),
        "moe_layer_freq": pick([1, 2]),
        "first_k_dense_replace": pick([0, 1, 2]),
    }


def _rotation(draws: random.Random, family: Family, half: int) -> dict[str, Any]:
    """Settings of one rotation, often with a key missing, null or too many."""
    known = [kind for kind in ROPE_TYPES if kind in family.rope.types]
    kind = draws.choice(known * 3 + ["default"] * 2 + ["su"])
    settings: dict[str, Any] = {draws.choice(["rope_type"] * 3 + ["type"]): kind}
    if kind != "default":
        settings["factor"] = draws.choice([2.0, 4, 3.5])
    if kind in ("yarn", "llama3", "longrope", "dynamic"):
        settings["original_max_position_embeddings"] = draws.choice([16, 32])
    if kind == "llama3":
        settings |= {"low_freq_factor": draws.choice([1.0, 2]), "high_freq_factor": draws.choice([4.0, 6])}
    if kind in ("longrope", "su"):
        factors = [round(draws.uniform(1.0, 4.0), 2) for _ in range(half)]
        settings |= {"short_factor": factors, "long_factor": factors}
    if kind == "yarn":
        extra = {
            "beta_fast": draws.choice([16, 8.0]),
            "beta_slow": 2.0,
            "truncate": draws.choice([True, False]),
            "attention_factor": draws.choice([0.7, 1.3]),
            "mscale": 0.7,
            "mscale_all_dim": draws.choice([0.5, 1.0]),
        }
        settings |= {key: extra[key] for key in draws.sample(sorted(extra), draws.randint(0, 4))}
    if draws.random() < 0.7:
        settings["rope_theta"] = draws.choice([100.0, 500, 9000.0])
    if draws.random() < 0.1:
        settings["partial_rotary_factor"] = draws.choice([0.5, 1.0])
    if draws.random() < 0.12:
        key = draws.choice(sorted(settings))
        if draws.random() < 0.6:
            del settings[key]
        else:
            settings[key] = None
    return settings


def _rotations(draws: random.Random, family: Family, half: int) -> dict[str, Any]:
    """No settings, or some in the style of Transformers 4, of Transformers 5, or of both."""
    old, new = "rope_scaling", "rope_parameters"
    styles: tuple[str, ...] = draws.choice([(), (new,), (new,), (old,), (new, old)])
    found: dict[str, Any] = {}
    for style in styles:
        nested = family.rope.local_theta is not None and style == "rope_parameters" and draws.random() < 0.8
        found[style] = _rotation(draws, family, half)
        if nested or draws.random() < 0.03:
            found[style] = {FULL: found[style], SLIDING: _rotation(draws, family, half)}
            if draws.random() < 0.2:
                del found[style][draws.choice([FULL, SLIDING])]
            if draws.random() < 0.2:
                found[style]["truncate"] = False
    for key in ("rope_theta", "partial_rotary_factor"):
        if draws.random() < (0.2 if key == "rope_theta" else 0.1):
            found[key] = draws.choice({"rope_theta": [100, 700.0], "partial_rotary_factor": [0.5, 1.0]}[key])
    return found


@dataclass
class Case:
    """A config.json, and what is done to the weights. label: what was drawn, for people."""

    model_type: str
    config: dict[str, Any]
    head: str = "as saved"
    label: dict[str, Any] = field(default_factory=dict)


def basis(name: str, num_layers: int, num_positions: int) -> dict[str, Any]:
    """A small configuration of a family: its sizes, and nothing that it has a usual value for."""
    family = FAMILIES[name]
    config: dict[str, Any] = {"model_type": name, "architectures": [family.architectures[0]], "dtype": "float32"}
    config |= _SIZES.get(name, _LLAMA)
    config |= {family.num_layers[0]: num_layers, family.max_positions[0]: num_positions}
    config |= {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    if family.usual_values.get("num_key_value_heads") is not None:
        config.setdefault("num_key_value_heads", 2)
    if name != "gpt2" and name != "opt":
        config.setdefault("head_dim", 8)
    return config


def draw(seed: int, only: str | None = None) -> Case:
    """The case of a seed: always the same."""
    draws = random.Random(seed)
    name = only or draws.choice(DECODERS)
    family, num_layers = FAMILIES[name], draws.randint(2, 4)
    config = basis(name, num_layers, draws.choice([48, 64, 100]))
    if "head_dim" in family.usual_values and "head_dim" not in _SIZES.get(name, {}):
        config["head_dim"] = draws.choice([8, 8, 16, 10])
        if family.usual_values["head_dim"] is None and draws.random() < 0.4:
            del config["head_dim"]
    if "sliding_window" in family.usual_values and draws.random() < 0.7:
        config["sliding_window"] = draws.choice([5, 9, 16])
    if family.state_layer:
        config["full_attention_interval"] = 2
    if name == "llama4_text":
        config |= {"attention_chunk_size": draws.choice([7, 16]), "floor_scale": draws.choice([4, 8192])}
    values, label = _values(draws, num_layers), dict[str, Any]()
    if family.has_latents:
        values["num_key_value_heads"] = 4
    own = [key for key in values if key in family.usual_values or key in family.renamed]
    other = [key for key in values if key not in own]
    for key in draws.sample(own, min(len(own), draws.choice([0, 1, 2, 3]))):
        label[key] = values[key] if draws.random() < 0.94 else None
    for key in draws.sample(other, draws.choice([0, 0, 1, 2])):
        label[key] = values[key]
    if family.position_rows is None:
        head_dim = ({**config, **label}).get("head_dim") or family.usual_values.get("head_dim") or 8
        label |= _rotations(draws, family, 4 if family.has_latents else int(head_dim * family.rope.share) // 2)
    config |= label
    needed = {*_SIZES.get(name, {}), "head_dim", "num_key_value_heads"}
    optional = [key for key in config if key in family.usual_values and key not in needed]
    if optional and draws.random() < 0.2:
        gone = draws.choice(optional)
        label[gone] = "<left out>"
        del config[gone]
    head = draws.choice(["as saved"] * 5 + ["another", "alone"])
    label["head"] = head
    if name in _WRAPPERS and (draws.random() < 0.3 or not hasattr(transformers, family.architectures[0])):
        config, label["wrapped"] = _wrapped(draws, name, config)
    return Case(name, config, head, label)


_IMAGES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN3_IMAGES = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16, "patch_size": 4}
_QWEN_IMAGES = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
_WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3", "Gemma3ForConditionalGeneration", _IMAGES | {"image_size": 8, "patch_size": 4}),
    "qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", _QWEN_IMAGES),
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VLForConditionalGeneration", _QWEN_IMAGES | _QWEN3_IMAGES),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", _QWEN_IMAGES | _QWEN3_IMAGES),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5ForConditionalGeneration", _QWEN_IMAGES),
    "qwen3_5_moe_text": ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _QWEN_IMAGES),
}
"""Models of several modalities, by their language model: model_type, class, and the configuration of their images."""


def _wrapped(draws: random.Random, name: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The configuration of a model of several modalities, and what its outer keys say."""
    kind, architecture, images = _WRAPPERS[name]
    outer: dict[str, Any] = {"tie_word_embeddings": draws.choice([True, False])} if draws.random() < 0.8 else {}
    if draws.random() < 0.3:
        outer |= {"sliding_window": 4, "rope_theta": 50.0, "hidden_size": 99, "dtype": "float32"}
    inner = {key: value for key, value in config.items() if key != "architectures"}
    parts = {"text_config": inner, "vision_config": images}
    return {"model_type": kind, "architectures": [architecture], **parts, **outer}, outer


@dataclass(frozen=True)
class Outcome:
    """kind: "same", "differs", "refused by Quire", "refused by Transformers", "refused by both" or "left out"; said:
    the reasons."""

    kind: str
    said: str = ""


def run(case: Case, directory: Path) -> Outcome:
    """Both sides' logits of one text, from one directory."""
    prompt = random_prompts([PROMPT], 61, seed=3)[0]
    reason = ""
    try:
        expected = _reference(case, directory, prompt)
    except Exception as error:  # Transformers refuses with errors of many types
        expected, reason = None, f"{type(error).__name__}: {str(error)[-150:]}"
    try:
        if not (directory / "model.safetensors").is_file():
            name = str(directory)
            outline(load_model_config(name, dtype="float32", max_model_len=None, revision=None, config_only=True))
            return Outcome("refused by Transformers", reason)
        config, model = load(directory)
        if all(layer.attention.kind == "state" for layer in config.shape.layers):
            return Outcome("left out", "no layer has attention")
        found = chunked_logits(PagedRunner(model), [prompt], chunk=13)[0]
    except UserError as error:
        kind = "refused by Quire" if expected is not None else "refused by both"
        return Outcome(kind, str(error).replace(str(directory), "")[:200] + (f" | {reason}" if reason else ""))
    if expected is None:
        return Outcome("refused by Transformers", reason)
    spread = float(expected.std())
    off = float((found - expected).abs().max()) / max(spread, 1e-9)
    return Outcome("same" if off < 2e-3 else "differs", f"off by {off:.2g} of the spread {spread:.2g}")


def _reference(case: Case, directory: Path, prompt: list[int]) -> torch.Tensor:
    """Writes the directory and computes Transformers' logits from it."""
    (directory / "config.json").write_text(json.dumps(case.config))
    model_class = getattr(transformers, case.config["architectures"][0])
    model = randomize(model_class(AutoConfig.from_pretrained(directory)), seed=len(case.label))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, len(buffer)).roll(1))
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(case.config))
    _change_head(case, directory / "model.safetensors")
    reference = model_class.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    make_choices_stable(reference)
    with torch.inference_mode():
        return reference(torch.tensor([prompt])).logits[0].float()


def _change_head(case: Case, file: Path) -> None:
    tensors = load_file(file)
    embedding = next((name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight"))), None)
    if embedding is None or case.head == "as saved" or any(name.endswith("lm_head.weight") for name in tensors):
        return
    table = tensors[embedding]
    other = torch.empty_like(table).normal_(0.0, 0.3, generator=torch.Generator().manual_seed(5))
    tensors["lm_head.weight"] = other if case.head == "another" else table.clone()
    if case.head == "alone":
        del tensors[embedding]
    save_file(tensors, file, metadata={"format": "pt"})


def outcome_of(case: Case) -> Outcome:
    directory = Path(tempfile.mkdtemp(prefix="config-fuzz-"))
    try:
        return run(case, directory)
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--family", choices=DECODERS)
    parser.add_argument("--show", default="differs,refused by Quire")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    kinds: Counter[str] = Counter()
    for seed in range(options.seed, options.seed + options.count):
        case = draw(seed, options.family)
        try:
            outcome = outcome_of(case)
        except Exception as error:
            outcome = Outcome("crash", f"{type(error).__name__}: {error}")
        kinds[outcome.kind] += 1
        if outcome.kind in (*options.show.split(","), "crash"):
            print(f"{seed} {case.model_type} {outcome.kind}: {outcome.said}\n    {json.dumps(case.label)}", flush=True)
    print(dict(kinds))


if __name__ == "__main__":
    main()
