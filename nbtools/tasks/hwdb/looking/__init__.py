"""What was read: pictures and tables."""
