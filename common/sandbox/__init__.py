"""Model-written programs, run so that they cannot hurt the machine. See pool.py."""

from common.sandbox.pool import LAYERS, Result, Sandbox, Status, same_output

__all__ = ["LAYERS", "Result", "Sandbox", "Status", "same_output"]
