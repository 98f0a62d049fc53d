"""Parts of the learner, measured alone."""
