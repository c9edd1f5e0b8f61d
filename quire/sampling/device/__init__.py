"""The sampler of a device: everything that `quire.sampling` does, enqueued without waiting for anything."""
