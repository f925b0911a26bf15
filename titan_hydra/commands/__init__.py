"""One file for each word of `titan`."""
