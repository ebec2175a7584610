"""Run a command in a process whose surroundings are not the usual ones: COMMAND [ARGUMENT…]."""

import os
import resource
import signal
import sys

os.umask(0o27)
os.nice(3)
resource.setrlimit(resource.RLIMIT_NOFILE, (700, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
signal.signal(signal.SIGHUP, signal.SIG_IGN)
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
