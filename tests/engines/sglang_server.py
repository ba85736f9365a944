"""SGLang's launcher, for routes on a CPU: their buffer must not be registered with CUDA.

Processes that it spawns import this file again, so the change is at its top.
"""

import os
import sys

import sglang.srt.mem_cache.pool_host.common as pool

pool._cuda_host_register = lambda *_args, **_options: None

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
