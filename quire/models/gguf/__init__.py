"""GGUF checkpoints: quantised blocks to integer weights, tensors under Hugging Face's names."""
