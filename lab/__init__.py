"""How the small models and every result were made: README.md."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
EVIDENCE = ROOT / "lab" / "evidence"
PICTURES = ROOT / "docs" / "pictures"
