"""The laboratory: what measures the engine and compares it. Not in the wheel; run from the root of the tree."""
