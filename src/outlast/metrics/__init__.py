"""Metrics: what Prometheus, or anything that reads its format, sees of a running job.

==================  =============================================================================
module              what it does
==================  =============================================================================
``table``           each metric: its name, type, labels and meaning; documents are made of it
``folded``          the job's metrics, from its ledger, each event read once
``machine``         this machine's, from what its workers leave in memory
``exposition``      both as text, in OpenMetrics or Prometheus' own format; the text file
``live``            the report's page, on the same port
``news``            what people are told of a job, on the same fold
``teller``          when they are told, by which machine, and what was told
``server``          the port: bounded in connections, time and size of a request
(itself)            the exporter's process, one per machine and job
``alerts``          rules for Prometheus, which come with the package
``dashboard``       one dashboard for Grafana, made of the table
==================  =============================================================================

Guarantees: it is a process of its own, niced, that reads files and memory and writes neither
(but for ``JOB/tell``, where it notes what it has told, and the ledger's ``not_told``): what goes
wrong in it, or is done to it, touches nothing that trains or saves. ``health/exporter.py``
starts it and says in one line what keeps it from being started.

Rejected: a thread in the keeper (a thousand connections would wait for the lock that saves hold);
metrics pushed by workers (a worker that hangs pushes nothing, and that is what has to be seen).
"""
