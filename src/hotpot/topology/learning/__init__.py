"""Where updates are learned: in the main loop, or in a process of its own."""
