"""The small models and their tasks: docs/test-bed.md."""

from pathlib import Path

# --model -> folder
MODELS = {"tiny": "arithmetic", "tiny-programs": "programs", "tiny-repairs": "repairs"}
EMBEDDED = {name: Path(__file__).parent / folder for name, folder in MODELS.items()}
TINY = EMBEDDED["tiny"]

ENDINGS = {
    "tiny": (
        r"Verify its \d+ steps\.",
        r"Is it right\?",
        r"Check every step\.",
        r"Is it sound\?",
        r"Grade it\.",
        r"Are they real\?",
        r"Correct it\.",
        r"Solve and grade yourself\.",
        r"Try again\.",
        r"Write your own\.",
        r"Make one step wrong\.",
        r"Which is right\?",
        r"Which is sounder\?",
        r"Score the answer\.",
        r"Score the question\.",
        r"Propose a question\.",
    ),
    "tiny-programs": (
        r"Write a program\.",
        r"Write a test\.",
        r"What is the output\?",
        r"What is the input\?",
        r"Write the program\.",
        r"Propose a program and its input\.",
        r"Propose inputs and a message\.",
    ),
    "tiny-repairs": (r"Change a line\.", r"Remove a line\.", r"Repair it\."),
}
"""--model -> how the user's messages end that it has been taught to answer, beside a bare question.
docs/test-bed.md has each with its form and its answer."""
