"""From plans to stored trajectories, and what departed from the frozen sampling parameters on the way."""
