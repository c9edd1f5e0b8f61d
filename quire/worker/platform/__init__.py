"""The worker of a device with memory and streams of its own: a step is enqueued, its result is waited for later."""
