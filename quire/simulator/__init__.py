"""Engine's scheduler and KV cache on a virtual clock; a cost model predicts each step's seconds."""
