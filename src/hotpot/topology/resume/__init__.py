"""Where a run stood: checkpoints, its history, and the way back to its last recorded update."""
