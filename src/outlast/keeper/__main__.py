"""``python -m outlast.keeper``: how a keeper is started."""

from outlast.keeper.server import main

main()
