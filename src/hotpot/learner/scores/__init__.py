"""What a model says of the tokens of a pass: log-probabilities, values, distance from the reference."""
