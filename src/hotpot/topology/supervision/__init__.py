"""Who is asked to end, and why."""
