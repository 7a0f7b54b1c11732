"""An optimiser step with several players: everything that the weights depend on. Start at
cotrainer.py. Of this project, the files of this folder import only one another; so a reader who has
finished them has read everything that acts on the weights.
"""
