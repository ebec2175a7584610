"""One connection to a store, one warning of torch's for its caller, one error of the script's."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch._C._warn()  # TORCH_WARN
raise ValueError("the script's own error")
