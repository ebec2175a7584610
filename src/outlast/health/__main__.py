"""``python -m outlast.health``: how a watcher is started."""

from outlast.health.watcher import main

main()
