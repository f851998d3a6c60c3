"""Architectures, one module each. Nothing here knows of tasks, files on disk, or the command line."""
