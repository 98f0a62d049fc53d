"""What a run is made of: its ingredients as read and checked, its engine, its threads."""
