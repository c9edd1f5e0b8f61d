"""Configuration: the user's `options.EngineOptions`, which `resolve.resolve()` turns into an `engine.EngineConfig` of
frozen slices or raises ConfigError. No module here imports torch."""
