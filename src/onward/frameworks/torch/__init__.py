"""PyTorch runs (module, loss, optimizer, scheduler) as training models, and back."""

from onward.frameworks.torch.capture import from_torch
from onward.frameworks.torch.forward import TorchTraining, to_torch
from onward.frameworks.torch.module import to_module
from onward.frameworks.torch.module_capture import capture_module

__all__ = ["TorchTraining", "capture_module", "from_torch", "to_module", "to_torch"]
