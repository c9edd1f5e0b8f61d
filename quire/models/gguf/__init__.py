"""GGUF checkpoints: quantised blocks to weights, tensors under Hugging Face's names."""
