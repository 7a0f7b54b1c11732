"""What a run needs around its loop; not needed to follow a step."""
