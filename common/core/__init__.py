"""An optimiser step with several players: everything that the weights depend on. Start at
cotrainer.py. This folder imports torch, transformers, TRL, PEFT and nothing of ours that is not in
it, so a reader of these files has read all that acts.
"""
