"""Pictures as models take them: decoding, processing, hashing. Imports no torch, and Pillow only where it decodes."""
