"""State that survives: commits (tensor files and a manifest), the background writer, and the run directory.

Knows numpy and fsspec; does not know torch, Ray or the run loop.  What a commit means is said by the layers above,
that it is whole or absent is said here.
"""
