"""What a run needs around its loop. A reader can follow a step without this folder."""
