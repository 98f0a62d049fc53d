"""Public fakes and builders: what a test of a part, or of a user's plug-in, needs in place of the other parts.

``records``   valid rows and trajectories with jitter
``engine``    a fake engine that samples from a script
``environments``  a scripted environment that fails and misbehaves on request
``coin``      a tiny environment that a tiny policy can play
``contracts_engine``  the contract of an engine, as functions
``contracts_environment``  the contract of an environment, as functions
``pretrained``  a real pretrained model as a folder, made once
``object_server``  a real S3 server on loopback ports that can be killed, hung and restarted
"""
