"""The version, alone in a file: the build back end and `quire --version` read it without importing the package."""

__version__ = "0.1.0"
