"""`outlast run`: torch's agent, with our rendezvous store, our judgement and our exit codes."""
