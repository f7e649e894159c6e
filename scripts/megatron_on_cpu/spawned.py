"""Main module of the processes that Megatron spawns (see ``forked_ranks``); importing it installs the redirection."""

import torch

from megatron_on_cpu import redirect
from megatron_on_cpu.process import die_with_parent

die_with_parent()
torch.set_num_threads(1)
redirect.install()
