"""The same numbers sooner."""
