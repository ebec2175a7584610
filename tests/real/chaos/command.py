"""The command that ckpt-chaos starts: KILLS HOW OUT. It has the test start a life of the job.

What the test starts is forked with torch loaded: an interpreter that imports it takes four times as
long as all else in such a life. Started with ``python -I``, this is no process that the tool arms.
"""

import json
import os
import socket
import sys

ask = socket.socket(socket.AF_UNIX)
ask.connect(os.environ["CHAOS_FLOOR"])
with ask, ask.makefile("rw") as stream:
    told = {name: text for name, text in os.environ.items() if name.startswith("CKPT_CHAOS_")}
    stream.write(json.dumps([sys.argv[1:], told | {"PYTHONPATH": os.environ["PYTHONPATH"]}]) + "\n")
    stream.flush()
    code, text = json.loads(stream.readline())
print(text)
sys.exit(code)
