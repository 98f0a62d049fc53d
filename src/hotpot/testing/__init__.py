"""Public fakes and builders: what a test of a part, or of a user's plug-in, needs in place of the other parts.

``records``   valid rows and trajectories with jitter
``engine``    a fake engine that samples from a script
``defaulting``  an engine that samples with defaults of its own, whatever it is asked
``toy_weights``  weights from whose log-probabilities their version is read
``environments``  a scripted environment that fails and misbehaves on request
``coin``      a tiny environment that a tiny policy can play
``contracts_engine``  the contract of an engine, as functions
``contracts_environment``  the contract of an environment, as functions
``pretrained``  a real pretrained model as a folder, made once
``faults``    one injector of faults, for every campaign
``latency``   environments that wait by a known law
``object_server``  a real S3 server on loopback ports that can be killed, hung and restarted
"""
