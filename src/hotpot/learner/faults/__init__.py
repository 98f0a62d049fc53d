"""What is wrong with an optimiser step that cannot be taken, and whose tokens did it."""
