"""Rewards and values in, advantages out: pure functions, each with its paper; no model, no batch."""
