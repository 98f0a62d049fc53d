"""Log-probabilities, values and advantages in, losses out: pure functions, each with its paper; no model, no batch."""
