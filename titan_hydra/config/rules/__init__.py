"""What cells must keep, by subject."""
