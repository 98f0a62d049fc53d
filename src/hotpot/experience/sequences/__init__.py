"""Trajectories as the learner trains on them: segments, and the pieces a long one is cut to."""
