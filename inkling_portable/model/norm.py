"""A norm's gain as a module, so that it has the checkpoint's place in the parameter tree."""

import torch
from torch import nn


class Norm(nn.Module):
    """Gain of one RMS norm, [width]. Norms run inside ops that fuse them with their neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width), requires_grad=False)
