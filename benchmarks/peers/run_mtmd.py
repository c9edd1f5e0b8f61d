"""llama.cpp's vision encoder (tools/mtmd), for `benchmarks.peers.towers`: an mmproj with random weights in bfloat16.

A line of JSON says the tower's sizes, threads and folder; each further line is the side of a picture in pixels, and is
answered by (seconds, processor seconds, tokens) of its encoding.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy

os.environ["LLAMA_CPP_LIB_PATH"] = os.environ["MTMD_CPP_LIB"] = str(Path(sys.prefix) / "build" / "bin")
sys.path += map(str, Path(sys.prefix).glob("source/*"))
sys.path += map(str, Path(sys.prefix).glob("source/*/vendor/llama.cpp/gguf-py"))
import llama_cpp.llama_cpp as api
import llama_cpp.mtmd_cpp as mtmd
from gguf import GGMLQuantizationType, GGUFWriter


def write_tower(sizes: dict[str, Any], path: Path) -> None:
    """sizes: `vision_config` of a Qwen3-VL."""
    writer, random = GGUFWriter(path, "clip"), numpy.random.default_rng(0)
    width, inner, output = sizes["hidden_size"], sizes["intermediate_size"], sizes["out_hidden_size"]
    patch, merged = sizes["patch_size"], width * sizes["spatial_merge_size"] ** 2
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "qwen3vl_merger")
    writer.add_bool("clip.use_gelu", True)
    whole = {"embedding_length": width, "feed_forward_length": inner, "block_count": sizes["depth"]}
    whole |= {"attention.head_count": sizes["num_heads"], "projection_dim": output, "patch_size": patch}
    whole |= {"image_size": 768, "spatial_merge_size": sizes["spatial_merge_size"]}
    for name, value in whole.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5] * 3)
    deep = sizes["deepstack_visual_indexes"]
    writer.add_array("clip.vision.is_deepstack_layers", [layer in deep for layer in range(sizes["depth"])])

    def put(name: str, *shape: int, in_full: bool = False) -> None:
        values = random.normal(0, 0.02, shape).astype(numpy.float32)
        if len(shape) == 1 or in_full:
            writer.add_tensor(name, values)
            return
        halves = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)
        writer.add_tensor(name, halves.view(numpy.uint8), raw_dtype=GGMLQuantizationType.BF16)

    def linear(name: str, inputs: int, outputs: int) -> None:
        put(f"{name}.weight", outputs, inputs)
        put(f"{name}.bias", outputs)

    def norm(name: str, size: int) -> None:
        put(f"{name}.weight", size)
        put(f"{name}.bias", size)

    for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
        put(name, width, 3, patch, patch, in_full=True)
    put("v.patch_embd.bias", width)
    put("v.position_embd.weight", sizes["num_position_embeddings"], width, in_full=True)
    for layer in range(sizes["depth"]):
        for name, inputs, outputs in (
            ("attn_qkv", width, 3 * width), ("attn_out", width, width), ("ffn_up", width, inner),
            ("ffn_down", inner, width),
        ):  # fmt: skip
            linear(f"v.blk.{layer}.{name}", inputs, outputs)
        norm(f"v.blk.{layer}.ln1", width)
        norm(f"v.blk.{layer}.ln2", width)
    for layer in deep:
        norm(f"v.deepstack.{layer}.norm", merged)
        linear(f"v.deepstack.{layer}.fc1", merged, merged)
        linear(f"v.deepstack.{layer}.fc2", merged, output)
    norm("v.post_ln", width)
    linear("mm.0", merged, merged)
    linear("mm.2", merged, output)
    finish(writer)


def write_vocabulary(path: Path) -> None:
    """Bytes as tokens: mtmd writes marks around a picture with a text model's vocabulary, and needs no more of it."""
    writer = GGUFWriter(path, "qwen3vl")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *[6] * 256])
    finish(writer)


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_tower(tower: Path, vocabulary: Path, threads: int) -> Any:
    params = api.llama_model_default_params()
    params.vocab_only = True
    model = api.llama_model_load_from_file(str(vocabulary).encode(), params)
    of_tower = mtmd.mtmd_context_params_default()
    of_tower.use_gpu, of_tower.n_threads = False, threads
    return mtmd.mtmd_init_from_file(str(tower).encode(), model, of_tower)


def encode(context: Any, side: int) -> tuple[float, float, int]:
    pixels = numpy.random.default_rng(0).integers(0, 256, 3 * side * side, numpy.uint8)
    bitmap = mtmd.mtmd_bitmap_init(side, side, (mtmd.c_uint8 * len(pixels)).from_buffer(pixels))
    marker, chunks = mtmd.mtmd_default_marker(), mtmd.mtmd_input_chunks_init()
    text = mtmd.mtmd_input_text(marker, len(marker), False, True)
    bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
    if mtmd.mtmd_tokenize(context, chunks, text, bitmaps, 1):
        raise RuntimeError("mtmd cannot read the picture")
    found = [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
    (image,) = [each for each in found if mtmd.mtmd_input_chunk_get_type(each) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE]
    since, of_process = time.perf_counter(), time.process_time()
    if mtmd.mtmd_encode_chunk(context, image):
        raise RuntimeError("mtmd cannot encode the picture")
    took = time.perf_counter() - since, time.process_time() - of_process
    num_tokens = mtmd.mtmd_input_chunk_get_n_tokens(image)
    mtmd.mtmd_input_chunks_free(chunks)
    mtmd.mtmd_bitmap_free(bitmap)
    return *took, num_tokens


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes to its standard output
    settings = json.loads(sys.stdin.readline())
    folder = Path(settings["folder"])
    tower, vocabulary = folder / "mmproj.gguf", folder / "vocabulary.gguf"
    write_tower(settings["vision"], tower)
    write_vocabulary(vocabulary)
    context = open_tower(tower, vocabulary, settings["threads"])
    if not context:
        raise RuntimeError("mtmd cannot load the tower")
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(encode(context, int(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
