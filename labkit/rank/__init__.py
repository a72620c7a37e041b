"""Everything in this package runs inside a rank."""
