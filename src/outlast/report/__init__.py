"""What people read: reports of a job, lines on a terminal, pictures of plans.

``facts``     what every report says, computed once from the ledger; data for ``--json``
``findings``  what somebody should look at: slow ranks, a bad machine, silences, warnings
``forecast``  predicted and measured, and what storms of failures have cost
``money``     what its machines cost, each at the price of its kind
``text``      the report as lines for a terminal; the console on which other commands print too
``page``      the report as one page that opens in a browser
``compare``   several jobs side by side, as data and in rows
``compare_page``  the comparison as a page
``series``    what the pages draw, as numbers: attempts, losses, saves, failures, which rank is slow
``plot``      its pictures: curves, dots and axes in pixels
``chart``     pictures of what ``outlast plan`` answers; no ledger is needed for these
"""
