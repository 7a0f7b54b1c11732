"""The embedded models and their tasks: docs/test-bed.md."""

MODELS = {"tiny": "arithmetic", "tiny-programs": "programs"}  # --model -> folder
