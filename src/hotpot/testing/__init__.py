"""Public fakes and builders: what a test of a part, or of a user's plug-in, needs in place of the other parts.

``records``   valid rows and trajectories with jitter
"""
