"""Native kernels for ONNX Runtime on the CPU, and what puts them into a step.

Nothing native is ever written into a file: they are chosen when an engine is started, and where the library is missing,
the plain graph runs. See docs/decisions/0045-native-kernels.md.
"""

from onward.kernels.in_place import update_in_place
from onward.kernels.library import DOMAIN, library
from onward.kernels.rules import find_rule
from onward.kernels.selection import can_use_kernels, finish_with_kernels, use_kernels
from onward.lowering.step import Passes

__all__ = ["DOMAIN", "PASSES", "find_rule", "finish_with_kernels", "library", "update_in_place", "use_kernels"]

PASSES = Passes(can_use_kernels, use_kernels, find_rule, finish_with_kernels)
"""What ONNX Runtime's engine adds to the lowering of a step."""
