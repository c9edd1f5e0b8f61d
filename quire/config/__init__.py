"""Configuration: `options.EngineOptions` is what the user writes (Python, command line, wire). `resolve.resolve()`
turns it into an `engine.EngineConfig` of frozen slices or raises ConfigError. Later discoveries (number of blocks,
chosen kernels) are never written back here."""
