"""Public fakes and builders: what a test of a part, or of a user's plug-in, needs in place of the other parts.

``records``   valid rows and trajectories with jitter
``engine``    a fake engine that samples from a script
``contracts_engine``  the contract of an engine, as functions
"""
