"""Configuration: frozen slices, resolved once from the options a user wrote.

`options.EngineOptions` is what the user writes (Python, command line, wire); `resolve.resolve()` turns it into an
`engine.EngineConfig` of frozen slices or raises ConfigError. What is discovered later (number of blocks, chosen
kernels) is a return value somewhere else and never written back here.
"""
