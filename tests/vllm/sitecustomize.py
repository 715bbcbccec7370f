"""Makes torchvision importable in the environment of `make test-vllm`, where this folder is on PYTHONPATH.

The torchvision that the registry has declares fake versions of two operators that are not there beside a CPU build of
torch, and its import then fails. vLLM needs its pictures, not these operators: a declaration is enough. vLLM starts
further processes of its own, which is why this is not a script that starts the server.
"""

import sys
from importlib.abc import MetaPathFinder


class DeclareOperators(MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

    def find_spec(self, name, path=None, target=None):
        """None: the import goes on as it would."""
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


finder = DeclareOperators()
sys.meta_path.insert(0, finder)
