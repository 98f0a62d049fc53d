"""Hotpot: agentic reinforcement learning in which every number is traceable."""

__version__ = "0.1.0"
