"""Configuration: `options.EngineOptions` is what the user writes. `resolve.resolve()` turns it into an
`engine.EngineConfig` of frozen slices or raises ConfigError. No module here imports torch. Later discoveries (number of
blocks, chosen kernels) are never written back."""
