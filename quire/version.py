"""Version, in a file that the build back end and `quire --version` read without importing the package."""

__version__ = "0.1.0"
