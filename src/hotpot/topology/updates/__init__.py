"""One update: what it learns from, when it has enough, and what is recorded of it."""
