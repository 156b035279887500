"""Gapless: an LLM server in which CPU and GPU never wait for each other."""

__version__ = "0.1.0"
