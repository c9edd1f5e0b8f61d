"""Images for models: decoding, processing, hashing. Imports no torch, and Pillow only to decode."""
