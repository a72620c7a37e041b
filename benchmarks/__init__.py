"""One script per number that the README promises; each prints a table and one JSON line."""
