"""What is tried once, before anything is learned from a set-up."""
